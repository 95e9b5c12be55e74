"""What elementwise work makes larger is gathered as what it was made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

import jax_deepcompile as deepcompile
from tests.cases import examples
from tests.equality.harness import MESHES, assert_close
from tests.partition.steps import FLAT, HYBRID, moves

D = 16
X = jax.ShapeDtypeStruct((32, D), jnp.float32)
F8 = jnp.float8_e4m3fn

STORED = {
    "integers with a scale a column": lambda p: p["q"].astype(jnp.float32) * p["column"],
    "integers with a scale a row": lambda p: (p["q"].astype(jnp.float32) - p["row"][:, None]) / p["row"][:, None],
    "integers with one scale": lambda p: p["q"].astype(jnp.float32) * p["one"],
    "half precision": lambda p: p["half"].astype(jnp.float32),
    "half precision, transposed": lambda p: p["half"].astype(jnp.float32).T,
    "eight-bit floats made of wider ones": lambda p: (p["wide"] * 2).astype(F8).astype(jnp.float32) / 2,
    "a row for all": lambda p: jnp.broadcast_to(p["column"], (D, D)) * 2 + p["row"],
    "a column for all": lambda p: jnp.broadcast_to(p["row"][:, None], (D, D)) - p["one"],
    "half precision, named": lambda p: checkpoint_name(p["half"].astype(jnp.float32), "w"),
}
AS_THEY_ARE = {
    "narrowed": lambda p: p["wide"].astype(jnp.bfloat16),
    "halves multiplied": lambda p: p["half"].astype(jnp.float32) * (p["other"].astype(jnp.float32) + 1),
    "four-bit integers": lambda p: p["q"].astype(jnp.int4).astype(jnp.float32) * p["column"],
    "exponentials": lambda p: jnp.exp(p["half"].astype(jnp.float32)),
    "cumulated": lambda p: jnp.cumsum(p["half"].astype(jnp.float32), axis=1),
}


def params() -> dict:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((D, D), np.float32) for name in ("wide", "half", "other")}
    vectors = {name: rng.uniform(1, 2, D).astype(np.float32) for name in ("row", "column")}
    halves = {name: jnp.asarray(arrays[name], jnp.bfloat16) for name in ("half", "other")}
    q = jnp.asarray(rng.integers(-128, 128, (D, D)), jnp.int8)
    return arrays | vectors | halves | {"q": q, "one": jnp.float32(0.5)}


def step_of(weights_of):
    def step(p, x):
        w = weights_of(p)
        return p | {"one": p["one"] * 1.5}, jnp.tanh(x.astype(w.dtype) @ w)

    return step


def gathers(weights_of, mesh=FLAT) -> list[str]:
    """But for that of the result."""
    traced = deepcompile.shard(step_of(weights_of), mesh).trace(jax.eval_shape(params), X)
    return [move for move in moves(traced) if move.startswith("all_gather") and "[32,16]" not in move]


@pytest.mark.pure
class TestWhatIsGathered:
    def test_golden(self):
        assert gathers(STORED["integers with a scale a column"]) == [
            "all_gather fsdp: f32[1,2] -> f32[1,16]",
            "all_gather fsdp: i8[2,16] -> i8[16,16]",
        ]

    @pytest.mark.parametrize("name", STORED)
    def test_is_as_small_as_it_was_stored(self, name):
        found = gathers(STORED[name])
        assert found
        assert not [move for move in found if move.endswith("f32[16,16]")]

    @pytest.mark.parametrize("name", AS_THEY_ARE)
    def test_is_as_it_was_where_nothing_smaller_makes_it(self, name):
        whole = "bf16[16,16]" if name == "narrowed" else "f32[16,16]"
        assert [move for move in gathers(AS_THEY_ARE[name]) if move.endswith(whole)]

    def test_on_two_axes(self):
        assert gathers(STORED["half precision"], HYBRID) == ["all_gather fsdp: bf16[4,16] -> bf16[16,16]"]


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("weights_of", [*STORED.values(), *AS_THEY_ARE.values()], ids=[*STORED, *AS_THEY_ARE])
def test_values_are_the_same_bit_for_bit(weights_of):
    step = step_of(weights_of)
    x = np.random.default_rng(1).standard_normal(X.shape, np.float32)
    expected = jax.jit(step)(params(), x)
    assert_close(deepcompile.shard(step, FLAT)(params(), x), expected, 0, "step")


LINKS = {
    "to float32": lambda w, v, axis: w.astype(jnp.float32),
    "to bfloat16": lambda w, v, axis: w.astype(jnp.bfloat16),
    "to float16": lambda w, v, axis: w.astype(jnp.float16),
    "scaled": lambda w, v, axis: w * jnp.expand_dims(v.astype(w.dtype), axis),
    "moved": lambda w, v, axis: w - jnp.expand_dims(v.astype(w.dtype), 1 - axis),
    "divided": lambda w, v, axis: w / w.dtype.type(3),
    "transposed": lambda w, v, axis: w.T,
    "repeated": lambda w, v, axis: w + jnp.broadcast_to(v.astype(w.dtype), w.shape),
}


@pytest.mark.cpu_mesh
@examples(40)
@given(
    st.sampled_from([jnp.int8, F8, jnp.bfloat16, jnp.float32, jnp.bool_]),
    st.lists(st.tuples(st.sampled_from(sorted(LINKS)), st.integers(0, 1)), min_size=1, max_size=5),
    st.sampled_from([8, 12, 16]),
    st.sampled_from(sorted(MESHES)),
)
def test_whatever_they_are_made_by(dtype, links, size, mesh):
    def step(p, x):
        w = p["w"].astype(jnp.float32)
        for name, axis in links:
            w = LINKS[name](w, p["v"], axis)
        return p | {"v": p["v"] * 2}, w, x.astype(w.dtype) @ w

    rng = np.random.default_rng(size)
    p = {"w": jnp.asarray(rng.integers(-2, 3, (size, size)), dtype), "v": rng.integers(1, 3, size).astype(np.float32)}
    x = rng.integers(-1, 2, (16, size)).astype(np.float32)
    expected = jax.jit(step)(p, x)
    found = deepcompile.shard(step, MESHES[mesh])(p, x)
    assert_close(found[1], expected[1], 0, "weights")
    assert_close(found[2], expected[2], 1e-2, "products")
