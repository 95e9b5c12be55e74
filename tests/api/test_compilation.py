"""The list of stages: each runs once for calls of one form, and what it makes is verified."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_deepcompile as deepcompile
from jax_deepcompile import compiler
from tests.api.steps import batch, create, step

pytestmark = pytest.mark.cpu_mesh

STAGES = ["trace", "canonicalize", "partition", "stop alone", "accumulate", "name loops", "donate", "plan"]


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """The names of the stages that run."""
    names, stage = [], compiler.stage

    def recorded(name, *inputs):
        names.append(name)
        return stage(name, *inputs)

    monkeypatch.setattr(compiler, "stage", recorded)
    return names


def test_every_stage_runs_once_for_calls_of_one_form(ran):
    sharded = deepcompile.shard(step, microbatches=2)
    state = create()
    for _ in range(3):
        state, _ = sharded(state, batch())
    assert ran == STAGES
    traced = sharded.trace(create(), batch())
    traced.lower().compile()
    assert ran == STAGES
    assert traced.program is traced.compilation.program
    sharded(state, batch(32))
    assert ran == 2 * STAGES


def test_a_trace_plans_when_it_is_asked_to(ran):
    traced = deepcompile.shard(step).trace(create(), batch())
    assert ran == STAGES[:-1]
    assert "not planned yet" in repr(traced)
    traced.explain()
    assert ran == STAGES


def test_a_state_that_is_created_goes_through_the_same_list(ran):
    deepcompile.shard(step).init(create)
    assert ran == STAGES[:3]


def test_calls_of_other_types_have_programs_of_their_own():
    def count(state, x):
        return state + 1, jnp.sum(x, axis=1) * 2

    sharded = deepcompile.shard(count)
    for dtype in (np.float32, np.int32, np.float64, np.int32):
        x = np.arange(32).reshape(16, 2).astype(dtype)
        for _ in range(2):
            _, found = sharded(jnp.zeros(16), x)
            np.testing.assert_array_equal(found, x.sum(1) * 2)
            assert found.dtype == jnp.asarray(x).dtype
    assert len(sharded._compilations) == 2


def test_what_a_stage_makes_is_verified(monkeypatch):
    def broken(program, mesh):
        return program.replace(inputs=program.inputs[1:])

    monkeypatch.setattr(compiler, "stop_alone", broken)
    with pytest.raises(deepcompile.errors.InvariantError):
        deepcompile.shard(step).trace(create(), batch())


def test_nothing_is_kept_of_a_calls_arrays():
    sharded = deepcompile.shard(step, donate=False)
    sharded(create(), batch())
    assert sharded._last is not None
    call = sharded._last.call
    leaves = jax.tree.leaves((call.args, call.kwargs))
    assert not any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((16, 8)))

    descend = deepcompile.shard(lambda model, x: nnx.update(model, jax.tree.map(jnp.cos, nnx.state(model))))
    descend(Model(), batch()["x"])
    assert descend._last is not None
    assert descend._last.call.objects == ()
    (model, *_) = descend.explain().division.arguments
    assert model.line().startswith("  model: state, donated: NNX objects; returned anew")
