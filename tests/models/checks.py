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
