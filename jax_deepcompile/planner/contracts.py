"""What must hold of a program for what a plan says of it to make sense: checked before each pass runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.gathers import first_uses, hoistable_gathers
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.analysis.stacks import sliced_gathers, stacked_reductions
from jax_deepcompile.ir.program import Program, View
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.transforms.delay_reductions import find_terms
from jax_deepcompile.transforms.hand_over import shared_gathers
from jax_deepcompile.transforms.prefetch import parameter_gathers
from jax_deepcompile.transforms.unshard import regathers


def is_local(program: Program, plan: Plan) -> None:
    """Collectives are explicit: the program has been partitioned."""
    if program.view is not View.LOCAL:
        raise _refused(f"it is carried out on the {program.view} view of {program.name}, which has no collectives")


def stacks_are_there(program: Program, plan: Plan) -> None:
    """Each loop has as many gathers of slices, and reductions of stacked outputs, as ``plan.stacks`` speaks of."""
    loops = _named(program, [choice.loop for choice in plan.stacks])
    _once([choice.loop for choice in plan.stacks], "takes collectives out of")
    for choice in plan.stacks:
        eqn = loops[choice.loop].eqn
        _within(choice.gathers, len(sliced_gathers(eqn)), f"takes gather {{}} of {{}} out of {choice.loop}")
        _within(choice.reductions, len(stacked_reductions(eqn)), f"takes reduction {{}} of {{}} out of {choice.loop}")


def handed_over_are_shared(program: Program, plan: Plan) -> None:
    """Both loops of each choice gather what ``plan.handed_over`` speaks of, and the first one runs before."""
    names = [name for each in plan.handed_over for name in (each.forward, each.backward)]
    loops = _named(program, names)
    _once(names, "hands over gathers of")
    for choice in plan.handed_over:
        forward, backward = loops[choice.forward], loops[choice.backward]
        if forward.path[:-1] != backward.path[:-1] or forward.path >= backward.path:
            raise _refused(f"{choice.backward} does not follow {choice.forward} in the same place")
        shared = shared_gathers(program, forward, backward).gathers
        where = f"{choice.forward} to {choice.backward}"
        _within(choice.shared, len(shared), f"hands over gather {{}} of {{}} from {where}")


def activations_have_loops(program: Program, plan: Plan) -> None:
    """The loops of ``plan.activations`` are there; which activations they have, the pass itself finds."""
    _named(program, [name for each in plan.activations for name in (each.forward, each.backward) if name])


def schedules_are_possible(program: Program, plan: Plan) -> None:
    """Each loop of ``plan.loops`` is there, once, and its numbers of layers are none below 0 or beyond all use."""
    names = [schedule.loop for schedule in plan.loops]
    _named(program, names)
    _once(names, "pipelines")
    for each in plan.loops:
        for layers in (each.prefetch_layers, each.delay_layers, each.first_layers, each.last_layers):
            if not 0 <= layers <= _MOST_LAYERS:
                raise _refused(f"it pipelines {each.loop} by {layers} layers")


_MOST_LAYERS = 64
"""Iterations ahead, behind or apart: each is code of its own, and planning chooses 1 or 2."""


def kept_are_repeated(program: Program, plan: Plan) -> None:
    """Each loop of ``plan.kept`` gathers as much anew in every iteration as the plan speaks of."""
    names = [choice.loop for choice in plan.kept]
    for name in names:
        if name not in {loop.name for loop in find_loops(program.jaxpr)}:
            raise _refused(f"it keeps gathers over {name}, which the program does not have")
    _once(names, "keeps gathers over")
    loops = _named(program, names)
    for choice in plan.kept:
        repeated = hoistable_gathers(loops[choice.loop].eqn)
        _within(choice.gathers, len(repeated), f"keeps gather {{}} of {{}} over {choice.loop}")


def delayed_are_added(program: Program, plan: Plan) -> None:
    """Each loop of ``plan.delayed`` reduces, and only adds to the sums that the plan speaks of, in every iteration."""
    names = [choice.loop for choice in plan.delayed]
    loops = _named(program, names)
    _once(names, "delays reductions of")
    all_loops = [loop.name for loop in find_loops(program.jaxpr)]
    for choice in plan.delayed:
        found = find_terms(loops[choice.loop].eqn)
        _once([str(position) for position in choice.sums], f"delays in {choice.loop} what is added to sum")
        for position in choice.sums:
            if position not in found:
                raise _refused(f"it delays what {choice.loop} adds to sum {position}, where nothing can wait")
        inside = [name for name in all_loops if name.startswith(f"{choice.loop}/")]
        if choice.first_apart and inside:
            raise _refused(f"it runs the first iteration of {choice.loop} apart, which has {inside[0]} in it")


def overlapped_are_around(program: Program, plan: Plan) -> None:
    """The loops of ``plan.overlapped`` have pipelined loops in them."""
    around = loops_around(plan)
    for name in plan.overlapped:
        if name not in around:
            raise _refused(f"it overlaps the iterations of {name}, which has no pipelined loops")


def unsharded_are_repeated(program: Program, plan: Plan) -> None:
    """As many straight-line gathers repeat an earlier one as ``plan.unsharded`` speaks of."""
    if plan.unsharded:
        jaxpr = open_jaxpr(program.jaxpr)
        _within(plan.unsharded, len(regathers(jaxpr, jaxpr.invars)), "keeps repeated gather {} of {}")


def prefetched_are_gathered(program: Program, plan: Plan) -> None:
    """There are the straight-line gathers of ``plan.prefetches``, and before their uses the results they wait for."""
    if not plan.prefetches:
        return
    jaxpr, gathers = open_jaxpr(program.jaxpr), parameter_gathers(program)
    _within([each.gather for each in plan.prefetches], len(gathers), "starts gather {} of {}")
    _within([each.after for each in plan.prefetches], len(jaxpr.eqns), "starts a gather after equation {} of {}")
    uses = first_uses(jaxpr, [gather.result for gather in gathers])
    moved = {gathers[each.gather].result for each in plan.prefetches}
    for each in plan.prefetches:
        made = jaxpr.eqns[each.after].outvars
        if each.after >= uses[each.gather] or not made or moved.intersection(made):
            raise _refused(f"it starts gather {each.gather} after equation {each.after}, which cannot be waited for")


def buckets_have_bytes(program: Program, plan: Plan) -> None:
    """A bucket of reductions has a size."""
    if plan.reduction_bucket_bytes < 0:
        raise _refused(f"its buckets of reductions have {plan.reduction_bucket_bytes} bytes")


def loops_around(plan: Plan) -> set[str]:
    """The names of the loops around those that ``plan`` pipelines."""
    pipelined = [schedule.loop.split("/") for schedule in plan.loops]
    return {"/".join(parts[:depth]) for parts in pipelined for depth in range(1, len(parts))}


def _named(program: Program, names: Iterable[str]) -> dict[str, Loop]:
    """The loops of ``program``, among them those that a plan speaks of."""
    loops = {loop.name: loop for loop in find_loops(program.jaxpr)}
    for name in names:
        if name not in loops:
            raise _refused(f"it speaks of {name}, which the program does not have")
    return loops


def _once(names: Collection[str], what: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise _refused(f"it {what} {twice[0]} twice")


def _within(positions: Sequence[int], count: int, what: str) -> None:
    for position in positions:
        if not 0 <= position < count:
            raise _refused(f"it {what.format(position, count)}")


def _refused(why: str) -> errors.PlanError:
    return errors.PlanError("the plan", why)
