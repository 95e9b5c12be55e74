"""Pieces of a layer loop's body: which products only a reduction reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.parts import SplitBody, split_body
from tests.transforms.programs import WIDTH, sharded, stack_loss, stack_shapes

pytestmark = pytest.mark.pure


def backward(loss, params) -> SplitBody:
    program, _ = sharded(loss, params)
    *_, last = find_loops(program)
    return split_body(last.eqn)


def names(part) -> list[str]:
    return [eqn.primitive.name for eqn in part.jaxpr.eqns]


def test_weight_gradients_are_apart_and_those_of_biases_are_not():
    split = backward(stack_loss, {"stack": stack_shapes()})
    assert [names(gradient.part).count("dot_general") for gradient in split.gradients] == [1, 1]
    assert len({gradient.outputs for gradient in split.gradients}) == 2
    made = {var for gradient in split.gradients for var in gradient.part.outputs}
    assert made < set(split.pending)
    assert not made & set(split.main.outputs)
    assert set(split.pending) - made <= set(split.main.outputs)


def test_what_a_gradient_reads_is_made_by_the_main_piece():
    split = backward(stack_loss, {"stack": stack_shapes()})
    for gradient in split.gradients:
        assert gradient.operands
        assert set(gradient.operands) <= set(split.main.outputs)
        assert set(gradient.operands) <= set(gradient.part.inputs)


def test_no_work_is_done_twice():
    split = backward(stack_loss, {"stack": stack_shapes()})
    made = [
        var
        for part in (split.main, *(each.part for each in split.gradients))
        for eqn in part.jaxpr.eqns
        for var in eqn.outvars
    ]
    assert len(made) == len(set(made))


def test_a_gradient_that_the_loop_reads_is_not_apart():
    """Clipped layer by layer: its norm decides what the layers below get."""

    @jax.custom_vjp
    def layer(x, w):
        return jnp.tanh(x @ w)

    def forward(x, w):
        return layer(x, w), (x, w)

    def back(saved, y):
        x, w = saved
        gradient = x.T @ (y * (1 - jnp.tanh(x @ w) ** 2))
        return y @ w.T / (1 + jnp.abs(gradient).sum()), gradient

    layer.defvjp(forward, back)

    def loss(params, batch):
        return jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), batch, params["w"])[0] ** 2)

    assert not backward(loss, {"w": (5, WIDTH, WIDTH)}).gradients


def test_what_two_gradients_share_stays_in_the_main_piece():
    @jax.custom_vjp
    def layer(x, a, b):
        return x + jnp.tanh(x @ a) @ b

    def forward(x, a, b):
        return layer(x, a, b), (x, a)

    def passed_straight_through(saved, y):
        x, a = saved
        shared = jnp.tanh(y)
        return y, x.T @ shared, jnp.tanh(x @ a).T @ shared

    layer.defvjp(forward, passed_straight_through)

    def loss(params, batch):
        return jnp.mean(lax.scan(lambda x, p: (layer(x, p["a"], p["b"]), None), batch, params)[0] ** 2)

    split = backward(loss, {"a": (5, WIDTH, WIDTH), "b": (5, WIDTH, WIDTH)})
    assert [names(gradient.part) for gradient in split.gradients] == [["dot_general"], ["dot_general"]]
    (shared,) = set(split.gradients[0].operands) & set(split.gradients[1].operands)
    assert shared in split.main.outputs


def test_a_loop_that_reduces_nothing_has_no_gradients():
    program, _ = sharded(stack_loss, {"stack": stack_shapes()})
    forward, _ = find_loops(program)
    split = split_body(forward.eqn)
    assert not split.gradients
    assert not split.pending
