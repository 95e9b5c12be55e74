"""Whole profiles of a small real step on eight virtual devices."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

import jax_deepcompile as deepcompile
from jax_deepcompile import jitted
from jax_deepcompile import step as step_module
from jax_deepcompile.costs.devices import machine_of
from jax_deepcompile.costs.entries import Axis, CollectiveKind, Method
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.lowering.xla_options import CUDA_GRAPHS
from jax_deepcompile.profilers import Taken, take_profile
from jax_deepcompile.profilers.runs import StepRuns
from tests.profilers import steps

pytestmark = pytest.mark.cpu_mesh

RUNS = 2


def take(step, args, limit_bytes: int = 0, **options) -> Taken:
    traced = step.trace(*args)
    return take_profile(
        step, args, traced.lower().compile(), traced.sharded, step.mesh, runs=RUNS, limit_bytes=limit_bytes, **options
    )


@pytest.fixture(scope="module")
def taken() -> Taken:
    step = steps.sharded()
    return take(step, (step.init(steps.create), steps.batch()), limit_bytes=1 << 15)


def test_everything_is_measured_that_can_be(taken: Taken):
    profile = taken.profile
    times = {op.name: op for op in profile.ops}
    for op in times.values():
        if "all_gather" in op.name or "reduce_scatter" in op.name:
            assert op.source.method is Method.MEASURED
            assert len(op.per_device_s) == 8
            assert op.source.runs == RUNS
            assert op.equations
    assert profile.collective_s(CollectiveKind.ALL_GATHER, ("fsdp",), 1 << 20)
    assert profile.step is not None
    assert profile.step.seconds > 0
    assert profile.memory is not None
    assert profile.memory.temp_bytes > 0
    assert "allocator peak: the cpu backend keeps no allocator statistics" in profile.fallbacks()
    assert Profile.from_json(profile.to_json()) == profile


def test_most_device_time_is_attributed(taken: Taken):
    time_s = [(op.seconds * op.executions, op.equations) for op in taken.profile.ops if op.seconds]
    attributed_s = sum(seconds for seconds, found in time_s if found)
    assert attributed_s > 0.8 * sum(seconds for seconds, _ in time_s)


def test_the_state_comes_back_as_many_steps_on(taken: Taken):
    (params, opt_state), batch = taken.args
    assert int(opt_state[0].count) == 1 + 2 * RUNS
    state = steps.create()
    for _ in range(1 + 2 * RUNS):
        state, _ = jax.jit(steps.train_step)(state, steps.batch())
    np.testing.assert_allclose(params["head"], state[0]["head"], rtol=1e-5)
    assert batch is not None


def test_on_gpus_what_is_traced_launches_every_kernel_by_itself(monkeypatch):
    """By an option of XLA's that CPUs take and do not look at."""
    asked = []
    for module in (step_module, jitted):
        monkeypatch.setattr(module, "launched_singly", lambda platform: asked.append(platform) or {CUDA_GRAPHS: ""})
    step = steps.sharded()
    taken = step.profile(step.init(steps.create), steps.batch(), runs=RUNS)
    assert asked == ["cpu", "cpu"], "whether there is such a program, and for it"
    assert any(op.source.method is Method.MEASURED for op in taken.profile.ops)
    assert int(taken.args[0][1][0].count) == 2 + 2 * RUNS, "it has run before it is traced"


def test_there_is_never_a_second_state():
    step = steps.sharded()
    args = (step.init(steps.create), steps.batch())
    leaves = len(jax.tree.leaves(args[0]))
    before = len(jax.live_arrays())
    held: list[int] = []

    def watched(*args):
        held.append(len(jax.live_arrays()) - before)
        return step(*args)

    runs = StepRuns(watched, args, step.trace(*args).sharded)
    for _ in range(3):
        runs()
    assert max(held) < leaves
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(args[0]))
    assert int(runs.args[0][1][0].count) == 3


def test_a_step_that_does_not_donate_runs_from_the_same_state():
    step = steps.sharded(donate=False)
    args = (step.init(steps.create), steps.batch())
    runs = StepRuns(step, args, step.trace(*args).sharded)
    runs()
    runs()
    assert runs.args is args
    assert int(args[0][1][0].count) == 0


