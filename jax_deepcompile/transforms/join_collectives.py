"""Small collectives that can be done together are one.

Where devices wait for each other longer than the bytes of a bias or a norm scale take, every leaf's own collective
costs that wait. Of what is gathered of the inputs all that is small goes at once; of what is reduced, all that is small
and as far from the end.

Before::

    B = all_gather(b); y = x + B; C = all_gather(c); z = y * C; ... h = reduce_scatter(p); ... g = reduce_scatter(q)

After::

    B, C = split(all_gather(concatenate(b, c))); y = x + B; z = y * C; ...
    h, g = split(reduce_scatter(concatenate(p, q)))

Guarantees: values are bitwise the same; nothing is sent more often. What is joined is copied before and after; what is
gathered lives from the first use of any to the last.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, line_of, open_jaxpr
from jax_deepcompile.analysis.dataflow import needs, variables, with_names
from jax_deepcompile.analysis.gathers import by_value, find_gathers, outermost
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Collective, Scan, closed_like
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import compute, read, rescan, trace_blocks
from jax_deepcompile.transforms.decision import Decision, refused
from jax_deepcompile.transforms.reduce_in_order import each_after

Group = tuple[int, ...]
"""Places of equations that become one."""


@dataclass(frozen=True)
class JoinedCollectives(Decision, kind="join_collectives"):
    """What is small goes together, outside of loops and in the bodies of scans.

    Attributes:
      gather_bytes: gathers whose results have so many, or less.
      reduce_bytes: reductions whose operands have so many, or less.
    """

    gather_bytes: int
    reduce_bytes: int

    def check(self, program: Program) -> None:
        if min(self.gather_bytes, self.reduce_bytes) < 0:
            raise refused(f"it joins gathers of {self.gather_bytes} and reductions of {self.reduce_bytes} bytes")

    def describe(self) -> str:
        gathers, reductions = (f"{size / 2**10:.0f} KiB" for size in (self.gather_bytes, self.reduce_bytes))
        return f"gathers of up to {gathers} go together, and reductions of up to {reductions}"

    def groups(self, jaxpr: Any) -> list[Group]:
        """The places of collectives in ``jaxpr`` that become one, in order; those in loops inside aside.

        Gathers of inputs need none of the others. Of all else those go together that have equally many behind them, one
        after the other, to the end: none of them needs another, nor what needs that.
        """
        flat = open_jaxpr(jaxpr)
        small = {place for place, eqn in enumerate(flat.eqns) if self._is_small(eqn)}
        needed = needs(flat.eqns, lambda eqn: self._is_small(eqn))
        inputs = {each.position for each in outermost(find_gathers(flat, flat.invars))}
        first = {place for place in small & inputs if not needed[place]}
        levels = dict.fromkeys(first, 0) | _behind(flat, small - first)
        alike: dict[tuple, list[int]] = defaultdict(list)
        for place in sorted(levels):
            eqn = flat.eqns[place]
            kind = eqn.primitive.name, place in first, Collective(eqn).axes, eqn.invars[0].aval.dtype
            alike[*kind, levels[place]].append(place)
        return [tuple(group) for group in alike.values() if len(group) > 1]

    def _is_small(self, eqn: Any) -> bool:
        """Whether ``eqn`` is a collective of one array, over whole axes of the mesh, and of few bytes."""
        name = eqn.primitive.name
        if name not in _AT_ONCE or len(eqn.invars) != 1 or isinstance(eqn.invars[0], jex.Literal):
            return False
        if eqn.params.get("axis_index_groups") or not all(isinstance(axis, str) for axis in Collective(eqn).axes):
            return False
        if name == "all_gather":
            return size_bytes(eqn.outvars[0]) <= self.gather_bytes
        return size_bytes(eqn.invars[0]) <= self.reduce_bytes

    def saved(self, program: Program) -> int:
        """How many collectives of ``program``, those in loops counted once, become parts of others."""
        return sum(len(group) - 1 for body in _bodies(program.jaxpr) for group in self.groups(body))

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[JoinedCollectives]) -> Program:
        for each in decisions:
            if each.saved(program):
                once = closed_like(program.jaxpr, each._once(open_jaxpr(program.jaxpr)))
                program = program.replace(jaxpr=trace_blocks(partial(_joined, once, each), program, mesh))
        return program

    def _once(self, jaxpr: Any) -> Any:
        """``jaxpr`` whose small gathers of the same value are one: what is joined is not gathered again later."""
        pairs = [(first, each) for first, *again in by_value(find_gathers(jaxpr, jaxpr.invars)) for each in again]
        known = {again.result: first.result for first, again in pairs if self._is_small(jaxpr.eqns[first.position])}
        return with_names(jaxpr, known) if known else jaxpr


def _bodies(jaxpr: Any) -> Iterator[Any]:
    """``jaxpr``, the bodies of its scans, those of theirs and so on."""
    yield (flat := open_jaxpr(jaxpr))
    for eqn in flat.eqns:
        if eqn.primitive.name == "scan":
            yield from _bodies(Scan(eqn).body)


def _behind(jaxpr: Any, places: set[int]) -> dict[int, int]:
    """For each of ``places`` how many of the others follow one another after it, at most."""
    found: dict[int, int] = {}
    after: dict[Any, int] = defaultdict(int)
    for place in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[place]
        count = max((after[var] for var in eqn.outvars), default=0)
        if place in places:
            found[place] = count
        for var in variables(eqn.invars):
            after[var] = max(after[var], count + (place in places))
    return found


def _joined(closed: Any, limits: JoinedCollectives, consts: Sequence, *values: Any) -> list:
    """``closed`` evaluated with its small collectives joined, and those of its scans."""
    flat = open_jaxpr(closed)
    known = dict(zip((*flat.constvars, *flat.invars), (*consts, *values), strict=True))
    again = partial(_rescanned, limits=limits)
    scans = {
        id(eqn): again
        for eqn in flat.eqns
        if eqn.primitive.name == "scan" and any(map(limits.groups, _bodies(Scan(eqn).body)))
    }
    for is_alone, together in itertools.groupby(
        _in_order(flat.eqns, limits.groups(flat)), lambda group: len(group) == 1
    ):
        if is_alone:
            known = compute([flat.eqns[place] for (place,) in together], known, scans)
            continue
        for group in together:
            eqns = [flat.eqns[place] for place in group]
            with line_of(eqns[0]):
                results = _AT_ONCE[eqns[0].primitive.name](eqns, [known[eqn.invars[0]] for eqn in eqns])
                apart = _in_buffers_of_their_own(list(results), Collective(eqns[0]).axes)
                known |= {eqn.outvars[0]: result for eqn, result in zip(eqns, apart, strict=True)}
    return [read(atom, known) for atom in flat.outvars]


def _in_buffers_of_their_own(parts: list[jax.Array], axes: Sequence[str]) -> list[jax.Array]:
    """``parts`` of one buffer, copied.

    XLA:CPU would fuse the cuts with what reads them, so that no two leaves' updates were one kernel any more: compiling
    took three times as long. It drops barriers first, but keeps a branch whose condition is not known before it runs.
    """
    is_always = lax.axis_index(axes) >= 0
    return lax.cond(is_always, lambda: parts, lambda: [jnp.zeros_like(part) for part in parts])


def _rescanned(eqn: Any, operands: list, limits: JoinedCollectives) -> list:
    scan = Scan(eqn)
    consts, carry, stacks = scan.split(operands)
    own = closed_consts(scan.closed)
    return rescan(eqn, lambda carry, layer: _joined(scan.closed, limits, own, *consts, *carry, *layer), carry, stacks)


def _in_order(eqns: Sequence[Any], groups: Sequence[Group]) -> Iterator[Group]:
    """All places of ``eqns``, those of a group together, after what they read and as early as before."""
    group_of = {place: (place,) for place in range(len(eqns))} | {place: group for group in groups for place in group}
    makers = {var: group_of[place] for place, eqn in enumerate(eqns) for var in eqn.outvars}

    def before(first: int) -> Iterator[int]:
        operands = (var for place in group_of[first] for var in variables(eqns[place].invars))
        return (makers[var][0] for var in operands if var in makers)

    return map(group_of.__getitem__, each_after((group[0] for group in group_of.values()), before))


def _gather_at_once(eqns: Sequence[Any], blocks: Sequence[jax.Array]) -> Iterator[jax.Array]:
    whole = lax.all_gather(_flat(blocks), Collective(eqns[0]).axes)
    for eqn, block, part in zip(eqns, blocks, _cut(whole, blocks), strict=True):
        parts = part.reshape(whole.shape[0], *block.shape)
        yield jnp.moveaxis(parts, 0, Collective(eqn).parts_along).reshape(eqn.outvars[0].aval.shape)


def _scatter_at_once(eqns: Sequence[Any], blocks: Sequence[jax.Array]) -> Iterator[jax.Array]:
    results = [eqn.outvars[0].aval for eqn in eqns]
    size = Collective(eqns[0]).size

    def parts(eqn: Any, block: jax.Array) -> jax.Array:
        """Of each device in a row."""
        dim = Collective(eqn).parts_along
        divided = block.reshape(*block.shape[:dim], size, -1, *block.shape[dim + 1 :])
        return jnp.moveaxis(divided, dim, 0).reshape(size, -1)

    joined = jnp.concatenate([parts(eqn, block) for eqn, block in zip(eqns, blocks, strict=True)], axis=1)
    summed = lax.psum_scatter(joined, Collective(eqns[0]).axes)
    for result, part in zip(results, _cut(summed, results), strict=True):
        yield part.reshape(result.shape)


def _sum_at_once(eqns: Sequence[Any], blocks: Sequence[jax.Array]) -> Iterator[jax.Array]:
    summed = lax.psum(_flat(blocks), Collective(eqns[0]).axes)
    for block, part in zip(blocks, _cut(summed, blocks), strict=True):
        yield part.reshape(block.shape)


_AT_ONCE: Mapping[str, Callable[[Sequence[Any], Sequence[jax.Array]], Iterator[jax.Array]]] = {
    "all_gather": _gather_at_once,
    "reduce_scatter": _scatter_at_once,
    "psum": _sum_at_once,
}
"""By the equations' primitive: their results from their operands."""


def _flat(blocks: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([jnp.ravel(block) for block in blocks])


def _cut(joined: jax.Array, like: Sequence[Any]) -> list[jax.Array]:
    """The last dimension in pieces of as many elements as each of ``like`` has."""
    return jnp.split(joined, list(itertools.accumulate(each.size for each in like))[:-1], axis=-1)
