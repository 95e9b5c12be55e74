"""What is traced again is the same, but for what was replaced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jax_deepcompile._jax_compat import bind, name_path, user_source
from jax_deepcompile.ir.retrace import replace_equations
from jax_deepcompile.ir.traversal import equations
from tests.transforms.programs import sharded

pytestmark = pytest.mark.pure


def named_loss(params, batch):
    """Scopes around a loop, in it, and around a layer beside it."""

    @jax.checkpoint
    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w), None

    with jax.named_scope("stack"):
        x, _ = lax.scan(layer, batch, params["stack"])
    with jax.named_scope("head"):
        return jnp.mean((x @ params["head"]) ** 2)


def test_names_and_lines_stay_however_often_a_program_is_traced():
    width = 16
    program, mesh = sharded(named_loss, {"stack": (3, width, width), "head": (width, width)}, batch=(32, width))

    def names(program) -> list[tuple[str, str]]:
        return [(name_path(eqn), user_source(eqn)) for eqn in equations(program.jaxpr)]

    again = program
    for _ in range(3):
        products = {id(eqn): bind for eqn in equations(again.jaxpr) if eqn.primitive.name == "dot_general"}
        again = replace_equations(again, mesh, products)
    assert names(again) == names(program)
    assert any("stack" in name for name, _ in names(again))
    assert any("layer" in name for name, _ in names(again))
    assert all(name.count("head") <= 1 for name, _ in names(again))
