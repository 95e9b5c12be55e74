"""What each pass proposes, given a program and what its best form so far takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.gathers import hoistable_gathers, size_bytes
from jax_deepcompile.analysis.loops import Loop, find_loops, split_body
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import combiner_options, double_buffering
from jax_deepcompile.passes.pipeline_loops import LoopSchedule, choose_schedules, pipeline_loops
from jax_deepcompile.passes.unshard import regathers
from jax_deepcompile.planning.pass_manager import Machine, Proposal, Trial
from jax_deepcompile.planning.plan import KeptGathers, Plan


@dataclass(frozen=True)
class PipelineLoops:
    """Layer loops that gather ahead and reduce behind; one bucket a layer each way."""

    name: str = "pipeline_loops"

    def propose(self, base: Program, now: Trial, machine: Machine) -> Iterator[Proposal]:
        schedules = choose_schedules(base)
        if not schedules:
            return
        options = dict(now.plan.options) | double_buffering() | combiner_options(*layer_bytes(base))
        plan = now.plan.replace(loops=schedules, options=options)
        ahead = sum(1 for schedule in schedules if schedule.prefetch_layers)
        behind = sum(1 for schedule in schedules if schedule.delay_layers)
        yield Proposal(plan, f"{ahead} loops gather a layer ahead, {behind} reduce a layer behind, one bucket each")


@dataclass(frozen=True)
class BucketCollectives:
    """Neighbours share one collective, up to the size where its latency no longer counts."""

    name: str = "bucket_collectives"

    def propose(self, base: Program, now: Trial, machine: Machine) -> Iterator[Proposal]:
        size = machine.costs.bandwidth_bound_bytes()
        if now.plan.loops:
            return
        options = dict(now.plan.options) | combiner_options(size, size)
        yield Proposal(now.plan.replace(options=options), f"buckets of {size / 2**20:.0f} MiB")


@dataclass(frozen=True)
class Unshard:
    """As many layers stay gathered as memory holds: from forward to backward, over all microbatches where there are any."""

    name: str = "unshard"

    def propose(self, base: Program, now: Trial, machine: Machine) -> Iterator[Proposal]:
        if machine.limit_bytes is None:
            return
        free_bytes = machine.limit_bytes - now.prediction.peak_bytes
        pairs = layer_stacks(base, now.plan)
        if not pairs:
            return
        per_layer = sum(gathered_bytes(forward) for forward, _ in pairs)
        fits = int(free_bytes // per_layer)
        longest = max(forward.length for forward, _ in pairs)
        for layers in _candidates(min(fits, longest - 1)):
            plan = keep_layers(now.plan, pairs, layers)
            plan = keep_over_loops(base, plan, machine)
            yield Proposal(plan, f"{layers} of {longest} layers stay gathered ({layers * per_layer / 2**30:.1f} GiB)")


def layer_bytes(program: Program) -> tuple[int, int]:
    """The most bytes that one iteration of a layer loop gathers, and reduces."""
    splits = [split_body(loop.eqn) for loop in find_loops(program.jaxpr)]
    gathered = max(sum(map(size_bytes, split.early.outputs)) for split in splits)
    reduced = max(sum(_reduced_bytes(eqn) for eqn in split.late.jaxpr.eqns) for split in splits)
    return gathered, reduced


def _reduced_bytes(eqn: Any) -> int:
    return sum(size_bytes(atom) for atom in eqn.invars) if eqn.primitive.name in ("reduce_scatter", "psum") else 0


def gathered_bytes(loop: Loop) -> int:
    """What one iteration gathers."""
    return sum(map(size_bytes, split_body(loop.eqn).early.outputs))


def layer_stacks(program: Program, plan: Plan) -> list[tuple[Loop, Loop]]:
    """Pairs of pipelined loops, forward and backward, over the same layers: same scope, same length, opposite ways."""
    wanted = {schedule.loop for schedule in plan.loops if schedule.prefetch_layers}
    loops = [loop for loop in find_loops(program.jaxpr) if loop.name in wanted]
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


def keep_layers(plan: Plan, pairs: list[tuple[Loop, Loop]], layers: int) -> Plan:
    """The last ``layers`` of every stack run apart, so that forward and backward gather them together."""
    schedules = {schedule.loop: schedule for schedule in plan.loops}
    for forward, backward in pairs:
        count = min(layers, forward.length)
        ahead, behind = schedules[forward.name], schedules[backward.name]
        schedules[forward.name] = LoopSchedule(
            forward.name,
            ahead.prefetch_layers,
            ahead.delay_layers,
            ahead.first_layers,
            max(ahead.last_layers, count + ahead.prefetch_layers),
        )
        schedules[backward.name] = LoopSchedule(
            backward.name,
            behind.prefetch_layers,
            behind.delay_layers,
            max(behind.first_layers, count),
            behind.last_layers,
        )
    return plan.replace(loops=tuple(schedules[schedule.loop] for schedule in plan.loops))


def keep_over_loops(base: Program, plan: Plan, machine: Machine) -> Plan:
    """Everything that the loops around the layer loops gather alike in every iteration is gathered once."""
    program = pipeline_loops(base, machine.mesh, plan.loops)
    kept = [
        KeptGathers(loop.name, tuple(range(len(hoistable_gathers(loop.eqn)))))
        for loop in find_loops(program.jaxpr)
        if hoistable_gathers(loop.eqn)
    ]
    return plan.replace(kept=tuple(kept))


def repeated(program: Program) -> int:
    """How many straight-line gathers repeat an earlier one."""
    jaxpr = open_jaxpr(program.jaxpr)
    return len(regathers(jaxpr, jaxpr.invars))


def _candidates(most: int) -> list[int]:
    return [count for count in dict.fromkeys((most, most * 3 // 4, most // 2)) if count > 0]
