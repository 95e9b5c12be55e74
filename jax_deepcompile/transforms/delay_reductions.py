"""Reductions at the end of an iteration that run in the next one.

Gradients of a microbatch's first layers are ready last: reducing them is waited for, with nothing left of the iteration
to hide under. Where the result is only added to what the loop carries, the next iteration can do both.

Before, in a loop that carries the sum ``s``::

    p = dot(x, y); s = s + reduce_scatter(p)

After, where it carries ``q`` too, which is zero at first::

    s = s + reduce_scatter(q); p = dot(x, y); q = p

and after the loop once more ``s = s + reduce_scatter(q)``. The first iteration, which has nothing to reduce for one
before it, may run apart, before the loop: what is gathered once for all has its compute to hide under.

Guarantees: sums are added up in the same order, to the same values up to the sign of zero; unless the first iteration
is apart, each such reduction is done once more, of zeros. Apart, what the loop slices and stacks is copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, eval_local, new_jaxpr
from jax_deepcompile.analysis.dataflow import needed_for, slim_barriers, variables
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.analysis.names import reduction_names
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import ADDITIONS, KEEPS_ZERO, Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Compute, rescan
from jax_deepcompile.ir.traversal import free_variables, reached_from
from jax_deepcompile.transforms.decision import Decision, loop_named, positions, refused, replace_loops

IN_LOOPS = ("stack_collectives", "save_gathered", "keep_activations", "pipeline_loops", "keep_gathered")
"""The kinds of decisions that change what loops carry."""


@dataclass(frozen=True)
class DelayedReductions(Decision, kind="delay_reductions", after=IN_LOOPS, about=("loop",)):
    """What one loop reduces an iteration later.

    Attributes:
      sums: of what it carries, the sums whose last terms are reduced then; by the parameters that they update.
      first_apart: whether the first iteration runs before the loop.
    """

    loop: str
    sums: tuple[str, ...]
    first_apart: bool = False

    def describe(self) -> str:
        said = [f"reduces {', '.join(self.sums)} in the next iteration"] * bool(self.sums)
        return f"{self.loop}: {', '.join([*said, *['runs its first iteration apart'] * self.first_apart])}"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[DelayedReductions]) -> Program:
        ways = {}
        for each in decisions:
            loop = loop_named(program, each.loop, "delays reductions of")
            sums = sum_names(program, loop)
            places = positions(each.sums, list(sums), f"delays in {each.loop!r} the reduction of")
            inside = [other.name for other in find_loops(program) if other.is_inside(loop)]
            if each.first_apart and inside:
                raise refused(f"it runs the first iteration of {each.loop!r} apart, which has {inside[0]!r} in it")
            if places or each.first_apart:
                delayed = [list(sums.values())[place] for place in places]
                ways[each.loop] = partial(delaying, sums=delayed, first_apart=each.first_apart)
        return replace_loops(program, mesh, ways)


def sum_names(program: Program, loop: Loop) -> dict[str, int]:
    """By what they are called the positions of those sums in what ``loop`` carries that ``find_terms`` finds."""
    found = list(find_terms(loop.eqn))
    return dict(zip(reduction_names(program, loop, found), found, strict=True))


@dataclass(frozen=True)
class Term:
    """What an iteration adds to a sum that it carries.

    Attributes:
      position: of the sum in the carry.
      eqns: reduce it, and add it; all are zero, or change nothing, where what they read is zero.
      pending: what they read besides the sum.
    """

    position: int
    eqns: tuple
    pending: tuple

    @property
    def reductions(self) -> list:
        return [eqn for eqn in self.eqns if eqn.primitive.name == "reduce_scatter"]


def find_terms(eqn) -> dict[int, Term]:
    """By position in the carry of a ``scan``, the terms that are reduced and then only added to what it carries."""
    scan, body = Scan(eqn), Scan(eqn).body
    places = {var: place for place, each in enumerate(body.eqns) for var in each.outvars}
    readers = Counter(atom for each in body.eqns for atom in set(variables(each.invars)))
    readers.update(variables(body.outvars))
    found = {}
    for position, (before, out) in enumerate(zip(scan.inputs.carry, scan.outputs.carry, strict=True)):
        if isinstance(out, jex.Literal) or (readers[before], readers[out]) != (1, 1) or out not in places:
            continue
        if _adds_to(before, body.eqns[places[out]]):
            eqns = _moved(body.eqns, places[out], before, places, readers)
            if len(eqns) > 1:
                pending = tuple(var for var in free_variables(eqns, [out]) if var is not before)
                found[position] = Term(position, eqns, pending)
    return found


def _adds_to(var, eqn) -> bool:
    """Whether ``eqn`` adds something else to ``var``, or takes it off."""
    if [atom is var for atom in eqn.invars].count(True) != 1:
        return False
    return eqn.primitive.name in ADDITIONS or (eqn.primitive.name == "sub" and eqn.invars[0] is var)


def _moved(eqns: Sequence, last: int, before: Any, places: dict, readers: Counter) -> tuple:
    """The addition at ``last``, and before it the reductions, and what follows them, that nobody else reads."""
    moved, waiting = {last}, [atom for atom in variables(eqns[last].invars) if atom is not before]
    while waiting:
        var = waiting.pop()
        eqn = eqns[places[var]] if var in places else None
        if eqn is None or readers[var] != 1 or len(eqn.outvars) != 1 or not _keeps_zero(eqn):
            continue
        moved.add(places[var])
        if eqn.primitive.name != "reduce_scatter":
            waiting += variables(eqn.invars)
    ordered = [eqns[place] for place in sorted(moved)]
    reduced = {var for eqn in ordered if eqn.primitive.name == "reduce_scatter" for var in eqn.outvars}
    reached = reached_from(ordered, reduced)
    return tuple(eqn for eqn in ordered if eqn is eqns[last] or reached.intersection(eqn.outvars))


def _keeps_zero(eqn) -> bool:
    literals = [place for place, atom in enumerate(eqn.invars) if isinstance(atom, jex.Literal)]
    if eqn.primitive.name in ("mul", "div"):
        sides = ([0], [1]) if eqn.primitive.name == "mul" else ([1],)
        factor = eqn.invars[literals[0]].val if literals in sides else 0
        return np.ndim(factor) == 0 and bool(np.isfinite(factor)) and factor != 0
    return eqn.primitive.name in KEEPS_ZERO and not literals


def delaying(loop: Loop, sums: Sequence[int], first_apart: bool = False) -> Compute:
    """The way to run ``loop`` that reduces in the next iteration what is added to ``sums``, positions in its carry."""
    found = find_terms(loop.eqn)
    terms = [found[position] for position in sums]
    pending = _read(terms)
    adding, rest = _pieces(loop.eqn, terms)

    def add(carry: list, left: list) -> list:
        added = eval_local(adding, [*(carry[position] for position in sums), *left])
        given = dict(zip(sums, added, strict=True))
        return [given.get(position, value) for position, value in enumerate(carry)]

    def run(eqn, operands: list) -> list:
        own_consts, carry, stacks = Scan(eqn).split(operands)
        consts, own = [*closed_consts(Scan(eqn).closed), *own_consts], len(carry)

        def iteration(carry: list, slices: list) -> list:
            return eval_local(rest, [*consts, *carry, *slices])

        def step(carried: list, slices: list) -> list:
            return iteration(add(carried[:own], carried[own:]), slices)

        if first_apart and loop.length:
            results = _first_apart(eqn, iteration, step, carry, stacks)
        else:
            begin = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in pending]
            results = rescan(eqn, step, [*carry, *begin], stacks)
        after = own + len(pending)
        return [*add(results[:own], results[own:after]), *results[after:]]

    return run


def _first_apart(eqn, first: Callable, step: Callable, carry: list, stacks: list) -> list:
    """As ``rescan`` with ``step``, but ``first`` makes of ``carry`` what it carries on."""
    length, reverse = Scan(eqn).length, Scan(eqn).reverse
    place, begin = (length - 1, 0) if reverse else (0, 1)
    made = first(carry, [lax.index_in_dim(stack, place, keepdims=False) for stack in stacks])
    made = list(map(jnp.asarray, made))  # constants of the body are no arrays yet
    carried = len(made) - (len(eqn.outvars) - len(carry))
    others = [lax.slice_in_dim(stack, begin, begin + length - 1) for stack in stacks]
    results = rescan(eqn, step, made[:carried], others, length - 1)
    outputs = [
        jnp.concatenate([stack, own[None]] if reverse else [own[None], stack])
        for own, stack in zip(made[carried:], results[carried:], strict=True)
    ]
    return [*results[:carried], *outputs]


def _read(terms: Sequence[Term]) -> list:
    """What ``terms`` read besides their sums, each once."""
    return list(dict.fromkeys(var for term in terms for var in term.pending))


def _pieces(eqn, terms: Sequence[Term]) -> tuple[jex.Jaxpr, jex.Jaxpr]:
    """What adds ``terms`` to sums, of both; and the rest of the body, whose carry ends with what ``terms`` read."""
    scan, body = Scan(eqn), Scan(eqn).body
    carried, moved = scan.inputs.carry, [each for term in terms for each in term.eqns]
    pending, sums = _read(terms), [term.position for term in terms]
    adding = new_jaxpr(
        [*(carried[position] for position in sums), *pending],
        [body.outvars[position] for position in sums],
        moved,
    )
    kept = [carried[place] if place in sums else out for place, out in enumerate(scan.outputs.carry)]
    outputs = [*kept, *pending, *scan.outputs.ys]
    away = set(map(id, moved))
    eqns = [each for each in body.eqns if id(each) not in away]
    rest = slim_barriers(needed_for(eqns, outputs), outputs)
    return adding, new_jaxpr([*body.constvars, *body.invars], outputs, rest)
