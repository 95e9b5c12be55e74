"""What was measured goes before the tables; what was not is theirs."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.devices import machine_of
from jax_deepcompile.costs.entries import (
    Axis,
    CollectiveFit,
    CollectiveKind,
    CopyFit,
    Direction,
    LinearFit,
    Machine,
    Method,
    OpTime,
    Source,
    analytical,
)
from jax_deepcompile.costs.measured import MeasuredCostModel, costs_of
from jax_deepcompile.costs.memory import MemoryUse
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.costs.simulation import Event, Simulation, Totals
from jax_deepcompile.costs.streams import Stream
from jax_deepcompile.lowering.emit import lower
from jax_deepcompile.planner.session import PlanOptions, plan_program
from tests.transforms.programs import sharded, stack_loss, stack_shapes

MEASURED = Source(Method.MEASURED, "2026-11-21", 5)
FIT = LinearFit(1e-3, 1e-9, 0.0, ((1024, 1e-3), (1 << 20, 2e-3)))
PROFILE = Profile(
    "0",
    Machine("a GPU", (Axis("data", 2), Axis("fsdp", 4)), ()),
    collectives=(
        CollectiveFit(CollectiveKind.ALL_GATHER, ("fsdp",), FIT, MEASURED),
        CollectiveFit(CollectiveKind.REDUCE_SCATTER, ("fsdp",), None, analytical("too little memory")),
    ),
    copies=(CopyFit(Direction.TO_HOST, FIT, MEASURED),),
)
COSTS = MeasuredCostModel(profile=PROFILE)


@pytest.mark.pure
def test_measured_collectives_and_copies_are_used():
    assert COSTS.collective_s("all-gather", 1 << 20, 4, 4) == FIT.seconds(1 << 20)
    assert COSTS.copy_s(1 << 20, Direction.TO_HOST) == FIT.seconds(1 << 20)


@pytest.mark.pure
def test_copies_are_as_much_slower_beside_those_the_other_way_as_was_measured():
    def slower(both_ways: float | None, direction: Direction = Direction.TO_HOST) -> float:
        profile = replace(PROFILE, copies=(CopyFit(Direction.TO_HOST, FIT, MEASURED, both_ways),))
        return MeasuredCostModel(profile=profile).copy(1 << 20, direction).both_ways

    tabled = CostModel().copy(1 << 20, Direction.TO_HOST).both_ways
    assert (slower(1.5), slower(None), slower(1.5, Direction.FROM_HOST)) == (1.5, tabled, tabled)
    assert slower(0.5) == 1.0, "a file may say anything"


@pytest.mark.pure
@pytest.mark.parametrize(
    ("kind", "group_size"), [("reduce-scatter", 4), ("all-reduce", 4), ("all-gather", 2), ("all-gather", 8)]
)
def test_other_collectives_come_from_the_tables(kind, group_size):
    expected = CostModel().collective_s(kind, 1 << 20, group_size, group_size)
    assert COSTS.collective_s(kind, 1 << 20, group_size, group_size) == expected


@pytest.mark.pure
def test_other_work_comes_from_the_tables():
    assert COSTS.copy_s(1 << 20, Direction.FROM_HOST) == CostModel().copy_s(1 << 20, Direction.FROM_HOST)
    assert COSTS.memory_s(1 << 20) == CostModel().memory_s(1 << 20)


@pytest.mark.pure
def test_a_profile_of_other_devices_is_refused():
    program, mesh = sharded(stack_loss, {"stack": stack_shapes()})
    with pytest.raises(errors.ProfileMismatchError, match="the profile is of another device kind"):
        plan_program(program, mesh, "cpu", PlanOptions(profile=PROFILE))


def simulated(*events: Event) -> Simulation:
    compute_s = sum(event.trips * (event.end_s - event.start_s) for event in events)
    return Simulation(compute_s, Totals(compute_s=compute_s), (), events, MemoryUse(0, 0, 0, 0, (), (), ()))


def kernel(name: str, seconds: float, line: str, trips: int = 1) -> Event:
    return Event(Stream.COMPUTE, name, 0.0, seconds, trips, source=line)


def op(name: str, seconds: float) -> OpTime:
    return OpTime(name, (seconds,), 1, (), "", MEASURED)


@pytest.mark.pure
def test_kernels_are_as_slow_as_their_line_was_measured_to_be():
    costs = MeasuredCostModel(profile=replace(PROFILE, ops=(op("dot.1", 3.0), op("add.1", 2.0), op("gone", 9.0))))
    ready = costs.calibrated(simulated(kernel("dot.1", 1.0, "model.py:1", trips=4), kernel("add.1", 2.0, "model.py:2")))
    assert ready.kernel_s(10.0, "model.py:1") == pytest.approx(30.0)
    assert ready.kernel_s(10.0, "model.py:2") == pytest.approx(10.0)
    assert ready.kernel_s(10.0, "model.py:3") == pytest.approx(10.0 * 14 / 6)


@pytest.mark.pure
def test_a_profile_of_another_program_says_nothing_of_kernels():
    costs = MeasuredCostModel(profile=replace(PROFILE, ops=(op("dot.1", 3.0),)))
    assert costs.calibrated(simulated(kernel("dot.1", 1.0, "a"), kernel("dot.2", 1.5, "b"))) is costs
    assert costs.kernel_s(1.0, "a") == 1.0


@pytest.mark.cpu_mesh
def test_a_step_is_planned_by_its_own_profile():
    @deepcompile.shard(passes=())
    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(state)
        return state - 0.1 * grads, loss

    state, batch = jnp.ones((256, 256)), jnp.ones((1024, 256))
    taken = step.profile(state, batch, runs=1)
    kernels = [each for each in taken.profile.ops if not each.name.startswith(("all_gather", "reduce_scatter", "psum"))]
    measured_s = sum(each.executions * (each.seconds or 0.0) for each in kernels)
    again = step.reshard(memory_limit="1GiB", profile=taken.profile).trace(*taken.args)
    assert again.plan().prediction.compute_s == pytest.approx(measured_s, rel=0.02)
    assert f"planned by a profile of a step of {taken.profile.step.seconds:.4g} s" in again.explain()
    assert f"measured step: {taken.profile.step.seconds:.4g} s" in step.trace(*taken.args).explain()
    assert "measured step" not in again.explain()
    assert "not measured, left to the tables: allocator peak" in again.explain()
    compiled = again.lower().compile()
    by_profile = deepcompile.simulate(compiled, step.mesh, taken.profile)
    assert by_profile.compute_s == pytest.approx(measured_s, rel=0.02)
    assert deepcompile.simulate(again, step.mesh, taken.profile).compute_s > 0
    assert deepcompile.simulate(compiled, step.mesh).compute_s != pytest.approx(measured_s, rel=1e-9)


@pytest.mark.cpu_mesh
def test_kernels_of_another_program_are_not_planned_by():
    @deepcompile.shard(passes=())
    def step(state, batch):
        return state - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(state)

    state = jnp.ones((64, 64))
    profile = step.profile(state, jnp.ones((128, 64)), runs=1).profile
    planned = step.reshard(memory_limit="1GiB", profile=profile)
    same, larger = (planned.trace(state, jnp.ones((rows, 64))).explain() for rows in (128, 256))
    assert "the kernels of the profile are another program's" in larger
    assert "the kernels of the profile are another program's" not in same
    assert profile.of_program("another").ops == ()
    assert profile.of_program("another").collectives == profile.collectives


@pytest.mark.cpu_mesh
def test_a_step_is_simulated_by_measured_collectives():
    program, mesh = sharded(stack_loss, {"stack": stack_shapes()})
    fits = tuple(CollectiveFit(kind, ("fsdp",), FIT, MEASURED) for kind in CollectiveKind)
    compiled = lower(program, mesh, "cpu").compile()
    by_profile = deepcompile.simulate(compiled, mesh, Profile("0", machine_of(mesh), collectives=fits))
    assert by_profile.communication_s > 5 * deepcompile.simulate(compiled, mesh).communication_s
    with pytest.raises(errors.ProfileMismatchError, match="the profile is of another device kind"):
        deepcompile.simulate(compiled, mesh, PROFILE)


@pytest.mark.cpu_mesh
def test_a_profile_of_another_network_is_refused():
    _, mesh = sharded(stack_loss, {"stack": stack_shapes()})
    elsewhere = Profile("0", replace(machine_of(mesh), network="1 x 400 Gbit/s a node"))
    with pytest.raises(errors.ProfileMismatchError, match="another network: expected 400 Gbit/s a GPU, found 1 x 400"):
        costs_of(mesh, elsewhere)
