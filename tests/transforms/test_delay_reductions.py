"""Reductions an iteration later: the same sums, each term reduced beside the next one's forward pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jax_deepcompile._jax_compat import open_jaxpr, scan_counts
from jax_deepcompile.analysis.loops import Loop, find_loops, loops_in
from jax_deepcompile.ir import retrace
from jax_deepcompile.transforms import carry_out
from jax_deepcompile.transforms.delay_reductions import DelayedReductions, delaying, find_terms, sum_names
from jax_deepcompile.transforms.reduce_in_order import reduce_in_order
from tests.cases import examples
from tests.planner.situations import UNROLLED, unrolled_loss
from tests.transforms.programs import assert_same_values, count, outer_loops, stack_loss, stack_shapes
from tests.transforms.test_unshard import accumulating


@pytest.fixture(scope="module")
def unrolled():
    return accumulating(unrolled_loss, UNROLLED)


def only_loop(program):
    (loop,) = find_loops(program)
    return loop


def sums_of(program) -> list[str]:
    """What of its only loop's sums can wait."""
    loop = only_loop(program)
    return list(sum_names(program, loop))


def body_of(loop) -> Any:
    return open_jaxpr(loop.eqn.params["jaxpr"])


@pytest.mark.pure
def test_every_gradient_is_a_term_that_can_wait(unrolled):
    program, _ = unrolled
    loop = only_loop(program)
    terms = find_terms(loop.eqn)
    assert len(terms) == 3 * len(stack_shapes())
    assert sum(len(term.reductions) for term in terms.values()) == sum(
        eqn.primitive.name == "reduce_scatter" for eqn in body_of(loop).eqns
    )


@pytest.mark.cpu_mesh
@examples(6)
@given(data=st.data())
def test_any_of_them_may_wait_to_the_same_bits(unrolled, data):
    program, mesh = unrolled
    sums = tuple(data.draw(st.lists(st.sampled_from(sums_of(program)), min_size=1, unique=True)))
    first_apart = data.draw(st.booleans())
    delayed = carry_out(program, mesh, [DelayedReductions("step", sums, first_apart)])
    assert_same_values(delayed, program, mesh)
    # Those of the last iteration follow the loop.
    more = 0 if first_apart else len(sums)
    assert count(delayed, "reduce_scatter") == count(program, "reduce_scatter") + more


@pytest.mark.pure
def test_the_loop_begins_with_what_the_one_before_left(unrolled):
    program, mesh = unrolled
    loop = only_loop(program)
    after = only_loop(DelayedReductions.apply(program, mesh, [DelayedReductions("step", ("layer2/up",))]))
    names = [eqn.primitive.name for eqn in body_of(after).eqns]
    assert names.index("reduce_scatter") < names.index("dot_general")
    assert scan_counts(after.eqn)[1] == scan_counts(loop.eqn)[1] + 1


@pytest.mark.pure
def test_the_first_iteration_apart_stands_before_the_loop(unrolled):
    program, mesh = unrolled
    loop = only_loop(program)
    after = DelayedReductions.apply(program, mesh, [DelayedReductions("step", (), first_apart=True)])
    names = [eqn.primitive.name for eqn in open_jaxpr(after.jaxpr).eqns]
    products = [eqn.primitive.name for eqn in body_of(loop).eqns].count("dot_general")
    assert names[: names.index("scan")].count("dot_general") == products
    assert only_loop(after).length == loop.length - 1
    assert scan_counts(only_loop(after).eqn)[1] == scan_counts(loop.eqn)[1]


@pytest.mark.cpu_mesh
def test_what_waits_follows_an_order_too(unrolled):
    program, mesh = unrolled
    delayed = DelayedReductions.apply(program, mesh, [DelayedReductions("step", tuple(sums_of(program)[:4]))])
    ordered = reduce_in_order(delayed, 64, in_loops=True)
    assert ordered is not delayed
    assert_same_values(ordered, program, mesh)


@pytest.mark.pure
def test_sums_are_called_as_the_parameters_they_update(unrolled):
    program, _ = unrolled
    assert sorted(sums_of(program)) == sorted(f"{layer}/{name}" for layer, names in UNROLLED.items() for name in names)


RESULTS = ((0, 0, 0, 0), (0, 0, 0, 0))


