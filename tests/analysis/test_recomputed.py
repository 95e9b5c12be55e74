"""Two loops' values are the same exactly where the same work meets the same operands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.equal_work import work_key
from jax_deepcompile.analysis.recomputed import Place

pytestmark = pytest.mark.pure

LAYERS, WIDTH = 4, 8
X, W = jnp.ones((WIDTH, WIDTH)), jnp.ones((LAYERS, WIDTH, WIDTH))


@dataclass(frozen=True)
class BlockSpec:
    """A parameter with a jaxpr that it does not print."""

    index_map: Any

    def __repr__(self):
        return "BlockSpec()"


def product(x, w):
    return jnp.sin(x @ w) @ w


def ahead(x, w):
    """A loop that leaves what every layer starts with."""
    return lax.scan(lambda x, w: (product(x, w), x), x, w)


def names(function: Callable, *operands) -> list[str]:
    """The primitives that make what the second loop in ``function`` computes again."""
    jaxpr = open_jaxpr(jax.make_jaxpr(function)(*operands))
    forward, backward = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    shared = Place(jaxpr).shared(forward, backward)
    found = {var for each in shared.activations for var in each.again}
    return [eqn.primitive.name for eqn in shared.backward.eqns if found & set(eqn.outvars)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("reverse_again", [False, True])
def test_what_is_made_of_the_same_layer_is_the_same(reverse, reverse_again):
    def step(x, w):
        y, starts = lax.scan(lambda x, w: (product(x, w), x), x, w, reverse=reverse)
        stacks = lax.optimization_barrier((starts, w))
        return lax.scan(lambda g, layer: (g * product(*layer), None), y, stacks, reverse=reverse_again)

    assert names(step, X, W) == ["dot_general", "sin", "dot_general"]


def again(layer: Callable) -> Callable:
    """A second loop over what ``layer`` makes of a slice of each of the two stacks."""

    def step(x, w):
        y, starts = ahead(x, w)
        return lax.scan(lambda g, slices: (g * layer(*slices), None), y, (starts, w))

    return step


def test_only_work_that_is_equal_counts():
    assert names(again(lambda x, w: jnp.cos(x @ w) @ w), X, W) == ["dot_general"]


def test_another_literal_is_other_work():
    def step(x, w):
        y, starts = lax.scan(lambda x, w: (2 * x @ w, x), x, w)
        return lax.scan(lambda g, slices: (g * (3 * slices[0] @ slices[1]), None), y, (starts, w))

    assert names(step, X, W) == []


def test_another_parameter_is_other_work():
    def step(x, w):
        y, starts = lax.scan(lambda x, w: (x @ w, x), x, w)
        return lax.scan(lambda g, slices: (g * (slices[0] @ slices[1].T), None), y, (starts, w))

    assert names(step, X, W) == []


def test_the_layer_after_is_another_one():
    def step(x, w):
        y, starts = ahead(x, w)
        return lax.scan(lambda g, slices: (g * product(*slices), None), y, (jnp.roll(starts, 1, 0), w))

    assert names(step, X, W) == []


def test_another_stack_is_another_operand():
    def step(x, w):
        y, starts = ahead(x, w)
        return lax.scan(lambda g, slices: (g * product(*slices), None), y, (starts, w + 1))

    assert names(step, X, W) == []


def test_loops_of_other_lengths_have_no_layer_in_common():
    def step(x, w):
        y, starts = ahead(x, w)
        return lax.scan(lambda g, slices: (g * product(*slices), None), y, (starts[:-1], w[:-1]))

    assert names(step, X, W) == []


def test_what_is_carried_differs_from_layer_to_layer():
    def step(x, w):
        y, _ = ahead(x, w)
        return lax.scan(lambda x, w: (product(x, w), None), y, w)

    assert names(step, X, W) == []


def test_what_is_made_of_parameters_alone_is_no_activation():
    def step(x, w):
        y, _ = lax.scan(lambda x, w: (x @ jnp.sin(w @ w), x), x, w)
        return lax.scan(lambda g, w: (g * jnp.sin(w @ w), None), y, w)

    assert names(step, X, W) == []


def test_chunks_of_activations_are_activations():
    """Where no product reads what is carried; what is made of them by cheap work alone is no more than gathered."""

    def step(x, w):
        total, _ = lax.scan(lambda total, x: (total + jnp.sum(x.T @ w), None), 0.0, x)
        return lax.scan(lambda g, x: (g + (x.T @ w) @ w.T, None), w * total, x)

    assert names(step, W, X) == ["dot_general"]


def test_random_bits_of_one_key_are_the_same_and_those_of_two_are_not():
    def noisy(x, key):
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    def step(x, w, other):
        keys = jax.random.split(jax.random.key(0), LAYERS)
        y, starts = lax.scan(lambda x, layer: (noisy(x @ layer[0], layer[1]) @ layer[0], x), x, (w, keys))

        def body(g, slices):
            x, w, key = slices
            return g * (noisy(x @ w, jax.random.fold_in(key, 1) if other else key) @ w), None

        return lax.scan(body, y, (starts, w, keys))

    assert names(lambda x, w: step(x, w, False), X, W).count("dot_general") == 2
    assert names(lambda x, w: step(x, w, True), X, W).count("dot_general") == 1


@pytest.mark.parametrize("other", [False, True])
def test_constants_inside_of_nested_loops_tell_them_apart(other):
    first, second = np.arange(8.0, dtype=np.float32), np.arange(8.0, dtype=np.float32)[::-1].copy()

    def nested(x, table):
        return lax.scan(lambda c, _: (jnp.sin(c * table) @ x, None), x, length=3)[0]

    def step(x, w):
        y, starts = lax.scan(lambda x, w: (nested(x, first) @ w, x), x, w)
        table = second if other else first
        return lax.scan(lambda g, slices: (g * (nested(slices[0], table) @ slices[1]), None), y, (starts, w))

    assert ("scan" in names(step, X, W)) is not other


def test_what_is_left_undefined_is_never_the_same():
    def layer(x, w):
        return (x @ w) * lax.rng_uniform(0.0, 1.0, x.shape) @ w

    def step(x, w):
        y, starts = lax.scan(lambda x, w: (layer(x, w), x), x, w)
        return lax.scan(lambda g, slices: (g * layer(*slices), None), y, (starts, w))

    assert names(step, X, W) == ["dot_general"]


@pytest.mark.parametrize(("rows", "known"), [(0, ["dot_general", "concatenate", "dot_general"]), (1, ["dot_general"])])
def test_arrays_without_elements_are_equal_wherever_they_are_from(rows, known):
    """Kernels are given them for what they need not have."""

    def layer(x, w, more):
        return lax.concatenate([x @ w, more], 0)[:WIDTH] @ w

    def step(x, w, first, second):
        y, starts = lax.scan(lambda x, w: (layer(x, w, first), x), x, w)
        return lax.scan(lambda g, slices: (g * layer(*slices, second), None), y, (starts, w))

    assert names(step, X, W, jnp.zeros((rows, WIDTH)), jnp.ones((rows, WIDTH))) == known


def repeated(function: Callable, *operands) -> list[str]:
    """The primitives of what ``function`` computes twice."""
    jaxpr = open_jaxpr(jax.make_jaxpr(function)(*operands))
    found = {var for each in Place(jaxpr).repeated() for var in each.again}
    return [eqn.primitive.name for eqn in jaxpr.eqns if found & set(eqn.outvars)]


def twice(first: Callable, second: Callable) -> Callable:
    """One after the other on what a barrier keeps apart."""

    def step(x, w):
        h = x @ w
        return first(h), second(lax.optimization_barrier(h))

    return step


def test_straight_line_code_repeats_what_is_behind_a_barrier():
    def layer(h):
        return jnp.sin(h) @ h

    assert repeated(twice(layer, layer), X, X) == ["sin", "dot_general"]
    assert repeated(twice(layer, lambda h: jnp.cos(h) @ h), X, X) == []
    assert repeated(lambda x, w: (layer(x @ w), layer(x @ w)), X, X) == []


def test_what_is_kept_of_one_input_by_cheap_work_is_none():
    assert repeated(lambda x, w: (x.T @ w, lax.optimization_barrier(x).T), X, X) == []


def drawing(x, use: bool):
    """A branch that draws anew every time."""
    return lax.cond(use, lambda x: x + lax.rng_uniform(0.0, 1.0, x.shape), lambda x: x, x)


def test_nor_is_what_holds_something_undefined():
    used = jnp.bool_(True)
    assert repeated(twice(lambda h: drawing(h, used), lambda h: drawing(h, used)), X, X) == []


class Table:
    """A parameter that prints the same whatever it holds."""

    def __init__(self, values):
        self.values = values

    def __repr__(self):
        return "Table(...)"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (np.arange(5000), np.arange(5000), True),
        (np.arange(5000), np.arange(5000)[::-1].copy(), False),
        ((np.arange(5000),), (np.arange(5000)[::-1].copy(),), False),
        ({"a": 0.1}, {"a": 0.1}, True),
        (0.0, -0.0, False),
        (1, True, False),
        (1, 1.0, False),
        ([1, 2], (1, 2), False),
        (Table(1), Table(2), False),
        (functools.partial(max, 1), functools.partial(max, 1), False),
        (BlockSpec(jax.make_jaxpr(lambda i: i)(0)), BlockSpec(jax.make_jaxpr(lambda i: i)(0)), True),
        (BlockSpec(jax.make_jaxpr(lambda i: i)(0)), BlockSpec(jax.make_jaxpr(lambda i: 3 - i)(0)), False),
        (BlockSpec(jax.make_jaxpr(lambda i: i - 1)(0)), BlockSpec(jax.make_jaxpr(lambda i: 1 - i)(0)), False),
    ],
)
def test_parameters_tell_work_apart_by_what_they_hold(one, other, same):
    (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    first, second = (eqn.replace(params={"parameter": value}) for value in (one, other))
    assert (work_key(first) == work_key(second)) is same


def test_parameters_that_hold_themselves_are_like_no_others():
    spec = BlockSpec(None)
    object.__setattr__(spec, "index_map", spec)
    (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    first, second = (eqn.replace(params={"parameter": spec}) for _ in range(2))
    assert work_key(first) == work_key(first)
    assert work_key(first) != work_key(second)


def test_the_context_tells_work_apart():
    def bits(partitionable: bool):
        with jax.threefry_partitionable(partitionable):
            (eqn,) = jax.make_jaxpr(lambda key: jax.random.bits(key, (8,)))(jax.random.key(0)).eqns
        return work_key(eqn)

    assert bits(True) == bits(True)
    assert bits(True) != bits(False)


def test_what_is_gathered_along_any_dimension_is_the_same_inside_and_outside_of_loops():
    """Of what all layers share, gathered before the first of them, and again in every one."""

    def step(x, w, scale):
        gathered = lax.all_gather(scale, "x", axis=1, tiled=True)
        y, starts = lax.scan(lambda x, w: (product(x * gathered, w), x), x, w)

        def again(g, layer):
            start, w = layer
            return g * product(start * lax.all_gather(scale, "x", axis=1, tiled=True), w), None

        return lax.scan(again, y, (starts, w))[0]

    mesh, spec = jax.sharding.AbstractMesh((2,), ("x",)), jax.sharding.PartitionSpec()
    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    (eqn,) = open_jaxpr(jax.make_jaxpr(mapped)(X, W, X[:, : WIDTH // 2])).eqns
    inner = open_jaxpr(eqn.params["jaxpr"])
    forward, backward = (eqn for eqn in inner.eqns if eqn.primitive.name == "scan")
    made = {var: eqn.primitive.name for eqn in forward.params["jaxpr"].eqns for var in eqn.outvars}
    assert len(made) == len(Place(inner).shared(forward, backward).activations) == 4
