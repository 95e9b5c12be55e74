"""Small collectives joined: the same bits by fewer of them, whatever is small enough."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.traversal import reached_from
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.transforms import carry_out
from jax_deepcompile.transforms.join_collectives import JoinedCollectives
from tests.cases import examples
from tests.partition.steps import lines
from tests.transforms.programs import WIDTH, assert_same_values, count, sharded

VECTOR, MATRIX = 2 * 4 * WIDTH, 2 * 4 * WIDTH * WIDTH
"""Bytes: of all biases, and of all kernels."""

LAYERS = 3
PARAMS = {name: (WIDTH, WIDTH) if name[0] == "w" else (WIDTH,) for i in range(LAYERS) for name in (f"w{i}", f"b{i}")}


def loss(params, x):
    for index in range(LAYERS):
        x = jnp.tanh(x @ params[f"w{index}"] + params[f"b{index}"])
    return jnp.mean(x**2)


def chained_loss(params, x):
    """The mean over the batch of every layer is subtracted: reductions that need one another."""
    for index in range(LAYERS):
        x = jnp.tanh(x @ params[f"w{index}"] + params[f"b{index}"])
        x = x - x.mean(0)
    return jnp.mean(x**2)


def recomputed_loss(params, x):
    for index in range(LAYERS):
        layer = jax.checkpoint(lambda x, w, b: jnp.tanh(x @ w * b))
        x = layer(x, params[f"w{index}"], params[f"b{index}"])
    return jnp.mean(x**2)


STACK = {"w": (4, WIDTH, WIDTH), "b": (4, WIDTH), "s": (4, WIDTH)}


def stack_loss(params, x):
    def layer(x, layer):
        return jnp.tanh(x @ layer["w"] + layer["b"]) * layer["s"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


PROGRAMS = {
    "biases": (loss, PARAMS, {"fsdp": 8}),
    "chained": (chained_loss, PARAMS, {"fsdp": 8}),
    "two axes": (loss, PARAMS, {"data": 2, "fsdp": 4}),
    "a stack": (stack_loss, STACK, {"fsdp": 8}),
    "gathered again": (recomputed_loss, PARAMS, {"fsdp": 8}),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def made(request):
    function, params, mesh = PROGRAMS[request.param]
    return sharded(function, params, mesh=mesh)


def joined(program, mesh, gather_bytes: int = VECTOR, reduce_bytes: int = VECTOR):
    return carry_out(program, mesh, [JoinedCollectives(gather_bytes, reduce_bytes)])


def collectives(program) -> list[str]:
    return lines(program, ("all_gather", "reduce_scatter"))


@pytest.mark.pure
def test_before_and_after():
    program, mesh = sharded(loss, PARAMS)
    before, after = collectives(program), collectives(joined(program, mesh))
    assert sum("16,16" not in line for line in before) == 2 * LAYERS
    assert sorted(line for line in after if "16,16" in line) == sorted(line for line in before if "16,16" in line)
    assert [line for line in after if "16,16" not in line] == [
        f"all_gather fsdp: f32[{2 * LAYERS}] -> f32[8,{2 * LAYERS}]",
        f"reduce_scatter fsdp: f32[8,{2 * LAYERS}] -> f32[{2 * LAYERS}]",
    ]


@pytest.mark.pure
def test_what_is_saved_is_what_is_fewer(made):
    program, mesh = made
    for size in (VECTOR, MATRIX):
        decision = JoinedCollectives(size, size)
        kinds = ("all_gather", "reduce_scatter", "psum")
        fewer = [
            sum(count(each, kind, False) for kind in kinds) for each in (program, joined(program, mesh, size, size))
        ]
        assert fewer[0] - fewer[1] >= decision.saved(program) > 0


@pytest.mark.pure
@pytest.mark.parametrize("sizes", [(0, 0), (4 * WIDTH - 1, 3)])
def test_what_is_larger_stays(sizes):
    program, mesh = sharded(loss, PARAMS)
    assert joined(program, mesh, *sizes) is program


@pytest.mark.pure
def test_one_of_a_kind_stays():
    program, mesh = sharded(lambda params, x: jnp.mean((x @ params["w"]) ** 2), {"w": (WIDTH, WIDTH)})
    assert joined(program, mesh, MATRIX, MATRIX) is program


@pytest.mark.pure
def test_other_types_stay_apart():
    def cast(params, x):
        y = x.astype(jnp.bfloat16) @ params["a"].astype(jnp.bfloat16)
        return jnp.mean((y.astype(jnp.float32) @ params["b"]) ** 2)

    program, mesh = sharded(cast, {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH)})
    after = joined(program, mesh, MATRIX, 0)
    assert count(after, "all_gather") == count(program, "all_gather") == 2


@pytest.mark.pure
def test_what_needs_another_stays_behind_it():
    """No more than those of one layer go together: the next ones are of what these make."""
    program, _ = sharded(chained_loss, PARAMS)
    eqns = open_jaxpr(program.jaxpr).eqns
    groups = JoinedCollectives(VECTOR, VECTOR).groups(program.jaxpr)
    assert len(groups) > 1
    for group in groups:
        behind = reached_from(eqns, [var for place in group for var in eqns[place].outvars])
        assert behind.isdisjoint(eqns[place].invars[0] for place in group)


@pytest.mark.pure
@pytest.mark.parametrize("sizes", [(-1, 0), (0, -5)])
def test_sizes_below_nothing_are_an_error(sizes):
    program, mesh = sharded(loss, PARAMS)
    with pytest.raises(errors.PlanError, match=r"it joins gathers of -?\d and reductions of -?\d bytes"):
        joined(program, mesh, *sizes)


@pytest.mark.pure
@given(st.integers(0, 2 * MATRIX), st.integers(0, 2 * MATRIX))
@examples(10)
def test_any_sizes_make_a_program(gather_bytes, reduce_bytes):
    program, mesh = sharded(loss, PARAMS)
    verify(joined(program, mesh, gather_bytes, reduce_bytes))


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("size", [VECTOR, 4 * MATRIX], ids=["vectors", "all"])
def test_values_stay_the_same(made, size):
    program, mesh = made
    planned = joined(program, mesh, size, size)
    assert planned is not program
    assert_same_values(planned, program, mesh)


@pytest.mark.cpu_mesh
def test_dimensions_other_than_the_first():
    params = {"a": (3, 5, WIDTH), "b": (WIDTH, 3), "c": (3,)}

    def odd(params, x):
        y = jnp.einsum("bw,acw->bac", x, params["a"])
        return jnp.mean(y**2) + jnp.mean((x @ params["b"] + params["c"]) ** 2)

    program, mesh = sharded(odd, params)
    planned = joined(program, mesh, 4096, 4096)
    assert count(planned, "all_gather") == 1
    assert_same_values(planned, program, mesh)


@pytest.mark.cpu_mesh
def test_statistics_that_are_whole_numbers():
    def counting(params, x):
        large = jnp.sum(x > 0, dtype=jnp.int32)
        small = jnp.sum(x < 0, dtype=jnp.int32)
        return jnp.mean((x @ params["w"]) ** 2) * jax.lax.stop_gradient(large - small).astype(jnp.float32)

    program, mesh = sharded(counting, {"w": (WIDTH, WIDTH)})
    assert_same_values(joined(program, mesh, MATRIX, MATRIX), program, mesh)
