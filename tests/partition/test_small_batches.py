"""Parameters much larger than activations stay where they are; activations come to them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractMesh, AxisType

import jax_deepcompile as deepcompile
from jax_deepcompile.partition.partition import partition_step
from tests.cases import examples
from tests.equality.harness import MESHES, assert_close
from tests.partition.steps import FLAT, HYBRID, SUM, lines, mlp, moves, shapes, squares, trace_training, training_step

W = 256


def batch(examples: int) -> dict[str, tuple[int, int]]:
    return {"x": (examples, W), "y": (examples, W)}


LAYERS = {f"w{index}": (W, W) for index in range(3)}


def whole(found: list[str]) -> list[str]:
    """What is moved of a parameter, or of its gradient, all of it."""
    return [move for move in found if f"[{W},{W}]" in move]


@pytest.mark.pure
class TestWhatMoves:
    def test_one_layer(self):
        """The product of features is added up where the examples are; the gradient of the shard is computed whole."""
        found = trace_training(lambda p, each: squares(each["x"] @ p["w0"], each), {"w0": (W, W)}, batch(16))
        assert moves(found) == [
            "all_to_all fsdp: f32[2,256] -> f32[16,32]",
            "reduce_scatter fsdp: f32[16,256] -> f32[2,256]",
            SUM,
            "all_gather fsdp: f32[2,256] -> f32[16,256]",
        ]

    def test_no_layer_of_several_is_gathered(self):
        found = moves(trace_training(mlp, LAYERS, batch(16)))
        assert [move for move in whole(found) if not move.startswith("all_to_all")] == []

    def test_no_product_is_computed_by_every_device(self):
        products = lines(trace_training(mlp, LAYERS, batch(16)).sharded, ("dot_general",))
        assert len(products) == 3 + 3 + 2
        assert f"dot_general f32[16,{W}] f32[{W},{W}] -> f32[16,{W}]" not in products
        assert not any(product.endswith(f"-> f32[{W},{W}]") for product in products)

    @pytest.mark.parametrize("examples", [512, 1024])
    def test_parameters_come_to_larger_batches(self, examples: int):
        found = moves(trace_training(mlp, LAYERS, batch(examples)))
        assert sum(move.startswith("reduce_scatter") for move in whole(found)) == len(LAYERS)
        assert not any(f"[{examples}," in move for move in found)

    def test_microbatches_gather_parameters(self):
        step, params = training_step(mlp, optax.sgd(0.1)), shapes(LAYERS)
        state = {"params": params, "opt_state": jax.eval_shape(optax.sgd(0.1).init, params)}
        found = moves(deepcompile.shard(step, FLAT, microbatches=2).trace(state, shapes(batch(16))))
        assert any(move.strip() == f"all_gather fsdp: f32[32,{W}] -> f32[{W},{W}]" for move in found)

    def test_on_two_axes_parameters_are_gathered(self):
        """Off one of several axes that split a dimension, activations could not move without those behind it."""
        found = moves(trace_training(mlp, LAYERS, batch(16), mesh=HYBRID))
        assert any(move == f"all_gather fsdp: f32[64,{W}] -> f32[{W},{W}]" for move in found)
        assert not any("all_to_all" in move for move in found)

    def test_what_a_loop_reads_again_and_again_is_gathered_before_it(self):
        def recurrent(p, each):
            def cell(h, x):
                h = jnp.tanh(x @ p["w0"] + h @ p["w1"])
                return h, h

            return squares(lax.scan(cell, jnp.zeros_like(each["x"][0]), each["x"])[1].sum(0), {"y": each["y"][0]})

        shape = {"x": (16, 8, W), "y": (16, 8, W)}

        def loss(p, each):
            return recurrent(p, jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), each))

        found = moves(trace_training(loss, dict.fromkeys(("w0", "w1"), (W, W)), shape))
        gathers = [move for move in found if move == f"all_gather fsdp: f32[32,{W}] -> f32[{W},{W}]"]
        assert 2 <= len(gathers) <= 4
        assert len(found) == len(gathers) + 2 + 1

    def test_features_summed_in_part_are_activations_still(self):
        """Of layers that cannot be divided the last dimension of activations is; nobody computes all examples."""
        odd = {"w0": (W, 250), **{f"w{index}": (250, 250) for index in range(1, 4)}, "w4": (250, W)}
        traced = trace_training(mlp, odd, batch(16))
        products = lines(traced.sharded, ("dot_general",))
        assert not any(product.startswith("dot_general f32[16,250] f32[250,250]") for product in products)
        assert traced.partitioned.layout.moves_activations

    @pytest.mark.parametrize(("latency_bytes", "moves_activations"), [(0.0, True), (4.0 * W * W, False)])
    def test_latency_counts_for_what_compute_waits_for(self, latency_bytes: float, moves_activations: bool):
        program, axes = trace_training(mlp, LAYERS, batch(16)).program, ("fsdp",)
        mesh = AbstractMesh((8,), axes, axis_types=(AxisType.Auto,))
        partitioned = partition_step(program, mesh, axes, axes, latency_bytes=latency_bytes)
        assert partitioned.layout.moves_activations is moves_activations


@pytest.mark.h100_aot
def test_where_collectives_take_long_to_begin_parameters_are_gathered():
    """A layer of 256 KB is nothing beside what a link could send in the time that two collectives take to begin."""
    mesh = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))
    found = moves(trace_training(mlp, LAYERS, batch(16), mesh=mesh))
    assert whole(found)
    assert not any("all_to_all" in move for move in found)


class Small(nn.Module):
    """Convolutions of small images, normalised over the batch, and dense layers."""

    channels: int
    width: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(self.channels, (3, 3), strides=2)(x))
        x = x + nn.relu(nn.LayerNorm()(nn.Conv(self.channels, (3, 3), use_bias=False)(x)))
        x = nn.gelu(nn.Dense(self.width)(x.mean((1, 2))))
        return nn.Dense(x.shape[-1])(x) + x


@pytest.mark.cpu_mesh
@examples(8)
@given(
    examples=st.sampled_from([8, 16, 24]),
    width=st.sampled_from([96, 128, 130]),
    layers=st.integers(1, 3),
    scanned=st.booleans(),
    mesh=st.sampled_from(["8", *sorted(MESHES)]),
    seed=st.integers(0, 9),
)
def test_training_dense_layers(examples: int, width: int, layers: int, scanned: bool, mesh: str, seed: int):
    def layer(x, p):
        return jnp.tanh(x @ p["w"] + p["b"]), None

    def loss(params, batch):
        if scanned:
            return squares(lax.scan(jax.checkpoint(layer), batch["x"], params)[0], batch)
        x = batch["x"]
        for index in range(layers):
            x, _ = layer(x, jax.tree.map(lambda stack, index=index: stack[index], params))
        return squares(x, batch)

    random = np.random.default_rng(seed)
    params = {"w": random.normal(size=(layers, width, width)) / width**0.5, "b": random.normal(size=(layers, width))}
    batch = {name: random.normal(size=(examples, width)).astype(np.float32) for name in ("x", "y")}
    check(loss, jax.tree.map(np.float32, params), batch, mesh)


@pytest.mark.cpu_mesh
@examples(4)
@given(
    pixels=st.sampled_from([4, 5]),
    channels=st.sampled_from([64, 72]),
    width=st.sampled_from([60, 256]),
    mesh=st.sampled_from(["8", *sorted(MESHES)]),
)
def test_training_convolutions_of_small_images(pixels: int, channels: int, width: int, mesh: str):
    model = Small(channels, width)
    random = np.random.default_rng(0)
    batch = {"x": random.normal(size=(8, pixels, pixels, 16)), "y": random.normal(size=(8, width))}
    batch = jax.tree.map(np.float32, batch)
    params = model.init(jax.random.key(0), batch["x"])
    check(lambda params, batch: squares(model.apply(params, batch["x"]), batch), params, batch, mesh)


def check(loss, params, batch, mesh: str) -> None:
    """One step on a mesh against the plain one on one device."""
    step = training_step(loss, optax.sgd(0.1, momentum=0.9))
    state = {"params": params, "opt_state": optax.sgd(0.1, momentum=0.9).init(params)}
    expected = jax.jit(step)(state, batch)
    found = deepcompile.shard(step, MESHES[mesh], donate=False)(state, batch)
    assert_close(found, expected, 1e-5, mesh)
