"""Model FLOPs of steps whose products can be counted by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import described_gpu
from jax_deepcompile.analysis.work import work_of
from jax_deepcompile.costs.hardware import H100_SXM
from jax_deepcompile.costs.utilisation import Utilisation, model_flops
from jax_deepcompile.ir.traversal import equations
from models import llama

PRODUCT = 2.0 * 8 * 16 * 16


def flops(fun, *shapes) -> float:
    return model_flops(jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)))


def layer(x, w):
    return jnp.tanh(x @ w)


@pytest.mark.pure
@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_a_gradient_is_three_products_whatever_is_computed_again(wrap):
    def loss(x, w):
        return wrap(layer)(x, w).sum()

    assert flops(jax.grad(loss, (0, 1)), (8, 16), (16, 16)) == 3 * PRODUCT


@pytest.mark.pure
def test_loops_count_each_trip_and_branches_the_largest():
    def scanned(x, w):
        return lax.scan(lambda x, _: (jax.checkpoint(layer)(x, w), None), x, length=5)[0].sum()

    assert flops(scanned, (8, 16), (16, 16)) == 5 * PRODUCT
    assert flops(jax.grad(scanned, 1), (8, 16), (16, 16)) == pytest.approx(15 * PRODUCT)
    assert flops(lambda x, w: lax.fori_loop(0, 4, lambda _, x: layer(x, w), x), (8, 16), (16, 16)) == 4 * PRODUCT
    branches = [lambda x, w: x, lambda x, w: layer(layer(x, w), w)]
    assert flops(lambda x, w: lax.cond(x.sum() > 0, *branches, x, w), (8, 16), (16, 16)) == 2 * PRODUCT


@pytest.mark.pure
def test_attention_by_a_kernel_counts_what_its_mask_shows_and_no_scores_twice():
    def loss(x):
        x = x.astype(jnp.bfloat16)
        return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn").astype(jnp.float32).sum()

    with described_gpu(91000, "9.0"):
        found = flops(jax.grad(loss), (2, 128, 4, 64))
    assert found == pytest.approx(6 * (2.0 * 2 * 4 * 128 * 128 * 64) / 2)


@pytest.mark.pure
def test_of_ragged_products_each_row_meets_one_group_whatever_is_contracted():
    def loss(x, w):
        return lax.ragged_dot(x, w, jnp.array([3, 5, 0, 0], jnp.int32)).sum()

    assert flops(loss, (8, 16), (4, 16, 16)) == PRODUCT
    assert flops(jax.grad(loss, (0, 1)), (8, 16), (4, 16, 16)) == 3 * PRODUCT
    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.zeros((8, 16)), jnp.zeros((4, 16, 16)))
    products = [work_of(eqn) for eqn in equations(traced) if eqn.primitive.name == "ragged_dot_general"]
    assert [each.flops for each in products] == 3 * [4 * PRODUCT]  # so few rows are multiplied with all of them


@pytest.mark.pure
def test_many_rows_of_a_ragged_product_are_filled_up_to_tiles():
    shapes = jnp.zeros((16384, 32)), jnp.zeros((8, 32, 16)), jnp.zeros(8, jnp.int32)
    traced = jax.make_jaxpr(jax.grad(lambda x, w, sizes: lax.ragged_dot(x, w, sizes).sum(), (0, 1)))(*shapes)
    products = [work_of(eqn) for eqn in equations(traced) if eqn.primitive.name == "ragged_dot_general"]
    assert [each.written_flops for each in products] == pytest.approx(3 * [2.0 * 16384 * 32 * 16])
    assert all(each.flops < 1.5 * each.written_flops for each in products)


@pytest.mark.pure
def test_a_llama_has_six_flops_for_each_parameter_and_token():
    config = dataclasses.replace(llama.LLAMA3_8B, n_layers=4, vocab_size=16)
    model = llama.Llama(config)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))

    def loss(params, tokens):
        return llama.next_token_loss(model.apply(params, tokens[:, :-1]), tokens[:, 1:])

    tokens = jax.ShapeDtypeStruct((2, 129), jnp.int32)
    found = model_flops(jax.make_jaxpr(jax.grad(loss))(params, tokens))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params["params"]["layers"]))
    assert found == pytest.approx(6 * parameters * 2 * 128, rel=0.02)


@pytest.mark.cpu_mesh
def test_a_traced_step_says_what_a_device_does():
    def step(params, x):
        loss, grads = jax.value_and_grad(lambda w: layer(x, w).sum())(params)
        return params - grads, loss

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (64, 16))]
    found = deepcompile.shard(step, {"fsdp": 8}).trace(*shapes).utilisation
    assert found is not None
    assert (found.model_flops, found.examples) == (2 * PRODUCT, 8.0)
    assert deepcompile.shard(lambda x: x + 1, {"fsdp": 8}).trace(shapes[1]).utilisation is None


@pytest.mark.pure
def test_utilisation_of_a_step_that_takes_no_time():
    half = Utilisation(H100_SXM.matmul_flops_per_s["bf16"], 4.0, H100_SXM.matmul_flops_per_s["bf16"])
    assert half.mfu(2.0) == 0.5
    assert half.mfu(0.0) == 0.0
