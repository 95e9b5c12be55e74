"""Reductions outside of loops that follow one another in the order in which gradients are ready.

XLA schedules from the end of the program backwards. Before a reduction that it puts last there is room for the compute
that its gradient does not need; if that is the last layer's, whose gradient is ready first, all of backward comes
before all reductions, with nothing left to hide them under. The network does one after the other anyway: where each
begins when those before it are done, only the first layer's can be last. Nor is the sum of the loss, which is ready
before any gradient and done before them.

Before::

    p2 = dot(x2, y3); y2 = dot(y3, W2); p1 = dot(x1, y2); ... g2 = reduce_scatter(p2); g1 = reduce_scatter(p1)

After::

    p2 = dot(x2, y3); ... g2 = reduce_scatter(p2); g1 = reduce_scatter(barrier(p1, g2))

Guarantees: values are bitwise the same; nothing is reduced more or less often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import new_barrier, open_jaxpr
from jax_deepcompile.analysis.dataflow import needs, variables
from jax_deepcompile.analysis.work import is_anchor
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.rewrite import Walk
from jax_deepcompile.ir.traversal import reached_from
from jax_deepcompile.transforms.decision import Decision, refused


@dataclass(frozen=True)
class OrderedReductions(Decision, kind="reduce_in_order"):
    """Reductions follow one another.

    Attributes:
      bucket_bytes: so many go together, at least.
      in_loops: whether those in the bodies of loops do, too; loops that are pipelined have an order of their own.
    """

    bucket_bytes: int
    in_loops: bool = False

    def check(self, program: Program) -> None:
        if self.bucket_bytes <= 0:
            raise refused(f"its buckets of reductions have {self.bucket_bytes} bytes")

    def describe(self) -> str:
        return f"reductions follow one another, {self.bucket_bytes / 2**20:.0f} MiB at a time"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[OrderedReductions]) -> Program:
        for each in decisions:
            program = reduce_in_order(program, each.bucket_bytes, each.in_loops)
        return program


def reduction_buckets(jaxpr: Any, bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Where the equations are that reduce over devices and scatter, loops aside, in the order gradients are ready.

    Those that follow one another are together until they have ``bucket_bytes``. Before them is what is summed over
    devices without them and ready no later than the first.
    """
    eqns = open_jaxpr(jaxpr).eqns
    ready = [needed.bit_length() for needed in needs(eqns, is_anchor)]
    places, sums = (
        [place for place, eqn in enumerate(eqns) if eqn.primitive.name == name] for name in ("reduce_scatter", "psum")
    )
    first = min((ready[place] for place in places), default=-1)
    scattered = reached_from(eqns, [eqns[place].outvars[0] for place in places])
    early = tuple(place for place in sums if ready[place] <= first and scattered.isdisjoint(eqns[place].outvars))
    buckets: list[tuple[int, ...]] = [early] if early else []
    bucket, size = (), 0
    for place in sorted(places, key=ready.__getitem__):
        bucket, size = (*bucket, place), size + size_bytes(eqns[place].invars[0])
        if size >= bucket_bytes:
            buckets.append(bucket)
            bucket, size = (), 0
    return (*buckets, bucket) if bucket else tuple(buckets)


def reduce_in_order(program: Program, bucket_bytes: int, in_loops: bool = False) -> Program:
    """``program`` whose reductions wait for those in the bucket before; the same object if there is one bucket."""
    return program.replace(jaxpr=_ordered(program.jaxpr, bucket_bytes, in_loops))


def _ordered(closed: jex.ClosedJaxpr, bucket_bytes: int, in_loops: bool) -> jex.ClosedJaxpr:
    inside = partial(_ordered, bucket_bytes=bucket_bytes, in_loops=True) if in_loops else None
    walk = Walk(closed, regions=inside, within={"scan"})
    inner = list(walk)
    buckets = reduction_buckets(walk.jaxpr, bucket_bytes)
    awaited = {place: before[-1] for before, bucket in pairwise(buckets) for place in bucket}
    makers = {var: place for place, eqn in enumerate(inner) for var in eqn.outvars}

    def before(place: int) -> list[int]:
        """Where is what it reads and, where it awaits another, that."""
        read = [makers[var] for var in variables(inner[place].invars) if var in makers]
        return [*read, awaited[place]] if place in awaited else read

    for place in each_after(range(len(inner)), before):
        eqn = inner[place]
        if place in awaited:
            walk.eqns.append(new_barrier([eqn.invars[0], inner[awaited[place]].outvars[0]], eqn.source_info))
            eqn = eqn.replace(invars=walk.eqns[-1].outvars[:1])
        walk.eqns.append(eqn)
    return walk.result()


def each_after(places: Iterable[int], before: Callable[[int], Iterable[int]]) -> Iterator[int]:
    """``places``, each once, after those ``before`` it and otherwise in their order."""
    done: set[int] = set()
    for first in places:
        waiting = [first]
        while waiting:
            missing = [other for other in before(waiting[-1]) if other not in done]
            waiting += missing
            if not missing and (place := waiting.pop()) not in done:
                done.add(place)
                yield place
