"""Parameters that the forward loop gathers, kept for the backward loop as stacks.

Before::

    scan(t): W = all_gather(w[t]); ...
    scan(t): W = all_gather(w[t]); ...

After::

    V = scan(t): W = all_gather(w[t]); ... -> W
    scan(t): W = V[t]; ...

What is kept is a share of every layer, so every iteration of the backward loop has less to wait for. Keeping whole
layers instead leaves the network idle while those run.

Guarantees: values are bitwise the same; nothing is gathered more often; a stack lives from the forward loop to the end
of the backward one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_deepcompile._jax_compat import new_jaxpr, open_jaxpr
from jax_deepcompile.analysis.dataflow import given
from jax_deepcompile.analysis.gathers import Gather
from jax_deepcompile.analysis.leading import scan_along_leading_dimension
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.analysis.names import gather_names
from jax_deepcompile.analysis.stacks import sliced_gathers
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Compute, rerun
from jax_deepcompile.ir.rewrite import renamed, unguarded
from jax_deepcompile.transforms.decision import Decision, listed, positions, replace_pairs


@dataclass(frozen=True)
class SavedGathers(Decision, kind="save_gathered", about=("forward", "backward")):
    """What one loop saves gathered for another one.

    Attributes:
      forward: the loop that gathers.
      backward: a later loop in the same place, that would gather the same again.
      gathers: parameters that both gather slices of.
    """

    forward: str
    backward: str
    gathers: tuple[str, ...]

    def describe(self) -> str:
        return f"{self.forward}: saves {listed(self.gathers, self.forward)} gathered for {self.backward}"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[SavedGathers]) -> Program:
        what = "saves gathered what is gathered by", "saves gathered parameters for"
        return replace_pairs(program, mesh, decisions, what, _bridge)


@dataclass(frozen=True)
class Shared:
    """What two loops in the same place gather of the same stacks.

    Attributes:
      gathers: pairs, one for each value: the gathers of it in the first and in the second.
    """

    forward: Any
    backward: Any
    gathers: tuple[tuple[tuple[Gather, ...], tuple[Gather, ...]], ...]


def shared_gathers(program: Program, forward: Loop, backward: Loop) -> Shared:
    """What ``forward`` could save gathered for ``backward``, which comes later in the same place."""
    around = {loop.path: loop.body for loop in find_loops(program)}
    sources = unguarded(around.get(forward.path[:-1], open_jaxpr(program.jaxpr)))

    def groups(loop: Loop) -> tuple[Any, dict[Any, tuple[Gather, ...]]]:
        eqn = scan_along_leading_dimension(loop.eqn)
        operands = Scan(eqn).operands.xs
        read = dict(zip(loop.slices, operands, strict=True))
        found = {
            (renamed(read[group[0].sources[0]], sources), group[0].key[1:]): group for group in sliced_gathers(eqn)
        }
        return Scan(eqn).body, found

    (ahead, first), (again, second) = groups(forward), groups(backward)
    return Shared(ahead, again, tuple((first[key], second[key]) for key in first if key in second))


def shared_names(program: Program, forward: Loop, shared: Shared) -> list[str]:
    """What ``shared.gathers`` are called."""
    return gather_names(program, forward.path, [ahead[0] for ahead, _ in shared.gathers])


def _bridge(program: Program, forward: Loop, backward: Loop, choice: SavedGathers) -> tuple[Compute, Compute] | None:
    shared = shared_gathers(program, forward, backward)
    what = f"saves gathered from {choice.forward!r} for {choice.backward!r}"
    places = positions(choice.gathers, shared_names(program, forward, shared), what)
    chosen = [shared.gathers[place] for place in sorted(places)]
    if not chosen:
        return None
    rest = given(shared.backward, [[gather.result for gather in group] for _, group in chosen])
    bridge = Bridge(shared.forward, [group[0].result for group, _ in chosen], rest)
    return bridge.write, bridge.read


@dataclass
class Bridge:
    """Stacks on their way from one loop to another, while both are traced.

    Attributes:
      body: of the first loop.
      saved: what each of its iterations saves.
      given: the body of the second, whose constants are its first inputs, and slices of what was saved its last.
      stacks: of what was saved.
    """

    body: Any
    saved: Sequence
    given: Any
    stacks: list = field(default_factory=list)

    def write(self, eqn, operands: list) -> list:
        body = self.body
        inner = new_jaxpr([*body.constvars, *body.invars], [*body.outvars, *self.saved], body.eqns)
        made = rerun(eqn, inner, operands)
        self.stacks = made[len(eqn.outvars) :]
        return made[: len(eqn.outvars)]

    def read(self, eqn, operands: list) -> list:
        return rerun(eqn, self.given, operands, self.stacks)
