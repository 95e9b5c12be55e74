"""Microbatches are overlapped where something waits, and where memory allows."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.simulation import Loop, Simulation, Totals
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.planner.budget import total_bytes
from jax_deepcompile.planner.candidate import Environment
from jax_deepcompile.planner.layers import keep_over_loops
from jax_deepcompile.planner.plan import Plan, Prediction
from jax_deepcompile.planner.stacks import repeated_stacks, with_gathers
from jax_deepcompile.planner.strategies import overlap_microbatches as overlap
from jax_deepcompile.planner.strategies.overlap_microbatches import OverlapMicrobatches
from jax_deepcompile.planner.strategy import Proposal
from jax_deepcompile.transforms.microbatch_loops import MicrobatchLoop
from jax_deepcompile.transforms.stack_collectives import StackCollectives
from tests.planner.situations import MICROBATCHES, NO_MEMORY, START, accumulating, candidate, in_pipelines
from tests.transforms.programs import run_stack, stack_loss, stack_shapes

pytestmark = pytest.mark.pure

LIMIT = 1 << 30
PROGRAM, MESH = accumulating(stack_loss, {"stack": stack_shapes()})
ENVIRONMENT = Environment(MESH, "cuda", CostModel(), LIMIT)
PIPELINED = in_pipelines(PROGRAM)
SIDE_BY_SIDE = (MicrobatchLoop("microbatches", overlap=True),)


def taught_loss(params, batch):
    """The target comes of a loop over groups of layers, which reads its layers by index as pipelined loops do."""

    def group(index, x):
        return run_stack(
            jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), params["t"]), x
        )

    target = lax.stop_gradient(lax.fori_loop(0, 3, group, batch))
    return jnp.mean((run_stack(params["stack"], batch) - target) ** 2)


def proposals(
    step_s: float = 50.0,
    plan: Plan = PIPELINED,
    free_bytes: int = LIMIT,
    environment: Environment = ENVIRONMENT,
    forward: tuple[float, float] = (1.0, 1.3),
    backward: tuple[float, float] = (3.0, 2.9),
    program: Program = PROGRAM,
) -> list[Proposal]:
    """For a step that computes for 40 s and communicates for 45, and seconds of both in its layer loops."""
    trips = (Totals(compute_s, network_s, gathered_bytes=1 << 20) for compute_s, network_s in (forward, backward))
    loops = tuple(Loop(str(place), "", 4, True, 1.0, trip, MICROBATCHES) for place, trip in enumerate(trips))
    run = Simulation(step_s, Totals(40.0, 45.0), loops, (), NO_MEMORY)
    prediction = Prediction(step_s, 40.0, 45.0, 5.0, LIMIT - free_bytes)
    best = candidate(program, plan, prediction, run)
    return list(OverlapMicrobatches().propose(program, best, environment))


def test_where_neither_compute_nor_the_network_is_busy_all_the_time():
    (proposal,) = proposals()
    assert proposal.plan == PIPELINED.having(MicrobatchLoop, SIDE_BY_SIDE)
    assert proposal.decision.startswith("in microbatches the next forward pass beside backward, 0.00 GiB")


def test_layers_that_all_wait_for_the_network_go_on_doing_so():
    assert proposals(backward=(3.0, 3.2)) == []


def test_layers_that_do_not_wait_still_have_a_turn_less():
    assert proposals(forward=(1.0, 0.9))


def test_a_little_is_not_worth_a_compilation():
    assert proposals(step_s=45.3) == []


def test_what_is_proposed_can_be_carried_out():
    """The loop over groups is no layer loop, though it looks like one until it is run as it is planned."""
    stacks = stack_shapes(12)
    groups = {name: (3, 4, *shape[1:]) for name, shape in stacks.items()}
    program, mesh = accumulating(taught_loss, {"t": groups, "stack": stack_shapes(4)})
    plan = in_pipelines(program)
    inner = {loop.name for loop in find_loops(program) if len(loop.path) == 2}
    assert inner & {each.loop for each in plan.of(MicrobatchLoop)}
    (proposal,) = proposals(program=program, plan=plan, environment=replace(ENVIRONMENT, mesh=mesh))
    verify(proposal.plan.program(program, mesh))


def test_once_is_enough():
    assert proposals(plan=PIPELINED.having(MicrobatchLoop, SIDE_BY_SIDE)) == []


def test_without_pipelined_loops_there_is_nothing_to_run_side_by_side():
    assert proposals(plan=START) == []


def test_without_a_limit_memory_does_not_matter():
    assert proposals(free_bytes=0, environment=replace(ENVIRONMENT, limit_bytes=None))


def keeping_all() -> Plan:
    plan = PIPELINED.having(StackCollectives, with_gathers((), repeated_stacks(PROGRAM, ())))
    return keep_over_loops(PROGRAM, plan, ENVIRONMENT)


def test_what_does_not_fit_beside_is_no_longer_kept(monkeypatch):
    monkeypatch.setattr(overlap, "SMALL_STACK_BYTES", 0)
    plan = keeping_all()
    (roomy,), (tight,) = proposals(plan=plan), proposals(plan=plan, free_bytes=0)
    assert roomy.plan == plan.having(MicrobatchLoop, SIDE_BY_SIDE)
    less = repeated_stacks(PROGRAM, tight.plan.of(StackCollectives))
    assert less
    assert total_bytes(less) < total_bytes(repeated_stacks(PROGRAM, ()))
    assert tight.plan.of(MicrobatchLoop) == SIDE_BY_SIDE


def test_what_cannot_fit_is_not_tried():
    """Small parameters stay gathered for all layers, whatever memory is left."""
    assert proposals(plan=keeping_all(), free_bytes=0) == []
    assert proposals(free_bytes=0) == []
