import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import mixtral
from tests.models.checks import assert_a_gradient_step_lowers, assert_causal

TINY = mixtral.MIXTRAL_TINY
TOKENS_BxT = np.random.default_rng(7).integers(TINY.vocab_size, size=(2, 17), dtype=np.int32)
X_BxTxD = np.random.default_rng(8).normal(size=(3, 12, TINY.d_model)).astype(np.float32)


def loss_of(model, tokens_BxT):
    logits_BxTxV, balance = model(tokens_BxT[:, :-1])
    return mixtral.next_token_loss(logits_BxTxV, tokens_BxT[:, 1:]) + TINY.balance_weight * balance


def dense_experts(moe, x_BxTxD):
    """Every token through every expert, weighted by zero for those it did not choose."""
    logits_BxTxE = moe.router(x_BxTxD)
    lowest_chosen_BxTx1 = jnp.sort(logits_BxTxE, axis=-1)[..., -TINY.n_active_experts, None]
    share_BxTxE = jax.nn.softmax(jnp.where(logits_BxTxE >= lowest_chosen_BxTx1, logits_BxTxE, -jnp.inf), axis=-1)
    gate_BxTxExF = jnp.einsum("btd,edf->btef", x_BxTxD, moe.gate_ExDxF[...])
    up_BxTxExF = jnp.einsum("btd,edf->btef", x_BxTxD, moe.up_ExDxF[...])
    return jnp.einsum("btef,efd,bte->btd", jax.nn.silu(gate_BxTxExF) * up_BxTxExF, moe.down_ExFxD[...], share_BxTxE)


@pytest.fixture(scope="module")
def model():
    return nnx.jit(lambda: mixtral.Mixtral(TINY, rngs=nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def moe():
    """Weights larger than the model's, so that errors show."""
    return nnx.jit(lambda: mixtral.MixtureOfExperts(replace(TINY, init_std=0.3), rngs=nnx.Rngs(0)))()


@pytest.mark.pure
def test_8x7b_has_the_published_number_of_parameters():
    model = nnx.eval_shape(lambda: mixtral.Mixtral(mixtral.MIXTRAL_8X7B, rngs=nnx.Rngs(0)))
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(math.prod(p.shape) for p in params) == 46_702_792_704
    assert {p.dtype for p in params} == {jnp.dtype(jnp.float32)}


@pytest.mark.pure
def test_layers_are_stacked_and_parameters_are_the_whole_state():
    model = nnx.eval_shape(lambda: mixtral.Mixtral(TINY, rngs=nnx.Rngs(0)))
    assert {p.shape[0] for p in jax.tree.leaves(nnx.state(model.layers))} == {TINY.n_layers}
    assert len(jax.tree.leaves(nnx.state(model))) == len(jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.pure
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_and_balance_are_float32_whatever_the_compute_dtype(dtype):
    logits, balance = nnx.eval_shape(lambda: mixtral.Mixtral(replace(TINY, dtype=dtype), rngs=nnx.Rngs(0))(TOKENS_BxT))
    assert (logits.shape, balance.shape) == ((2, 17, TINY.vocab_size), ())
    assert (logits.dtype, balance.dtype) == (jnp.float32, jnp.float32)


@pytest.mark.slow
@pytest.mark.cpu_mesh
def test_a_gradient_step_lowers_the_loss(model):
    graphdef, params = nnx.split(model)
    before = assert_a_gradient_step_lowers(lambda params: loss_of(nnx.merge(graphdef, params), TOKENS_BxT), params)
    assert before == pytest.approx(math.log(TINY.vocab_size), rel=0.05)


@pytest.mark.cpu_mesh
def test_a_token_changes_no_earlier_logits(model):
    logits_of = partial(nnx.jit(lambda model, tokens_BxT: model(tokens_BxT)[0]), model)
    # Sorting may give a row another place in a matrix product, and with it another order of sums.
    assert_causal(logits_of, TOKENS_BxT, TINY.vocab_size, noise=1e-6)


@pytest.mark.cpu_mesh
def test_experts_equal_the_dense_computation(moe):
    y_BxTxD, _ = nnx.jit(lambda moe, x: moe(x))(moe, X_BxTxD)
    expected = nnx.jit(dense_experts)(moe, X_BxTxD)
    assert jnp.abs(expected).max() > 1
    np.testing.assert_allclose(y_BxTxD, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.cpu_mesh
def test_no_token_is_dropped_when_all_choose_the_same_experts(moe):
    same_BxTxD = np.broadcast_to(X_BxTxD[:, :1, :], X_BxTxD.shape)
    y_BxTxD, balance = nnx.jit(lambda moe, x: moe(x))(moe, same_BxTxD)
    np.testing.assert_allclose(y_BxTxD, nnx.jit(dense_experts)(moe, same_BxTxD), rtol=1e-4, atol=1e-4)
    assert balance > 1.2


def capped(moe, factor):
    """The same weights with room for ``factor`` times the even share of slots."""
    graphdef, _ = nnx.split(mixtral.MixtureOfExperts(replace(moe.config, capacity_factor=factor), rngs=nnx.Rngs(0)))
    return nnx.merge(graphdef, nnx.state(moe))


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("factor", [None, TINY.n_experts / TINY.n_active_experts], ids=["exact", "room for all"])
def test_gradients_of_experts_equal_the_dense_computation(moe, factor):
    graphdef, state = nnx.split(capped(moe, factor))

    def values_and_gradients(experts):
        loss = lambda state, x_BxTxD: jnp.sin(experts(nnx.merge(graphdef, state), x_BxTxD)).mean()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(state, X_BxTxD)

    got, expected = values_and_gradients(lambda moe, x: moe(x)[0]), values_and_gradients(dense_experts)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-3, atol=1e-5), got, expected)


@pytest.mark.cpu_mesh
def test_slots_beyond_the_room_are_dropped_later_tokens_first(moe):
    same_BxTxD = np.broadcast_to(X_BxTxD[:, :1, :], X_BxTxD.shape)
    whole_BxTxD = nnx.jit(dense_experts)(moe, same_BxTxD)
    y_BxTxD, _ = nnx.jit(lambda moe, x: moe(x))(capped(moe, 1.0), same_BxTxD)
    room = X_BxTxD.shape[1] * TINY.n_active_experts // TINY.n_experts
    np.testing.assert_allclose(y_BxTxD[:, :room], whole_BxTxD[:, :room], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(y_BxTxD[:, room:], 0)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("factor", [None, 1.25])
def test_a_sequence_is_computed_without_the_others(moe, factor):
    moe = capped(moe, factor)
    experts = nnx.jit(lambda moe, x: moe(x)[0])
    np.testing.assert_array_equal(
        experts(moe, X_BxTxD)[1], experts(moe, X_BxTxD * np.array([0, 1, -3], np.float32)[:, None, None])[1]
    )


@pytest.mark.cpu_mesh
def test_balance_loss_is_one_for_even_routing_and_n_experts_over_n_active_for_the_least_even():
    even_BxTxE = jnp.zeros((1, 4, 4))
    chosen_BxTxA = jnp.array([[[0, 1], [2, 3], [1, 2], [3, 0]]])
    assert mixtral.balance_loss(even_BxTxE, chosen_BxTxA) == pytest.approx(1.0)

    uneven_BxTxE = jnp.zeros((1, 4, 4)).at[..., :2].set(100.0)
    chosen_BxTxA = jnp.broadcast_to(jnp.array([0, 1]), (1, 4, 2))
    assert mixtral.balance_loss(uneven_BxTxE, chosen_BxTxA) == pytest.approx(2.0)
