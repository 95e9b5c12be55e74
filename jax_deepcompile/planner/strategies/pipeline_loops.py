"""Collectives moved and joined: layer loops that gather ahead and reduce behind, and buckets outside of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_deepcompile.analysis.gathers import size_bytes
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.parts import split_body
from jax_deepcompile.costs.program_time import ranks_per_node
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import combiner_options, double_buffering
from jax_deepcompile.planner.apply import apply_loops
from jax_deepcompile.planner.candidate import Environment, Trial
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.search import Proposal
from jax_deepcompile.planner.stacks import small_stacks
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules


@dataclass(frozen=True)
class PipelineLoops:
    """Layer loops that gather ahead and reduce behind: one bucket a layer each way, small parameters once for all."""

    name: str = "pipeline_loops"

    def open(self, base: Program, start: Plan, environment: Environment) -> Iterator[Proposal]:
        if start.loops or not choose_schedules(base):
            return
        stacks = small_stacks(base, environment)
        stacked = apply_loops(base, environment.mesh, start.replace(stacks=stacks))
        schedules = choose_schedules(stacked)
        options = dict(start.options)
        if schedules:
            options |= double_buffering() | combiner_options(*layer_bytes(stacked, schedules))
        plan = start.replace(stacks=stacks, loops=schedules, options=options)
        ahead = sum(1 for schedule in schedules if schedule.prefetch_layers)
        behind = sum(1 for schedule in schedules if schedule.delay_layers)
        small = sum(len(choice.gathers) + len(choice.reductions) for choice in stacks)
        decision = f"{ahead} loops gather a layer ahead, {behind} reduce a layer behind, one bucket each"
        yield Proposal(plan, decision + f"; {small} small collectives once for all layers" * bool(small))


@dataclass(frozen=True)
class BucketCollectives:
    """Neighbours outside of layer loops share one collective, up to the size where its latency no longer counts."""

    name: str = "bucket_collectives"

    def propose(self, base: Program, now: Trial, environment: Environment) -> Iterator[Proposal]:
        if now.plan.loops:
            return
        size = bandwidth_bound_bytes(base, environment, _LATENCY_SHARE)
        options = dict(now.plan.options) | combiner_options(size, size // base.mesh.size)
        yield Proposal(now.plan.replace(options=options), f"buckets of {size / 2**20:.0f} MiB")


_LATENCY_SHARE = 0.05
"""Of a bucket's time: beyond that, joining more saves less than it delays."""


def bandwidth_bound_bytes(program: Program, environment: Environment, latency_share: float) -> int:
    """The smallest power of two of bytes whose gather spends no more than ``latency_share`` of its time on latency."""
    costs, names = environment.costs, list(program.mesh.names)
    ranks = ranks_per_node(names, program.mesh, costs)

    def seconds(size: int) -> float:
        return costs.collective_s("all-gather", size, program.mesh.size, ranks)

    size = 1 << 20
    while seconds(1) > latency_share * seconds(size) and size < 1 << 32:
        size *= 2
    return size


def layer_bytes(program: Program, schedules: Sequence[LoopSchedule]) -> tuple[int, int]:
    """The most bytes that one iteration of a layer loop gathers, and keeps of what it reduces."""
    wanted = {schedule.loop for schedule in schedules}
    splits = [split_body(loop.eqn) for loop in find_loops(program.jaxpr) if loop.name in wanted]
    gathered = max(sum(map(size_bytes, split.early.outputs)) for split in splits)
    reduced = max(sum(_reduced_bytes(eqn) for eqn in split.late.jaxpr.eqns) for split in splits)
    return gathered, reduced


def _reduced_bytes(eqn: Any) -> int:
    return sum(map(size_bytes, eqn.outvars)) if eqn.primitive.name == "reduce_scatter" else 0
