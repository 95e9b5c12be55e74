"""Activations that backward would compute again, kept from forward: those of layer loops as stacks.

Before, of a loop over checkpointed layers::

    scan(x, t): h = dot(x, W[t]); y = gelu(h) -> y, x
    scan(g, t): h = dot(x[t], W[t]); ... h ...

After::

    scan(x, t): h = dot(x, W[t]); y = gelu(h) -> y, x, h
    scan(g, t): ... h[t] ...

Checkpointing is how a user makes a step fit; where memory is left, what takes longest to compute again for the bytes
it has is better kept.

Guarantees: what is kept is the value that would have been computed again; nothing is computed more often; a stack lives
from the forward loop to the end of the backward one, what is outside of loops to its last use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import given, with_names
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.analysis.names import value_names
from jax_deepcompile.analysis.recomputed import Activation, Place
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Compute
from jax_deepcompile.transforms.decision import Decision, listed, positions, replace_bodies, replace_pairs
from jax_deepcompile.transforms.save_gathered import Bridge


@dataclass(frozen=True)
class KeptActivations(
    Decision,
    kind="keep_activations",
    after=("rematerialize", "rematerialize_segments"),
    about=("forward", "backward"),
):
    """What is computed in one place and used in another that would compute it again.

    Attributes:
      forward: the loop that computes it.
      backward: a later loop in the same place, that would compute the same again for every layer. Where one iteration
        of a loop would compute something twice both are its name, and for what is outside of loops empty.
      values: what would be computed twice, by the scope that computes it first.
    """

    forward: str
    backward: str
    values: tuple[str, ...]

    def describe(self) -> str:
        if self.forward != self.backward:
            return f"{self.forward}: keeps {listed(self.values, self.forward)} for {self.backward}"
        return f"{self.forward or 'outside of loops'}: keeps {', '.join(self.values)} until they are used again"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[KeptActivations]) -> Program:
        pairs = [each for each in decisions if each.forward != each.backward]
        alone = {each.forward: each for each in decisions if each.forward == each.backward}

        def once(jaxpr: Any, name: str) -> Any:
            flat = open_jaxpr(jaxpr)
            twice = _chosen(flat, Place(flat).repeated(), alone[name])
            return with_names(flat, {var: each.first for each in twice for var in each.again})

        what = "keeps activations of"
        return replace_bodies(replace_pairs(program, mesh, pairs, (what, what), _bridge), mesh, alone, what, once)


def _bridge(program: Program, forward: Loop, backward: Loop, choice: KeptActivations) -> tuple[Compute, Compute] | None:
    places = {loop.path: loop.scan.closed for loop in find_loops(program)} | {(): program.jaxpr}
    shared = Place(places[forward.path[:-1]]).shared(forward.eqn, backward.eqn)
    kept = _chosen(shared.forward, shared.activations, choice)
    if not kept:
        return None
    rest = given(shared.backward, [activation.again for activation in kept])
    bridge = Bridge(shared.forward, [activation.first for activation in kept], rest)
    return bridge.write, bridge.read


def activation_names(body: Any, activations: Sequence[Activation], outside_of_loops: bool = False) -> tuple[str, ...]:
    """What ``activations`` are called, which ``body`` has first."""
    names = value_names(body, phased=outside_of_loops)
    return tuple(names[each.first] for each in activations)


def _chosen(body: Any, activations: Sequence[Activation], choice: KeptActivations) -> tuple[Activation, ...]:
    known = activation_names(body, activations, outside_of_loops=not choice.forward)
    where = repr(choice.forward) if choice.forward else "code outside of loops"
    return tuple(activations[place] for place in sorted(positions(choice.values, known, f"keeps from {where}")))
