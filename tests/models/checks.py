"""What is asked of several models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def assert_a_gradient_step_lowers(loss: Callable, params: Any, rate: float = 0.1) -> float:
    """``loss(params)`` before a step of plain descent, which must be more than after."""
    step = jax.jit(jax.value_and_grad(loss))
    before, grads = step(params)
    after, _ = step(jax.tree.map(lambda p, g: p - rate * g, params, grads))
    assert after < before
    return float(before)


def assert_causal(logits_of: Callable, tokens_BxT: np.ndarray, vocab_size: int, noise: float = 0.0) -> None:
    """Another token at one place changes the logits there and later by more than ``noise``, none before by more."""
    changed = tokens_BxT.copy()
    changed[:, 9] = (changed[:, 9] + 1) % vocab_size
    difference_T = jnp.abs(logits_of(tokens_BxT) - logits_of(changed)).max(axis=(0, 2))
    assert difference_T[:9].max() <= noise
    assert (difference_T[9:] > 10 * noise).all()


def assert_stacked_layers_compute_the_same(
    one_by_one: Any, scanned: Any, params: Any, tokens_BxT: np.ndarray, **given: Any
) -> None:
    """Logits and the gradients of a model in Linen, whose ``layer_<i>`` are stacked to ``layers``."""
    names = [f"layer_{i}" for i in range(one_by_one.config.n_layers)]

    def stacked(tree: Any) -> Any:
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(tree["params"][name] for name in names))
        return {"params": {k: v for k, v in tree["params"].items() if k not in names} | {"layers": layers}}

    def loss(model: Any, params: Any) -> jax.Array:
        return jnp.square(model.apply(params, tokens_BxT, **given)).mean()

    expected, theirs = jax.jit(jax.value_and_grad(lambda params: loss(one_by_one, params)))(params)
    found, mine = jax.jit(jax.value_and_grad(lambda params: loss(scanned, params)))(stacked(params))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), mine, stacked(theirs))
