"""Microbatches are overlapped where something waits, and where memory allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.memory import MemoryUse
from jax_deepcompile.costs.simulation import Loop, Simulation, Totals
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.planner.apply import apply_plan
from jax_deepcompile.planner.candidate import Environment, Trial
from jax_deepcompile.planner.contracts import loops_around
from jax_deepcompile.planner.plan import Plan, Prediction
from jax_deepcompile.planner.search import Proposal
from jax_deepcompile.planner.stacks import repeated_stacks, total_bytes, with_gathers
from jax_deepcompile.planner.strategies import overlap_microbatches as overlap
from jax_deepcompile.planner.strategies.overlap_microbatches import OverlapMicrobatches
from jax_deepcompile.planner.strategies.unshard import keep_over_loops
from jax_deepcompile.transforms.pipeline_loops import choose_schedules
from tests.partition.steps import shapes, training_step
from tests.transforms.programs import run_stack, stack_loss, stack_shapes

pytestmark = pytest.mark.pure

MICROBATCHES, LIMIT = 4, 1 << 30


def program_of(loss, params):
    optimizer = optax.sgd(0.1)
    params = shapes(params)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    step = deepcompile.shard(training_step(loss, optimizer), {"fsdp": 8}, microbatches=MICROBATCHES)
    return step.trace(state, shapes((16 * MICROBATCHES, 16))).sharded, step.mesh


PROGRAM, MESH = program_of(stack_loss, {"stack": stack_shapes()})
ENVIRONMENT = Environment(MESH, "cuda", CostModel(), LIMIT)
PIPELINED = Plan("0").replace(loops=choose_schedules(PROGRAM))


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
    nothing: Any = None
    trips = (Totals(compute_s, network_s, gathered_bytes=1 << 20) for compute_s, network_s in (forward, backward))
    loops = tuple(Loop(str(place), "", 4, True, 1.0, trip, MICROBATCHES) for place, trip in enumerate(trips))
    run = Simulation(step_s, Totals(40.0, 45.0), loops, (), MemoryUse(0, 0, 0, 0, (), (), ()))
    prediction = Prediction(step_s, 40.0, 45.0, 5.0, LIMIT - free_bytes)
    now = Trial(plan, program, nothing, nothing, run, prediction, 0)
    return list(OverlapMicrobatches().propose(program, now, environment))


def test_where_neither_compute_nor_the_network_is_busy_all_the_time():
    (proposal,) = proposals()
    assert proposal.plan == PIPELINED.replace(overlapped=("scan.0",))
    assert proposal.decision.startswith("in scan.0 the next forward pass beside backward, 0.00 GiB")


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
    program, mesh = program_of(taught_loss, {"t": groups, "stack": stack_shapes(4)})
    plan = Plan("0").replace(loops=choose_schedules(program))
    assert any(name.count("/") == 1 for name in loops_around(plan))
    (proposal,) = proposals(program=program, plan=plan, environment=replace(ENVIRONMENT, mesh=mesh))
    verify(apply_plan(program, mesh, proposal.plan))


def test_once_is_enough():
    assert proposals(plan=PIPELINED.replace(overlapped=("scan.0",))) == []


def test_without_pipelined_loops_there_is_nothing_to_run_side_by_side():
    assert proposals(plan=Plan("0")) == []


def test_without_a_limit_memory_does_not_matter():
    assert proposals(free_bytes=0, environment=replace(ENVIRONMENT, limit_bytes=None))


def keeping_all() -> Plan:
    plan = PIPELINED.replace(stacks=with_gathers((), repeated_stacks(PROGRAM, ())))
    return keep_over_loops(PROGRAM, plan, ENVIRONMENT)


def test_what_does_not_fit_beside_is_no_longer_kept(monkeypatch):
    monkeypatch.setattr(overlap, "SMALL_STACK_BYTES", 0)
    plan = keeping_all()
    (roomy,), (tight,) = proposals(plan=plan), proposals(plan=plan, free_bytes=0)
    assert roomy.plan == plan.replace(overlapped=("scan.0",))
    less = repeated_stacks(PROGRAM, tight.plan.stacks)
    assert less
    assert total_bytes(less) < total_bytes(repeated_stacks(PROGRAM, ()))
    assert tight.plan.overlapped == ("scan.0",)


def test_what_cannot_fit_is_not_tried():
    """Small parameters stay gathered for all layers, whatever memory is left."""
    assert proposals(plan=keeping_all(), free_bytes=0) == []
    assert proposals(free_bytes=0) == []
