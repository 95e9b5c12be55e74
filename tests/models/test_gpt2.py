import math
from dataclasses import replace
from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import gpt2
from tests.models.checks import (
    assert_a_gradient_step_lowers,
    assert_causal,
    assert_stacked_layers_compute_the_same,
)

TINY = gpt2.GPT2_TINY
MODEL = gpt2.GPT2(TINY)
TOKENS_BxT = np.random.default_rng(7).integers(TINY.vocab_size, size=(2, 17), dtype=np.int32)


@pytest.fixture(scope="module")
def params():
    return jax.jit(MODEL.init)(jax.random.key(0), TOKENS_BxT)


@pytest.mark.pure
def test_small_has_the_published_number_of_parameters():
    params = jax.eval_shape(gpt2.GPT2(gpt2.GPT2_SMALL).init, jax.random.key(0), TOKENS_BxT)
    assert sum(math.prod(p.shape) for p in jax.tree.leaves(params)) == 124_439_808


@pytest.mark.pure
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_are_float32_whatever_the_compute_dtype(dtype):
    logits, params = jax.eval_shape(
        gpt2.GPT2(replace(TINY, dtype=dtype)).init_with_output, jax.random.key(0), TOKENS_BxT
    )
    assert logits.shape == (2, 17, TINY.vocab_size)
    assert logits.dtype == jnp.float32
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


@pytest.mark.cpu_mesh
def test_a_gradient_step_lowers_the_loss(params):
    def loss(params):
        logits = MODEL.apply(params, TOKENS_BxT[:, :-1], train=True, rngs={"dropout": jax.random.key(1)})
        return gpt2.next_token_loss(logits, TOKENS_BxT[:, 1:])

    before = assert_a_gradient_step_lowers(loss, params)
    assert before == pytest.approx(math.log(TINY.vocab_size), rel=0.05)


@pytest.mark.cpu_mesh
def test_a_token_changes_no_earlier_logits(params):
    assert_causal(partial(jax.jit(MODEL.apply), params), TOKENS_BxT, TINY.vocab_size)


@pytest.mark.cpu_mesh
def test_the_order_of_tokens_matters(params):
    same_BxT = jnp.full((1, 2), 65)
    logits = jax.jit(MODEL.apply)(params, same_BxT)
    assert jnp.abs(logits[:, 0] - logits[:, 1]).max() > 1e-3


@pytest.mark.cpu_mesh
def test_dropout_follows_its_key_in_training_only(params):
    @jax.jit
    def train(seed):
        return MODEL.apply(params, TOKENS_BxT, train=True, rngs={"dropout": jax.random.key(seed)})

    np.testing.assert_array_equal(train(1), train(1))
    assert jnp.abs(train(1) - train(2)).max() > 1e-2
    assert jnp.abs(train(1) - jax.jit(MODEL.apply)(params, TOKENS_BxT)).max() > 1e-2


@pytest.mark.pure
def test_training_without_a_dropout_key_is_refused():
    params = jax.eval_shape(MODEL.init, jax.random.key(0), TOKENS_BxT)
    with pytest.raises(flax.errors.InvalidRngError, match="dropout"):
        jax.eval_shape(lambda params: MODEL.apply(params, TOKENS_BxT, train=True), params)
    without = gpt2.GPT2(replace(TINY, dropout_rate=0.0))
    jax.eval_shape(lambda params: without.apply(params, TOKENS_BxT, train=True), params)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.nothing_saveable])
def test_stacked_layers_compute_the_same(params, policy):
    scanned = gpt2.GPT2(replace(TINY, scan_layers=True, remat_policy=policy, dropout_rate=0.0))
    one_by_one = gpt2.GPT2(replace(TINY, remat_policy=policy, dropout_rate=0.0))
    assert_stacked_layers_compute_the_same(one_by_one, scanned, params, TOKENS_BxT, train=True)


@pytest.mark.pure
@pytest.mark.parametrize(("config", "billions"), [(gpt2.MPT_7B, 6.7), (gpt2.MPT_30B, 30.0)])
def test_mpt_has_its_size(config, billions):
    model = gpt2.GPT2(replace(config, attention="xla"))
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS_BxT)
    assert sum(math.prod(p.shape) for p in jax.tree.leaves(params)) / 1e9 == pytest.approx(billions, abs=0.05)
