import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_deepcompile.ir.primitives import Scan
from models import llama
from tests.models.checks import (
    assert_a_gradient_step_lowers,
    assert_causal,
    assert_stacked_layers_compute_the_same,
)

TINY = llama.LLAMA_TINY
MODEL = llama.Llama(TINY)
TOKENS_BxT = np.random.default_rng(7).integers(TINY.vocab_size, size=(2, 17), dtype=np.int32)


@pytest.fixture(scope="module")
def params():
    return jax.jit(MODEL.init)(jax.random.key(0), TOKENS_BxT)


def loss_of(params, model=MODEL):
    return llama.next_token_loss(model.apply(params, TOKENS_BxT[:, :-1]), TOKENS_BxT[:, 1:])


@pytest.mark.pure
@pytest.mark.parametrize(
    ("config", "count"), [(llama.LLAMA3_8B, 8_030_261_248), (llama.LLAMA3_70B, 70_553_706_496)], ids=["8B", "70B"]
)
def test_real_configurations_have_the_published_number_of_parameters(config, count):
    params = jax.eval_shape(llama.Llama(config).init, jax.random.key(0), TOKENS_BxT)
    assert sum(math.prod(p.shape) for p in jax.tree.leaves(params)) == count
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


@pytest.mark.pure
def test_layers_are_stacked():
    params = jax.eval_shape(MODEL.init, jax.random.key(0), TOKENS_BxT)["params"]
    assert {p.shape[0] for p in jax.tree.leaves(params["layers"])} == {TINY.n_layers}
    assert params["layers"]["attention"]["key"]["kernel"].shape == (TINY.n_layers, TINY.d_model, TINY.n_kv_heads, 16)


@pytest.mark.pure
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_are_float32_whatever_the_compute_dtype(dtype):
    logits, _ = jax.eval_shape(llama.Llama(replace(TINY, dtype=dtype)).init_with_output, jax.random.key(0), TOKENS_BxT)
    assert logits.shape == (2, 17, TINY.vocab_size)
    assert logits.dtype == jnp.float32


@pytest.mark.pure
def test_matrices_multiply_in_the_compute_dtype():
    model = llama.Llama(replace(TINY, dtype=jnp.bfloat16, remat_policy=None))
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS_BxT)
    jaxpr = jax.make_jaxpr(model.apply)(params, TOKENS_BxT)
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    dots = [eqn for eqn in scan.params["jaxpr"].eqns if eqn.primitive.name == "dot_general"]
    assert len(dots) >= 7  # query, key, value, out, gate, up, down; and attention's own two, unless in a call
    assert {v.aval.dtype for eqn in dots for v in eqn.invars} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.cpu_mesh
def test_a_gradient_step_lowers_the_loss(params):
    before = assert_a_gradient_step_lowers(loss_of, params)
    assert before == pytest.approx(math.log(TINY.vocab_size), rel=0.05)


@pytest.mark.cpu_mesh
def test_a_token_changes_no_earlier_logits(params):
    assert_causal(partial(jax.jit(MODEL.apply), params), TOKENS_BxT, TINY.vocab_size)


@pytest.mark.pure
def test_a_layer_saves_what_its_policy_says():
    def saved(policy):
        model = llama.Llama(replace(TINY, remat_policy=policy))
        params = jax.eval_shape(model.init, jax.random.key(0), TOKENS_BxT)
        jaxpr = jax.make_jaxpr(jax.grad(partial(loss_of, model=model)))(params)
        forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
        return len(forward.outvars)

    policies = jax.checkpoint_policies
    assert saved(policies.nothing_saveable) < saved(policies.dots_saveable) < saved(None)


@pytest.mark.cpu_mesh
def test_rematerialisation_changes_no_gradient(params):
    saves_all = llama.Llama(replace(TINY, remat_policy=None))
    got, expected = (jax.jit(jax.grad(partial(loss_of, model=model)))(params) for model in (MODEL, saves_all))
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, atol=1e-6), got, expected)


