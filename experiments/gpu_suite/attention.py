"""Seconds of ``jax.nn.dot_product_attention``, causal, in bfloat16, of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from experiments.gpu_suite.cases import Row
from experiments.gpu_suite.sizes import Sizes
from experiments.gpu_suite.timing import seconds_an_operation

Implementation = Literal["xla", "cudnn"]

IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "cudnn")

_PRODUCTS = {"forward": 2, "forward and backward": 7}
"""Matrix products of tokens by tokens by channels; the backward pass has five, for it computes the scores again."""


def cases(sizes: Sizes) -> list[Row]:
    """``model heads kv_heads channels tokens implementation passes`` of each."""
    return [
        {
            "model": model,
            "heads": heads,
            "kv_heads": kv_heads,
            "channels": channels,
            "tokens": tokens,
            "implementation": implementation,
            "passes": passes,
        }
        for tokens in sizes.attention.sequences
        for model, (heads, kv_heads, channels) in sizes.attention.heads
        for implementation in IMPLEMENTATIONS
        for passes in _PRODUCTS
    ]


def rows(case: Row, sizes: Sizes, seconds: float) -> Iterator[Row]:
    """The case with ``seconds`` and ``flops_per_s``."""
    tokens, channels = case["tokens"], case["channels"]
    keys = jax.random.split(jax.random.key(0), 4)
    q_1xTxHxC, k_1xTxKxC, v_1xTxKxC, cotangent_1xTxHxC = (
        jax.random.normal(key, (1, tokens, heads, channels), jnp.bfloat16)
        for key, heads in zip(keys, (case["heads"], case["kv_heads"], case["kv_heads"], case["heads"]), strict=True)
    )
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation=case["implementation"])
    function, args = attend, (q_1xTxHxC, k_1xTxKxC, v_1xTxKxC)
    if case["passes"] != "forward":
        function, args = _both_passes(attend), (*args, cotangent_1xTxHxC)
    # The mask leaves half of the scores.
    flops = _PRODUCTS[case["passes"]] * 2 * case["heads"] * tokens * tokens * channels / 2
    took_s = seconds_an_operation(function, args, flops / sizes.attention.expected_flops_per_s, sizes.effort)
    yield case | {"seconds": took_s, "flops_per_s": flops / took_s}


def _both_passes(attend: Callable) -> Callable:
    def run(q, k, v, cotangent):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(cotangent)

    return run
