"""Whether sizes of groups are how often each key occurs: found out by trying, as there are many ways to write it."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend import core as jex

from jax_deepcompile.ir.known_values import Makers, values_of

_TOO_MANY_BYTES = 1 << 32
"""Of one value, to try it out."""

_MOVES = frozenset({"reshape", "squeeze", "transpose", "convert_element_type", "copy"})


def are_counted(sizes: Any, keys: Any, makers: Makers) -> bool:
    """Whether ``sizes[g]`` is how many of ``keys`` are ``g``, or 0 where they are negative.

    They must be made of nothing but what the keys are made of. Then several keys are tried: each group has some of
    them, none, or all; and keys that are no group, unless they are known to be some.

    Args:
      sizes, keys: variables of one jaxpr, of one dimension each.
      makers: of its variables.
    """
    source = keys
    while source in makers and makers[source].primitive.name in _MOVES and len(makers[source].invars) == 1:
        (source,) = makers[source].invars
    if isinstance(source, jex.Literal):
        return False
    groups = sizes.aval.shape[0]
    low, high = _range(makers.get(source)) or (-2, groups + 2)
    for values in _trials(source.aval, low, high):
        tried = values_of([keys, sizes], makers, _TOO_MANY_BYTES, {source: values})
        if tried is None:
            return False
        made, counted = tried
        if not np.array_equal(np.bincount(np.maximum(made, 0), minlength=groups)[:groups], counted):
            return False
    return True


def _range(maker: Any) -> tuple[int, int] | None:
    """Of whole numbers that are places among others."""
    if maker is None or maker.primitive.name not in ("top_k", "argmax", "argmin"):
        return None
    shape = maker.invars[0].aval.shape
    return 0, shape[-1] if maker.primitive.name == "top_k" else shape[maker.params["axes"][0]]


def _trials(aval: Any, low: int, high: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    skewed = low + np.floor((high - low) * random.random(aval.shape) ** 4)
    each = [np.full(aval.shape, value) for value in (low, (low + high) // 2, high - 1)]
    return [values.astype(aval.dtype) for values in (random.integers(low, high, aval.shape), skewed, *each)]
