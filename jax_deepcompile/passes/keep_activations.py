"""Activations that the backward loop would compute again, kept from the forward loop as stacks.

Before, of a checkpointed layer::

    scan(x, t): h = dot(x, W[t]); y = gelu(h) -> y, x
    scan(g, t): h = dot(x[t], W[t]); ... h ...

After::

    scan(x, t): h = dot(x, W[t]); y = gelu(h) -> y, x, h
    scan(g, t): ... h[t] ...

Checkpointing is how a user makes a step fit; where memory is left, what takes longest to compute again for the bytes
it has is better kept.

Guarantees: what is kept is the value that would have been computed again; nothing else is computed more often; a stack
lives from the forward loop to the end of the backward one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_deepcompile._jax_compat import closed_consts, eval_local, new_jaxpr, new_var, open_jaxpr
from jax_deepcompile.analysis.dataflow import needed_for, renamed, slim_barriers
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.analysis.recomputed import Activation, recomputed_activations
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Replacement, replace_equations, rescan, split_operands


@dataclass(frozen=True)
class KeptActivations:
    """What one loop leaves of every layer for another one.

    Attributes:
      forward: the name of the loop that computes it.
      backward: the name of a later loop in the same place, that would compute the same again.
      values: positions among the activations that both do.
    """

    forward: str
    backward: str
    values: tuple[int, ...]


def shared_activations(program: Program, forward: Loop, backward: Loop) -> tuple[Activation, ...]:
    """What ``forward`` could leave for ``backward``, which comes later in the same place."""
    around = {loop.path: open_jaxpr(loop.eqn.params["jaxpr"]) for loop in find_loops(program.jaxpr)}
    scope = around.get(forward.path[:-1], open_jaxpr(program.jaxpr))
    return recomputed_activations(scope, forward.eqn, backward.eqn)


def keep_activations(program: Program, mesh: AnyMesh, choices: Sequence[KeptActivations]) -> Program:
    """``program`` with the chosen activations computed by the forward loops only; the same object if there are none.

    Args:
      program: in the local view.
      mesh: its mesh.
      choices: each loop in at most one of them.
    """
    loops = {loop.name: loop for loop in find_loops(program.jaxpr)}
    replacements: dict[int, Replacement] = {}
    for choice in choices:
        forward, backward = loops[choice.forward], loops[choice.backward]
        shared = shared_activations(program, forward, backward)
        chosen = tuple(each for index, each in enumerate(shared) if index in choice.values)
        if chosen:
            bridge = _Bridge(chosen)
            replacements |= {id(forward.eqn): bridge.write, id(backward.eqn): bridge.read}
    return replace_equations(program, mesh, replacements) if replacements else program


def given_activations(body: Any, kept: Sequence[Activation]) -> Any:
    """A backward loop's body that does not compute ``kept``: they come last among its inputs, its constants first."""
    given = {activation.again: new_var(activation.again.aval) for activation in kept}
    outvars = [renamed(atom, given) for atom in body.outvars]
    eqns = [eqn.replace(invars=[renamed(atom, given) for atom in eqn.invars]) for eqn in body.eqns]
    eqns = slim_barriers(needed_for(eqns, outvars), outvars)
    return new_jaxpr([*body.constvars, *body.invars, *given.values()], outvars, eqns)


@dataclass
class _Bridge:
    """The stacks on their way from one loop to the other, while both are traced."""

    kept: tuple[Activation, ...]
    stacks: list = field(default_factory=list)

    def write(self, eqn, operands: list) -> list:
        body = open_jaxpr(eqn.params["jaxpr"])
        inner = new_jaxpr(
            [*body.constvars, *body.invars], [*body.outvars, *(each.first for each in self.kept)], body.eqns
        )
        made = _run(eqn, inner, operands, [])
        self.stacks = made[len(eqn.outvars) :]
        return made[: len(eqn.outvars)]

    def read(self, eqn, operands: list) -> list:
        inner = given_activations(open_jaxpr(eqn.params["jaxpr"]), self.kept)
        return _run(eqn, inner, operands, self.stacks)


def _run(eqn, body: Any, operands: list, more: list) -> list:
    consts, carry, stacks = split_operands(eqn, operands)
    consts = [*closed_consts(eqn.params["jaxpr"]), *consts]
    return rescan(eqn, lambda carry, layer: eval_local(body, [*consts, *carry, *layer]), carry, [*stacks, *more])
