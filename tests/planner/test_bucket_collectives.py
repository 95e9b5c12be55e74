"""Collectives outside of layer loops share buckets, up to the size where their latency no longer counts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.lowering.compile import combiner_options
from jax_deepcompile.planner.candidate import Environment, evaluate
from jax_deepcompile.planner.strategies.bucket_collectives import BucketCollectives
from jax_deepcompile.planner.unrolled import bandwidth_bound_bytes
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.unshard import ReusedGathers, repeated_gathers
from tests.planner.situations import START, UNROLLED, candidate, situation, unrolled_loss
from tests.schedules import gathers, instructions
from tests.transforms.programs import count, h100s, sharded

WIDE = {f"layer{index}": {"up": (512, 1024), "down": (1024, 512), "bias": (1024,)} for index in range(3)}


@dataclass(frozen=True)
class Line(CostModel):
    """Collectives take a latency, and then so many bytes a second."""

    latency_s: float = 10e-6
    bytes_per_s: float = 100e9

    def collective_s(self, *arguments, **_) -> float:
        return self.latency_s + arguments[1] / self.bytes_per_s


@pytest.mark.pure
@pytest.mark.parametrize(
    ("latency_s", "share", "size"),
    [
        (10e-6, 0.05, 32 << 20),
        (20e-6, 0.05, 64 << 20),
        (10e-6, 0.5, 1 << 20),
        (0.0, 0.05, 1 << 20),
        (1.0, 0.05, 1 << 32),
    ],
)
def test_the_size_where_latency_no_longer_counts(latency_s: float, share: float, size: int):
    """19 times what is sent while a collective begins, for a share of 5 %; as a power of two, from 1 MiB to 4 GiB."""
    program, _, environment = situation(unrolled_loss, UNROLLED, Line(latency_s=latency_s))
    assert bandwidth_bound_bytes(program, environment, share) == size


@pytest.mark.pure
def test_gathered_buckets_have_that_size_and_reduced_ones_a_part_of_it():
    program, mesh = sharded(unrolled_loss, WIDE, batch=(8192, 512))
    best, environment = candidate(program), Environment(mesh, "cuda", Line(), None)
    (proposal,) = BucketCollectives().propose(program, best, environment)
    assert dict(proposal.plan.options) == combiner_options(32 << 20, (32 << 20) // program.mesh.size)
    assert proposal.decision == "buckets of 32 MiB"
    assert proposal.plan.replace(options=()) == best.plan


@pytest.mark.pure
@pytest.mark.parametrize("latency_s", [10e-6, 100e-6])
def test_what_is_sent_sooner_than_a_collective_begins_is_gathered_once(latency_s: float):
    """2 MiB a matrix: in all more than is sent in 10 microseconds, and less than in 100."""
    program, mesh = sharded(unrolled_loss, WIDE, batch=(8192, 512))
    environment = Environment(mesh, "cuda", Line(latency_s=latency_s), None)
    (proposal,) = BucketCollectives().propose(program, candidate(program), environment)
    again = tuple(repeated_gathers(program))
    assert again
    assert proposal.plan.of(ReusedGathers) == ((ReusedGathers(again),) if latency_s > 50e-6 else ())
    once = candidate(proposal.plan.program(program, mesh), proposal.plan)
    assert [each.plan for each in BucketCollectives().propose(program, once, environment)] == [once.plan]


@pytest.mark.pure
def test_loops_have_buckets_of_their_own():
    plan = START.having(LoopSchedule, [LoopSchedule("layers @forward", 1, 0)])
    program, best, environment = situation(unrolled_loss, UNROLLED, Line(), plan=plan)
    assert list(BucketCollectives().propose(program, best, environment)) == []


@pytest.mark.h100_aot
def test_one_collective_a_bucket():
    program, mesh = sharded(unrolled_loss, UNROLLED, mesh=h100s())
    environment = Environment(mesh, "cuda", CostModel(), None)
    alone = START.replace(options=combiner_options(0, 0))
    (proposal,) = BucketCollectives().propose(program, evaluate(program, alone, environment), environment)
    apart, joined = (evaluate(program, plan.without(ReusedGathers), environment) for plan in (alone, proposal.plan))
    launched = [gathers(instructions(each.evaluated.module)) for each in (apart, joined)]
    assert launched[0] == count(program, "all_gather")
    assert launched[1] <= launched[0] // 3
    assert joined.prediction.communication_s < 0.5 * apart.prediction.communication_s
    assert joined.simulation.gathered_bytes == apart.simulation.gathered_bytes