def test_objects_are_updated_in_place():
    def train(model: nnx.Linear, batch):
        loss, grads = nnx.value_and_grad(lambda model: (model(batch["x"]) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))
        return loss

    step = deepcompile.shard(train)
    model = nnx.Linear(steps.WIDTH, 8, rngs=nnx.Rngs(0))
    before = np.asarray(model.kernel[...])
    taken = take(step, (model, steps.batch()))
    assert taken.args[0] is model
    assert not np.array_equal(before, model.kernel[...])
    assert not model.kernel[...].is_deleted()


def test_a_known_profile_of_the_same_program_runs_nothing(taken: Taken):
    def never(*args):
        raise AssertionError("called")

    step = steps.sharded()
    traced = step.trace(*taken.args)
    again = take_profile(
        never, taken.args, traced.lower().compile(), traced.sharded, step.mesh, known=taken.profile, runs=RUNS
    )
    assert again == replace(taken, timelines=again.timelines)


def test_of_a_known_profile_of_another_program_the_machine_is_kept(taken: Taken):
    step = deepcompile.shard(lambda state, batch: (state + batch["x"].mean(), {}))
    other = take(step, (jax.numpy.zeros((64, 8)), steps.batch()), known=taken.profile).profile
    assert other.fingerprint != taken.profile.fingerprint
    assert (other.collectives, other.copies) == (taken.profile.collectives, taken.profile.copies)
    assert other.ops != taken.profile.ops


def test_of_a_known_profile_of_another_machine_nothing_is_kept(taken: Taken):
    step = steps.sharded(mesh={"fsdp": 4})
    other = take(step, (step.init(steps.create), steps.batch()), known=taken.profile).profile
    assert other.machine.axes == (Axis("fsdp", 4),)
    assert other.collectives != taken.profile.collectives
    assert {len(op.per_device_s) for op in other.ops} <= {0, 4}


def test_without_a_free_profiler_ops_fall_back_and_the_step_runs(tmp_path):
    step = steps.sharded()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(tmp_path), profiler_options=options):
        taken = take(step, (step.init(steps.create), steps.batch()))
    assert {op.source.method for op in taken.profile.ops} == {Method.ANALYTICAL}
    assert any("RuntimeError" in line for line in taken.profile.fallbacks())
    assert taken.profile.step is not None
    assert int(taken.args[0][1][0].count) == 1 + 2 * RUNS


def test_an_error_of_the_step_is_the_callers():
    step = steps.sharded()
    args = (step.init(steps.create), steps.batch())
    traced = step.trace(*args)

    def broken(*args):
        raise FloatingPointError("loss is not finite")

    with pytest.raises(FloatingPointError, match="loss is not finite"):
        take_profile(broken, args, traced.lower().compile(), traced.sharded, step.mesh)


def test_machines():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    machine = machine_of(mesh)
    assert (machine.device_kind, machine.axes) == ("cpu", (Axis("data", 2), Axis("fsdp", 4)))
    assert dict(machine.versions)["jax"] == jax.__version__
    assert machine_of(AbstractMesh((8,), ("fsdp",))).device_kind == "abstract"


@pytest.mark.h100_aot
def test_gpus_that_are_not_here_have_fallbacks_for_everything():
    mesh = deepcompile.targets.h100(nodes=2, gpus_per_node=4).make_mesh((2, 4), ("data", "fsdp"))
    step = steps.sharded(mesh=mesh)
    state = jax.eval_shape(steps.create)
    taken = take(step, (state, steps.batch()))
    profile = taken.profile
    assert profile.machine.axes == (Axis("data", 2, hosts=2), Axis("fsdp", 4))
    assert profile.step is None
    assert {entry.fit for entry in (*profile.collectives, *profile.copies)} == {None}
    assert any(op.equations and op.where for op in profile.ops)
    assert len(profile.fallbacks()) == 1
    assert profile.fallbacks()[0].endswith(": the devices of this mesh are not attached to this process")
    assert profile.memory is not None
    assert profile.memory.source.method is Method.COMPILED