@pytest.mark.cpu_mesh
def test_rotated_products_depend_on_distance_alone():
    q_C, k_C = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    rotary = jax.jit(llama.rotary, static_argnums=1)
    q_TxC, k_TxC = (np.squeeze(rotary(np.tile(x_C, (1, 12, 1, 1)), TINY.rope_theta)) for x_C in (q_C, k_C))
    products_TxT = q_TxC @ k_TxC.T
    np.testing.assert_allclose(products_TxT[5:, 5:], products_TxT[:-5, :-5], atol=1e-5)
    np.testing.assert_allclose(products_TxT[3, 3], q_C @ k_C, atol=1e-5)
    assert abs(products_TxT[0, 5] - products_TxT[0, 0]) > 1e-3


@pytest.mark.cpu_mesh
def test_attention_matches_its_definition():
    q_BxTxHxC, k_BxTxKxC, v_BxTxKxC = (
        np.random.default_rng(i).normal(size=(2, 8, heads, 16)).astype(np.float32) for i, heads in enumerate((4, 2, 2))
    )
    k_BxTxHxC, v_BxTxHxC = np.repeat(k_BxTxKxC, 2, axis=2), np.repeat(v_BxTxKxC, 2, axis=2)
    weights_BxHxTxT = np.exp(np.einsum("bthc,bshc->bhts", q_BxTxHxC, k_BxTxHxC) / 4) * np.tri(8)
    weights_BxHxTxT /= weights_BxHxTxT.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(
        jax.jit(llama.causal_attention, static_argnums=3)(q_BxTxHxC, k_BxTxKxC, v_BxTxKxC, "xla"),
        np.einsum("bhts,bshc->bthc", weights_BxHxTxT, v_BxTxHxC),
        atol=1e-5,
    )


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.save_only_these_names("query", "context", "up")])
def test_layers_one_by_one_compute_the_same(policy):
    one_by_one = llama.Llama(replace(TINY, scan_layers=False, remat_policy=policy))
    params = jax.jit(one_by_one.init)(jax.random.key(0), TOKENS_BxT)
    scanned = llama.Llama(replace(TINY, remat_policy=policy))
    assert_stacked_layers_compute_the_same(one_by_one, scanned, params, TOKENS_BxT)


@pytest.mark.pure
def test_a_policy_saves_by_name():
    policy = jax.checkpoint_policies.save_only_these_names(
        "query", "key", "value", "context", "out", "gate", "up", "down"
    )
    model = llama.Llama(replace(TINY, remat_policy=policy))
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS_BxT)
    jaxpr = jax.make_jaxpr(jax.grad(partial(loss_of, model=model)))(params)
    forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    saved = [v.aval.shape[1:] for v in Scan(forward).results.ys]
    heads, width = (2, 16, TINY.n_heads, 16), (2, 16, TINY.d_model)
    pairs = (2, 16, TINY.n_kv_heads, 16)
    assert sorted(saved) == sorted([width, heads, pairs, pairs, heads, width, (2, 16, TINY.d_ff), (2, 16, TINY.d_ff)])


def test_adapters_begin_as_nothing_beside_the_kernels_of_a_llama_without_them(params):
    adapted = llama.Llama(replace(TINY, lora_rank=3))
    base = flatten_dict(params["params"])
    made = flatten_dict(jax.jit(adapted.init)(jax.random.key(0), TOKENS_BxT)["params"])
    adapters = {path: leaf for path, leaf in made.items() if path not in base}
    assert {path[-1] for path in adapters} == {"lora_a", "lora_b"}
    assert len(adapters) == 2 * sum(path[0] == "layers" and path[-1] == "kernel" for path in base)

    def logits(leaves: dict) -> jax.Array:
        return adapted.apply({"params": unflatten_dict({**leaves, **base})}, TOKENS_BxT)

    np.testing.assert_array_equal(logits(adapters), MODEL.apply(params, TOKENS_BxT))
    assert not np.allclose(logits({path: leaf + 0.1 for path, leaf in adapters.items()}), logits(adapters))
