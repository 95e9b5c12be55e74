"""Where inputs are first computed with: inside loops and branches, not where they are only passed on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile.analysis.first_use import lines_of_first_use
from tests.transforms.programs import h100s


def looped(w, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None  # used

    return jax.lax.scan(layer, x, w.astype(jnp.bfloat16).transpose(0, 2, 1).astype(jnp.float32))[0]


def chosen(w, x):
    return jax.lax.cond(
        x.sum() > 0,
        lambda x, w: x,
        lambda x, w: x * w[0, 0],  # used
        x,
        jax.lax.optimization_barrier(w),
    )


def repeated(w, x):
    return jax.lax.while_loop(
        lambda x: x.sum() < w.sum(),  # used
        lambda x: x + w[0],
        x,
    )


@pytest.mark.pure
@pytest.mark.parametrize("function", [looped, chosen, repeated])
def test_it_is_where_an_input_is_computed_with(function: Callable):
    assert _lines(function)["w"] == _marked(function)


@pytest.mark.pure
def test_what_nobody_computes_with_has_no_line():
    assert "w" not in _lines(lambda w, x: (w.T, x * 2))


def _lines(function: Callable) -> dict[str, str]:
    given = {"w": jax.ShapeDtypeStruct((8, 8, 8), jnp.float32), "x": jax.ShapeDtypeStruct((8, 8), jnp.float32)}

    def step(state: Any) -> Any:
        made = function(state["w"], state["x"])
        return state | {"x": made[1] if isinstance(made, tuple) else made}

    traced = deepcompile.shard(step, h100s(), state_argnums=0).trace(given)
    return {path.split("'")[1]: line for path, line in lines_of_first_use(traced.program).items()}


def _marked(function: Callable) -> str:
    lines, first = inspect.getsourcelines(function)
    (number,) = (first + place for place, line in enumerate(lines) if line.rstrip().endswith("# used"))
    return f"{__file__}:{number}"
