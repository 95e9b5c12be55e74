"""``while`` and ``cond``: their jaxprs are decided like the program; what a loop carries reaches a fixed point."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts
from jax_deepcompile.ir.placement import PARTIAL, REPLICATE, MeshAxes, Placement
from jax_deepcompile.ir.primitives import Cond, While
from jax_deepcompile.ir.traversal import variables
from jax_deepcompile.partition.layout import Decision, Layout, Nested, Propagate, RegionRule, Request, Run, Step
from jax_deepcompile.partition.rules.registry import REGISTRY

T = TypeVar("T", bound=tuple)

_ROUNDS = 8
"""A carry changes placement a few times at most; one that still moves after this many rounds is carried whole."""


def batch_through(jaxpr: jex.Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Which outputs depend on inputs that depend on the batch; regions inside count as one equation."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        depends = any(known.get(atom, False) for atom in variables(eqn.invars))
        known.update(dict.fromkeys(eqn.outvars, depends))
    return [not isinstance(atom, jex.Literal) and known.get(atom, False) for atom in jaxpr.outvars]


def settled_batch(jaxpr: jex.Jaxpr, fixed: Sequence[bool], carry: Sequence[bool], rest: Sequence[bool]):
    """Outputs' dependence on the batch once it has gone round the loop: ``(carry, other outputs)``."""
    carry = list(carry)
    while True:
        outs = batch_through(jaxpr, [*fixed, *carry, *rest])
        merged = [before or after for before, after in zip(carry, outs[: len(carry)], strict=True)]
        if merged == carry:
            return carry, outs[len(carry) :]
        carry = merged


def settle_batch(
    carry: Sequence[tuple[Any, Placement]],
    given: Sequence[bool],
    known: Sequence[bool],
    settle: Callable[[list[bool]], T],
) -> T:
    """What ``settle`` makes of it, given for each carried value whether it depends on the batch.

    Parameters that a loop trains, and the number of their updates, follow from the batch, yet depend on it no more than
    others do: gradients are sums over it. So a scalar, or what comes in split and is no activation, is taken for one
    only once a layout says that it leaves as one.

    Args:
      carry: the variables, and where they are as they come in.
      given: whether they depend on the batch then.
      known: and whether they may once it has gone round the loop.
      settle: results in a layout, last.
    """
    flags = [
        before or (after and bool(var.aval.shape) and not placement.is_split)
        for (var, placement), before, after in zip(carry, given, known, strict=True)
    ]
    while True:
        settled = settle(flags)
        after = [flag or left for flag, left in zip(flags, settled[-1].batch_outputs, strict=False)]
        if after == flags:
            return settled
        flags = after


def settle_carry(jaxpr, fixed, carry, rest, batch, rest_demands, final_demands, propagate: Propagate, keep_partial):
    """Decides a loop body so that every carried value leaves it in the placement it came in.

    Args:
      fixed, carry, rest: placements of the body's constants, carry and per-iteration inputs.
      batch: for every input of the body whether it depends on the batch.
      rest_demands: demands on the outputs that are not carried.
      final_demands: demands on the carried values after the loop.
      keep_partial: for each carried value, whether it may accumulate as a partial sum.
    """
    carry = [
        _without_unwanted_partial(placement, wanted, allowed)
        for placement, wanted, allowed in zip(carry, final_demands, keep_partial, strict=True)
    ]
    held = held_in_body(len(fixed) + len(carry), len(rest))
    for round_ in range(_ROUNDS):
        free = propagate(jaxpr, [*fixed, *carry, *rest], batch, [*[()] * len(carry), *rest_demands], held)
        yielded = free.output_placements[: len(carry)]
        uses = free.wanted[len(fixed) : len(fixed) + len(carry)]
        settled = [
            _meet(now, after, used, wanted, allowed, propagate.mesh)
            for now, after, used, wanted, allowed in zip(carry, yielded, uses, final_demands, keep_partial, strict=True)
        ]
        if settled == carry:
            break
        moved = [before != after for before, after in zip(carry, settled, strict=True)]
        carry = settled
        if round_ == _ROUNDS - 2:
            whole = propagate.mesh.replicated()
            carry = [whole if still else placement for placement, still in zip(carry, moved, strict=True)]
    demands = [*[(placement,) for placement in carry], *rest_demands]
    return tuple(carry), propagate(jaxpr, [*fixed, *carry, *rest], batch, demands, held)


