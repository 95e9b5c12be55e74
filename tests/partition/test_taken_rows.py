"""Of activations that few rows are taken of, to look at, each device gives what it has; none gathers them all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import jax_deepcompile as deepcompile
from tests.cases import examples
from tests.equality.harness import MESHES, assert_close
from tests.partition.steps import BATCH, MLP, D, descend, moves, shapes, squares

B = BATCH["x"][0]
KEY = jax.random.key(7)

FEW = {
    "first": lambda h: h[0],
    "first ones": lambda h: h[:4],
    "last": lambda h: h[-1],
    "every sixteenth": lambda h: h[3::16],
    "at an index": lambda h: lax.dynamic_slice_in_dim(h, jax.random.randint(KEY, (), 0, B), 3),
    "best": lambda h: jnp.argmax(h[2:5], -1),
    "some": lambda h: h[jnp.array([5, 31, -1])],
    "drawn": lambda h: h[jax.random.randint(KEY, (2,), 0, B)],
    "one number": lambda h: h[9, 3],
    "counted": lambda h: (h[:2] * 100).astype(jnp.int32),
}


def step_of(take):
    def step(p, batch):
        def loss(p):
            h = jnp.tanh(batch["x"] @ p["w0"])
            return squares(jnp.tanh(h @ p["w1"]) @ p["w2"], batch), take(h)

        (value, taken), gradients = jax.value_and_grad(loss, has_aux=True)(p)
        return descend(p, gradients), value, taken

    return step


def found(take, **options) -> list[str]:
    return moves(deepcompile.shard(step_of(take), MESHES["8"], **options).trace(shapes(MLP), shapes(BATCH)))


@pytest.mark.pure
class TestWhatMoves:
    def test_golden(self):
        """Two rows, wherever they are."""
        without = found(lambda h: 0.0)
        assert [move for move in found(lambda h: h[:2]) if move not in without] == ["psum fsdp: f32[2,16] -> f32[2,16]"]

    @pytest.mark.parametrize("take", FEW.values(), ids=FEW)
    @pytest.mark.parametrize("microbatches", [1, 2])
    def test_no_device_has_all_examples(self, take, microbatches):
        made = found(take, microbatches=microbatches)
        assert not [move for move in made if f"[{B},{D}]" in move or "all_to_all" in move]

    @pytest.mark.parametrize("take", [lambda h: h[: B // 2], lambda h: h[1:]])
    def test_most_rows_are_not_added_up(self, take):
        assert not [move for move in found(take) if move.startswith(("psum", "reduce_scatter")) and f",{D}]" in move][
            6:
        ]

    @pytest.mark.parametrize(
        "take",
        [
            lambda h: jnp.cumsum(h.sum(1))[-1],
            lambda h: jnp.sort(h.sum(1))[:3],
            lambda h: h[h.sum(1).argmax()],
        ],
        ids=["running", "sorted", "of the largest"],
    )
    def test_a_number_for_each_example_is_known_after_all_microbatches(self, take):
        assert [move for move in found(take, microbatches=2) if move.startswith("all_gather") and f"f32[{B}" in move]

    def test_what_cannot_be_added_up_is_brought_together(self):
        assert [move for move in found(lambda h: (h > 0)[:2]) if "bool" in move]

    def test_minibatches_in_a_loop_stay_divided(self):
        def step(p, batch):
            def one(p, start):
                x, y = (lax.dynamic_slice_in_dim(batch[name], start, 8) for name in ("x", "y"))
                return descend(p, jax.grad(lambda p: jnp.mean((x @ p["w0"] - y) ** 2))(p)), None

            return lax.scan(one, p, jnp.arange(0, B, 8))[0]

        made = moves(deepcompile.shard(step, MESHES["8"]).trace(shapes(MLP), shapes(BATCH)))
        assert "  psum fsdp: f32[8,16] -> f32[8,16]" not in made


@pytest.mark.cpu_mesh
@examples(12)
@given(st.sampled_from(sorted(FEW)), st.sampled_from(sorted(MESHES)), st.sampled_from([1, 2]))
def test_values_are_those_of_one_device(name, mesh, microbatches):
    rng = np.random.default_rng(B)
    p = {name: rng.standard_normal(shape, np.float32) / 4 for name, shape in MLP.items()}
    batch = {name: rng.standard_normal(shape, np.float32) for name, shape in BATCH.items()}
    step = step_of(FEW[name])
    expected = jax.jit(step)(p, batch)
    assert_close(deepcompile.shard(step, MESHES[mesh], microbatches=microbatches)(p, batch), expected, 1e-5, "step")
