"""Classes of the user's that are made of arrays and of nothing else, in what a step is given and what it returns."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from flax.training.train_state import TrainState

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from tests.api.steps import assert_equal

pytestmark = pytest.mark.cpu_mesh

ARRAYS = jax.Array | np.ndarray


@jax.tree_util.register_pytree_with_keys_class
class Converted:
    def __init__(self, w, count):
        self.w, self.count = jnp.asarray(w, jnp.float32), jnp.asarray(count)

    def tree_flatten_with_keys(self):
        keys = map(jax.tree_util.GetAttrKey, ("w", "count"))
        return tuple(zip(keys, (self.w, self.count), strict=True)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@jax.tree_util.register_pytree_node_class
class OfDict:
    """Converts what is in the dict that it holds."""

    def __init__(self, values):
        self.values = {k: jnp.asarray(v) for k, v in values.items()} if isinstance(values, dict) else values

    def tree_flatten(self):
        return (self.values,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@struct.dataclass
class Checked:
    w: Any
    count: Any
    name: str = struct.field(pytree_node=False, default="")

    def __post_init__(self):
        assert isinstance(self.w, ARRAYS), self.w
        assert isinstance(self.count, ARRAYS | int), self.count


@struct.dataclass
class CheckedByOthers(Checked):
    """As type checkers are told to for the sake of ``jax.tree``."""

    def __post_init__(self):
        if not any(frame.frame.f_globals.get("__name__") == "jax._src.tree_util" for frame in inspect.stack()):
            super().__post_init__()


def step(state, batch):
    inner = state["inner"][0]
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(inner.w)
    after = type(inner)(inner.w - 0.1 * gradient, inner.count + 1)
    return {"inner": [after], "more": state["more"]}, (loss, type(inner)(gradient, inner.count))


@pytest.mark.parametrize("kind", [Converted, Checked, CheckedByOthers])
def test_what_takes_arrays_only_gets_nothing_else(kind):
    def create():
        return {"inner": [kind(jnp.ones((16, 8)), 0)], "more": (None, jnp.zeros(8))}

    batch = np.ones((16, 16), np.float32)
    sharded, plain = deepcompile.shard(step), jax.jit(step)
    state, expected = create(), create()
    for _ in range(3):
        (state, out), (expected, out_expected) = sharded(state, batch), plain(expected, batch)
        assert isinstance(state["inner"][0], kind)
        assert_equal((state, out), (expected, out_expected))
    assert state["inner"][0].w.sharding.spec[0] == "fsdp"
    assert "state['inner'][0].w" in [port.path for port in sharded.trace(state, batch).program.inputs]
    assert sharded.lower(state, batch).compile() is not None
    assert sharded.lower_gspmd(state, batch).compile() is not None


def test_what_converts_what_is_further_inside():
    def plain(state, batch):
        w = state.values["w"]
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        return OfDict({"w": w - gradient, "count": state.values["count"] + 1}), loss

    def create():
        return OfDict({"w": jnp.ones((16, 8)), "count": 0})

    batch = jnp.ones((16, 16))
    assert_equal(deepcompile.shard(plain)(create(), batch), jax.jit(plain)(create(), batch))


def test_what_changes_in_there_is_named():
    def renamed(state, batch):
        return {"inner": state["inner"].replace(name="other"), "w": state["w"]}, batch.mean()

    state = {"inner": Checked(jnp.ones((16, 8)), 0), "w": jnp.zeros(8)}
    with pytest.raises(errors.StateChangedError, match=r"static fields of state\['inner'\] \(Checked\) differ"):
        deepcompile.shard(renamed).trace(state, jnp.zeros((16, 16)))


def test_a_train_state_may_check_its_step():
    @struct.dataclass
    class Own(TrainState):
        def __post_init__(self):
            assert isinstance(self.step, ARRAYS | int), self.step

    optimizer = optax.adam(0.1)

    def create():
        return Own.create(apply_fn=None, params={"w": jnp.ones((16, 8))}, tx=optimizer)

    def train_step(state, batch):
        loss, gradients = jax.value_and_grad(lambda params: jnp.mean((batch @ params["w"]) ** 2))(state.params)
        return state.apply_gradients(grads=gradients), loss

    batch = jnp.ones((16, 16))
    assert_equal(deepcompile.shard(train_step)(create(), batch), jax.jit(train_step)(create(), batch))