@pytest.mark.cpu_mesh
@examples(10)
@given(length=st.integers(0, 4), reverse=st.booleans(), sums=st.sets(st.integers(0, 2)), first_apart=st.booleans())
def test_loops_of_any_length_and_direction(length, reverse, sums, first_apart):
    """Three sums, two of which reduce the same value, another carry, a constant, and stacked outputs, some constant."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))

    def local(scale, stacks):
        def body(carry, x):
            a, b, c, last = carry
            y = jnp.sin(x * scale)
            term = lax.psum_scatter(y, "fsdp", tiled=True)
            other = lax.psum_scatter(y, "fsdp", tiled=True) / 4
            return (a + term, other + b, c + lax.psum_scatter(y * last, "fsdp", tiled=True), y.sum()), (
                y[0],
                0.5,
                np.int8(3),
                True,
            )

        shard = jnp.zeros(2)
        return lax.scan(body, (shard, shard, shard + 1, jnp.float32(1)), stacks, reverse=reverse)

    def mapped(function):
        specs = PartitionSpec(), PartitionSpec()
        # What each device holds differs, and is stacked to be compared.
        out = jax.tree.map(lambda _: PartitionSpec("fsdp"), RESULTS)
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))

    def whole(function):
        return lambda *args: jax.tree.map(jnp.atleast_1d, function(*args))

    args = (jnp.float32(0.7), jnp.arange(16.0 * length).reshape(length, 16))

    def delayed(*args):
        closed = jax.make_jaxpr(local)(*args)
        (path, eqn), *_ = loops_in(closed)
        compute = delaying(loop := Loop(path, eqn, "local"), sorted(sums), first_apart)
        known = dict(zip(closed.jaxpr.invars, args, strict=True))
        known |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values = retrace.compute(closed.jaxpr.eqns, known, {id(loop.eqn): compute})
        flat = [retrace.read(atom, values) for atom in closed.jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(RESULTS), flat)

    expected, found = mapped(whole(local))(*args), mapped(whole(delayed))(*args)
    jax.tree.map(np.testing.assert_array_equal, expected, found)


@pytest.mark.pure
def test_stacks_that_inner_loops_fill_are_reduced_there():
    program, _ = accumulating(stack_loss, {"stack": stack_shapes()})
    (around,) = outer_loops(program)
    assert all("scan" not in [eqn.primitive.name for eqn in term.eqns] for term in find_terms(around.eqn).values())


def terms_of(body, dtype: type = np.float32) -> dict:
    """Of ``body`` in a loop of three on one of four devices."""
    x = jnp.ones((3, 4))

    def looped(carry, x):
        return lax.scan(body, carry, x)[0]

    closed = jax.make_jaxpr(looped, axis_env=[("fsdp", 4)])(dtype(0), x)
    (eqn,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan")
    return find_terms(eqn)


def reduced(x):
    return lax.psum_scatter(x, "fsdp", tiled=True).sum()


LEGAL = {
    "a sum": lambda s, x: (s + reduced(x), None),
    "a sum the other way round": lambda s, x: (reduced(x) + s, None),
    "a scaled term": lambda s, x: (s + reduced(x) / 8 * 2, None),
    "a negative one": lambda s, x: (s + -reduced(x), None),
    "of two reductions": lambda s, x: (s + (reduced(x) + reduced(jnp.sin(x))), None),
    "scaled from the left": lambda s, x: (s + 0.5 * reduced(x), None),
    "scaled by a complex number": lambda s, x: (s + reduced(x.astype(jnp.complex64)) / np.complex64(4), None),
    "taken off": lambda s, x: (s - reduced(x), None),
    "with what nothing is reduced of": lambda s, x: (s + (reduced(x) + jnp.sin(x).sum()), None),
    "cast": lambda s, x: (s + reduced(x.astype(jnp.bfloat16)).astype(jnp.float32), None),
}

ILLEGAL = {
    "the sum is read": lambda s, x: (s + reduced(x * s), None),
    "the sum is stacked": lambda s, x: ((t := s + reduced(x)), t),
    "the term is read": lambda s, x: (s + (t := reduced(x)), t),
    "not a sum": lambda s, x: (s * reduced(x), None),
    "taken from": lambda s, x: (reduced(x) - s, None),
    "twice the sum": lambda s, x: (s + s, reduced(x)),
    "a maximum": lambda s, x: (jnp.maximum(s, reduced(x)), None),
    "a constant": lambda s, x: (jnp.float32(1), reduced(x)),
    "replaced": lambda s, x: (reduced(x), None),
    "nothing is reduced": lambda s, x: (s + x.sum(), None),
    "not zero where nothing is reduced yet": lambda s, x: (s + jnp.cos(reduced(x)), None),
    "not zero either": lambda s, x: (s + (reduced(x) + 1), None),
    "scaled by infinity": lambda s, x: (s + reduced(x) * np.float32(np.inf), None),
}


@pytest.mark.pure
@pytest.mark.parametrize("name", LEGAL)
def test_what_is_only_added_can_wait(name):
    dtype = np.complex64 if "complex" in name else np.float32
    assert list(terms_of(LEGAL[name], dtype)) == [0]


@pytest.mark.pure
def test_what_is_not_reduced_waits_as_small_as_it_is():
    term = terms_of(lambda s, x: (s + (reduced(x) + jnp.sin(x).sum()), None))[0]
    assert sorted(var.aval.shape for var in term.pending) == [(), (4,)]


@pytest.mark.pure
@pytest.mark.parametrize("name", ILLEGAL)
def test_what_is_read_or_not_zero_at_first_is_reduced_at_once(name):
    assert terms_of(ILLEGAL[name]) == {}