def sums_later(wanted: Sequence[Placement], mesh: MeshAxes) -> tuple[Placement, ...]:
    """``wanted`` and, where a loop over parts of the batch adds up what comes, the same with sums left for its end."""
    if not mesh.virtual:
        return tuple(wanted)
    every = Placement((PARTIAL,) * len(mesh.names))
    of_loops = Placement(tuple(PARTIAL if mesh.is_virtual(i) else REPLICATE for i in range(len(mesh.names))))
    late = (placement.deferring(sums) for sums in (every, of_loops) for placement in wanted)
    return tuple(dict.fromkeys((*wanted, *late)))


def held_in_body(kept: int, stacked: int) -> list[bool]:
    """One slice of a stack of layers is used in one iteration only, so its gathered copy serves all of it."""
    return [False] * kept + [True] * stacked


def is_recurrent(layout: Layout, num_consts: int) -> bool:
    """Whether the parameters that all iterations share are needed whole, for one use region each.

    Shared parameters that come whole already count too: they were gathered before the loop.
    """
    shared = list(zip(layout.inputs, layout.regathered, strict=True))[:num_consts]
    return not any(held.is_split and regathered for held, regathered in shared)


def gathered_before(
    consts: Sequence[Placement], layout: Layout, batch: Sequence[bool], mesh: MeshAxes
) -> list[Placement]:
    """``consts``, those that every iteration needs whole gathered once before the loop, but for activations."""
    whole, pairs = mesh.replicated(), zip(consts, layout.wanted, batch, strict=False)
    return [placement if depends or whole not in wanted else whole for placement, wanted, depends in pairs]


def _meet(now: Placement, after: Placement, used, wanted, allowed: bool, mesh: MeshAxes) -> Placement:
    """The next guess for a carried value that enters as ``now`` and leaves as ``after``.

    What another loop adds up stays a partial sum until that one ends, unless it is to be scattered.
    """
    axes = []
    for axis, (enters, leaves) in enumerate(zip(now.axes, after.axes, strict=True)):
        if leaves == PARTIAL and not allowed:
            asked = next((demand.axes[axis] for demand in wanted if demand.axes[axis] != PARTIAL), REPLICATE)
            leaves = PARTIAL if mesh.virtual and asked == REPLICATE else asked
        whole_inside = any(placement.axes[axis] == REPLICATE for placement in used)
        keeps = enters >= 0 and leaves == REPLICATE and not whole_inside
        axes.append(enters if keeps else leaves)
    return Placement(tuple(axes))


def _without_unwanted_partial(placement: Placement, wanted, allowed: bool) -> Placement:
    if allowed or not placement.is_partial:
        return placement
    return next((demand for demand in wanted if not demand.is_partial), placement.without_partial())


@dataclass(frozen=True)
class WhileRule(RegionRule):
    """``while``: the predicate is the same on every device, so that all run, and communicate, equally often."""

    def batch(self, eqn, operands):
        _, body_consts, carry = While(eqn).split(operands)
        return settled_batch(While(eqn).body, body_consts, carry, [])[0]

    def hints(self, eqn, results, through):
        return [*[()] * While(eqn).num_cond_consts, *through(While(eqn).body, results)]

    def decide(self, eqn, request: Request, propagate: Propagate) -> Decision:
        loop = While(eqn)
        cond_consts, body_consts, carry = loop.split(request.operands)
        cond_batch, body_batch, carry_batch = loop.split(request.batch)
        cond_consts, body_consts = (
            [each.without_partial() for each in consts] for consts in (cond_consts, body_consts)
        )
        tested = _read_by_condition(loop)
        carry = [
            _after_the_loop(placement, request.mesh) if read else placement
            for placement, read in zip(carry, tested, strict=True)
        ]
        known, _ = settled_batch(loop.body, body_batch, carry_batch, [])
        keep_partial = [not any(demand.is_split for demand in wanted) for wanted in request.demands]

        def settle(consts: Sequence[Placement], flags: list[bool]) -> tuple:
            batch = [*body_batch, *flags]
            wanted = request.demands, propagate, keep_partial
            return flags, *settle_carry(loop.body, consts, carry, [], batch, [], *wanted)

        pairs = list(zip(loop.operands.carry, carry, strict=True))
        settled, after, body = settle_batch(pairs, carry_batch, known, partial(settle, body_consts))
        if is_recurrent(body, len(body_consts)):
            body_consts = gathered_before(body_consts, body, body_batch, request.mesh)
            settled, after, body = settle_batch(pairs, carry_batch, known, partial(settle, body_consts))
        carry_batch, carry = settled, after
        whole = request.mesh.replicated()
        condition = propagate(loop.condition, [*cond_consts, *carry], [*cond_batch, *carry_batch], [(whole,)])
        operands = (*cond_consts, *body_consts, *carry)
        return Decision(Nested(self, (condition, body)), operands, carry, batch=body.batch_outputs)

    def emit(self, step: Step, operands, run: Run, mesh: MeshAxes):
        condition, body = step.layouts
        loop = While(step.eqn)
        cond_consts, body_consts, carry = loop.split(operands)
        return lax.while_loop(
            lambda carry: run(condition, [*cond_consts, *carry], closed_consts(loop.closed_condition))[0],
            lambda carry: run(body, [*body_consts, *carry], closed_consts(loop.closed_body)),
            carry,
        )


