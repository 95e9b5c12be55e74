"""Loops over layers in pairs, what they gather, and the loops around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax_deepcompile.analysis.gathers import by_value, hoistable_gathers
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.analysis.parts import split_body
from jax_deepcompile.ir.memory import is_fetch, is_offload, size_bytes
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import combiner_options, copies_at_once, double_buffering
from jax_deepcompile.planner import budget
from jax_deepcompile.planner.candidate import Environment
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.stacks import by_layer, small_stacks
from jax_deepcompile.transforms.accumulate_in_loops import AccumulateInLoops
from jax_deepcompile.transforms.compute_once import ComputeOnce
from jax_deepcompile.transforms.decision import Decision
from jax_deepcompile.transforms.keep_gathered import KeptGathers, hoistable_names
from jax_deepcompile.transforms.microbatch_loops import MicrobatchLoop
from jax_deepcompile.transforms.narrow_stacks import NarrowStacks
from jax_deepcompile.transforms.offload_activations import OffloadedActivations
from jax_deepcompile.transforms.offload_parameters import OffloadedParameters
from jax_deepcompile.transforms.offload_values import OffloadedValues
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from jax_deepcompile.transforms.stack_collectives import StackCollectives
from jax_deepcompile.transforms.update_in_loops import UpdatedInLoop
from jax_deepcompile.transforms.wait_at_loops import GatherAfterLoops, ReduceBeforeLoops

AROUND_PIPELINED: tuple[Decision, ...] = (
    AccumulateInLoops(),
    NarrowStacks(),
    ComputeOnce(),
    ReduceBeforeLoops(),
    GatherAfterLoops(),
)
"""What goes with pipelined loops, whichever they are."""

AS_READ = ReduceBeforeLoops
"""The last kind of decision that says how layer loops run."""


def pipelined(plan: Plan, program: Program, schedules: Sequence[LoopSchedule]) -> Plan:
    """``plan`` with ``schedules`` for its loops in ``program``, and all that goes with them."""
    plan = plan.having(LoopSchedule, schedules)
    for each in AROUND_PIPELINED:
        plan = plan.having(type(each), [each] if schedules else [])
    return plan.having(MicrobatchLoop, [MicrobatchLoop(name) for name in loops_around(program, schedules)])


def all_pipelined(plan: Plan, program: Program, environment: Environment) -> Plan:
    """``plan``, which pipelines no loop, with all layer loops of ``program`` pipelined, one bucket a layer each way,
    and their small collectives done once for all layers."""
    copied = {name for each in plan.of(OffloadedParameters) for name in each.leaves}
    plan = plan.having(StackCollectives, by_layer(small_stacks(program, environment), copied))
    stacked = plan.program(program, environment.mesh, until=AS_READ)
    schedules = choose_schedules(stacked)
    options = dict(plan.options)
    if schedules:
        options |= double_buffering() | combiner_options(*_layer_bytes(stacked, schedules))
    return pipelined(plan, program, schedules).replace(options=options)


def _layer_bytes(program: Program, schedules: Sequence[LoopSchedule]) -> tuple[int, int]:
    """The most bytes that one iteration of a layer loop gathers, and keeps of what it reduces."""
    wanted = {schedule.loop for schedule in schedules}
    splits = [split_body(loop.eqn) for loop in find_loops(program) if loop.name in wanted]
    gathered = max(sum(map(size_bytes, split.gathered)) for split in splits)
    late = [[eqn for eqn in split.late.jaxpr.eqns if eqn.primitive.name == "reduce_scatter"] for split in splits]
    reduced = max(sum(size_bytes(var) for eqn in eqns for var in eqn.outvars) for eqns in late)
    return gathered, reduced


def copying_ahead(plan: Plan, program: Program, mesh: AnyMesh) -> Plan:
    """``plan`` whose loops copy what they have on the host a layer behind, and fetch it a layer ahead.

    XLA computes the number of the layer ahead with the loop's counter, after all that reads the latter; with two
    iterations in one body that is not at the end of it.
    """
    if plan.of(OffloadedValues):
        plan = plan.replace(options=dict(plan.options) | copies_at_once())
    updating = any(each.copied for each in plan.of(UpdatedInLoop))
    if not updating and not plan.of(OffloadedActivations) and not plan.of(OffloadedParameters):
        return plan
    program_then = plan.program(program, mesh, until=OffloadedParameters)
    copying = {loop.name for loop in find_loops(program_then) if any(map(_copies, loop.body.eqns))}
    wanted = {each.loop: each for each in choose_schedules(program_then) if each.loop in copying}
    schedules = [_deeper(each, wanted.pop(each.loop, each)) for each in plan.of(LoopSchedule)]
    plan = pipelined(plan, program, [*schedules, *wanted.values()])
    return plan.replace(options=dict(plan.options) | double_buffering() | copies_at_once())


def in_place(plan: Plan, program: Program) -> Plan:
    """``plan`` whose loops update what they read of the state in its memory."""
    schedules = plan.of(LoopSchedule)
    named = {each.loop for each in schedules}
    more = [LoopSchedule(each.updating, 0, 0) for each in plan.of(UpdatedInLoop) if each.updating not in named]
    return pipelined(plan, program, [*schedules, *more]) if more else plan


def _copies(eqn: Any) -> bool:
    return is_fetch(eqn) or is_offload(eqn)


def _deeper(one: LoopSchedule, other: LoopSchedule) -> LoopSchedule:
    """The schedule of a loop that is ahead and behind by as much as the deeper of two."""
    ahead = max(one.prefetch_layers, other.prefetch_layers)
    behind = max(one.delay_layers, other.delay_layers)
    return replace(one, prefetch_layers=ahead, delay_layers=behind, first_layers=behind, last_layers=ahead)


def not_pipelined(plan: Plan) -> Plan:
    """``plan`` without ``pipelined``."""
    return plan.without(LoopSchedule, MicrobatchLoop, *map(type, AROUND_PIPELINED))


def loops_around(program: Program, schedules: Sequence[LoopSchedule]) -> list[str]:
    """The names of the loops around those that ``schedules`` pipeline."""
    loops, wanted = list(find_loops(program)), {schedule.loop for schedule in schedules}
    inside = [loop for loop in loops if loop.name in wanted]
    return [loop.name for loop in loops if any(inner.is_inside(loop) for inner in inside)]


def gathered_bytes(loop: Loop) -> int:
    """What one iteration gathers."""
    return sum(map(size_bytes, split_body(loop.eqn).gathered))


def layer_stacks(program: Program, plan: Plan) -> list[tuple[Loop, Loop]]:
    """Pairs of loops, forward and backward, over the same layers: same scope, same length, opposite ways.

    Only those that gather ahead, if the plan pipelines any.
    """
    schedules = plan.of(LoopSchedule)
    wanted = {schedule.loop for schedule in schedules if schedule.prefetch_layers}
    loops = [loop for loop in find_loops(program) if loop.name in wanted or not schedules]
    pairs, taken = [], set()
    for forward in loops:
        for backward in loops:
            opposite = backward.reverse != forward.reverse and backward.path[:-1] == forward.path[:-1]
            later = backward.path[-1] > forward.path[-1]
            same = backward.length == forward.length and gathered_bytes(backward) == gathered_bytes(forward)
            if opposite and later and same and forward.name not in taken and backward.name not in taken:
                pairs.append((forward, backward))
                taken |= {forward.name, backward.name}
    return pairs


def keep_over_loops(base: Program, plan: Plan, environment: Environment) -> Plan:
    """Everything that the loops around the layer loops gather alike in every iteration is gathered once."""
    program = plan.program(base, environment.mesh, until=AS_READ)
    return plan.having(KeptGathers, keep_gathered(program, math.inf))


def keep_gathered(program: Program, free_bytes: float) -> tuple[KeptGathers, ...]:
    """As many gathers as ``free_bytes`` of a device holds, loop by loop; ``program`` is fully sharded.

    Where collectives stop compute that is all there is to plan: there is nothing to hide communication under. What is
    gathered twice outside of loops XLA:CPU merges.
    """
    kept = []
    for loop in find_loops(program):
        gathers = hoistable_gathers(loop.eqn)
        chosen = budget.first_fitting([same[0] for same in by_value(gathers)], free_bytes)
        free_bytes -= budget.total_bytes(chosen)
        if keys := {each.key for each in chosen}:
            named = zip(hoistable_names(program, loop), gathers, strict=True)
            kept.append(KeptGathers(loop.name, tuple(name for name, each in named if each.key in keys)))
    return tuple(kept)