def _read_by_condition(loop: While) -> list[bool]:
    """For each carried value whether the condition depends on it."""
    read = {atom for inner in loop.condition.eqns for atom in variables(inner.invars)}
    return [var in read for var in loop.condition.invars[loop.num_cond_consts :]]


def _after_the_loop(placement: Placement, mesh: MeshAxes) -> Placement:
    """``placement`` with sums over virtual axes done: what only the end of a loop tells cannot steer one inside it."""
    states = enumerate(placement.axes)
    return Placement(tuple(REPLICATE if (mesh.is_virtual(i), s) == (True, PARTIAL) else s for i, s in states))


@dataclass(frozen=True)
class CondRule(RegionRule):
    """``cond``: every device takes the same branch, and all branches yield the same placements."""

    def batch(self, eqn, operands):
        by_branch = [batch_through(branch, operands[1:]) for branch in Cond(eqn).branches]
        return [any(outs) for outs in zip(*by_branch, strict=True)]

    def hints(self, eqn, results, through):
        by_branch = [through(branch, results) for branch in Cond(eqn).branches]
        return [(), *(tuple(dict.fromkeys(sum(wanted, ()))) for wanted in zip(*by_branch, strict=True))]

    def decide(self, eqn, request: Request, propagate: Propagate) -> Decision:
        branches = Cond(eqn).branches
        operands, batch = request.operands[1:], request.batch[1:]
        layouts = [propagate(branch, operands, batch, request.demands) for branch in branches]
        operands = tuple(
            _summed_outside(placement, [layout.wanted[index] for layout in layouts])
            for index, placement in enumerate(operands)
        )
        demands = [sums_later(wanted, request.mesh) for wanted in request.demands]
        layouts = [propagate(branch, operands, batch, demands) for branch in branches]
        natural = zip(*(layout.output_placements for layout in layouts), strict=True)
        results = tuple(
            joined if not wanted else wanted[0].deferring(joined) if request.mesh.virtual else wanted[0]
            for wanted, joined in zip(request.demands, map(_join, natural), strict=True)
        )
        layouts = [propagate(branch, operands, batch, [(placement,) for placement in results]) for branch in branches]
        whole = request.mesh.replicated()
        batch = tuple(any(flags) for flags in zip(*(layout.batch_outputs for layout in layouts), strict=True))
        return Decision(Nested(self, tuple(layouts)), (whole, *operands), results, batch=batch)

    def emit(self, step: Step, operands, run: Run, mesh: MeshAxes):
        index, *rest = operands
        calls = [
            lambda *blocks, layout=layout, branch=branch: run(layout, blocks, closed_consts(branch))
            for layout, branch in zip(step.layouts, Cond(step.eqn).closed_branches, strict=True)
        ]
        return lax.switch(index, calls, *rest)


def _summed_outside(placement: Placement, wanted_by_branch: Sequence[Sequence[Placement]]) -> Placement:
    """A partial sum that a branch sums is summed before it, where that can overlap with what made it."""
    wanted = [asked for wanted in wanted_by_branch for asked in wanted if not asked.is_partial]
    return wanted[0] if placement.is_partial and wanted else placement


def _join(placements: Sequence[Placement]) -> Placement:
    """One placement for a value that branches yield differently: split if one splits it, else partial if one does."""
    axes = []
    for states in zip(*(placement.axes for placement in placements), strict=True):
        split = [state for state in states if state >= 0]
        axes.append(split[0] if split else PARTIAL if PARTIAL in states else REPLICATE)
    return Placement(tuple(axes))


REGISTRY.register_region("while", WhileRule())
REGISTRY.register_region("cond", CondRule())
