"""A walk changes what it is told to, in regions too; what stays as it is stays the same object."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, eval_local, new_barrier, open_jaxpr
from jax_deepcompile.ir.rewrite import Walk, renamed, with_regions, with_renamed_operands
from jax_deepcompile.ir.traversal import equations
from tests.ir.test_traversal import golden, text

pytestmark = pytest.mark.pure

X = jax.ShapeDtypeStruct((3,), jnp.float32)
TABLE = np.arange(3, dtype=np.float32)


def is_zero(atom) -> bool:
    return isinstance(atom, jex.Literal) and not np.any(atom.val)


def without_zeros(given):
    """As in the docstring of ``Walk``."""
    walk = Walk(given, without_zeros)
    for eqn in walk:
        if eqn.primitive.name == "add" and is_zero(eqn.invars[1]):
            walk.names[eqn.outvars[0]] = eqn.invars[0]
        else:
            walk.eqns.append(eqn)
    return walk.result()


def plain(given):
    walk = Walk(given, plain)
    walk.eqns += walk
    return walk.result()


def in_regions(x):
    def body(carry, _):
        return lax.cond(carry[0] > 0, lambda y: jnp.sin(y + 0.0), jnp.cos, carry), None

    return lax.while_loop(lambda y: jnp.sum(y + 0.0) < 3, lambda y: y + 1.0, lax.scan(body, x, None, length=2)[0])


class TestNothingChanges:
    @pytest.mark.parametrize("function", [jnp.sin, lambda x: (x + 1.0) * TABLE, lambda x: x, in_regions])
    def test_the_same_object(self, function):
        closed = jax.make_jaxpr(function)(X)
        assert plain(closed) is closed
        assert plain(open_jaxpr(closed)) is open_jaxpr(closed)

    def test_names_of_what_nobody_reads(self):
        closed = jax.make_jaxpr(lambda x: jnp.sin(x))(X)
        walk = Walk(closed)
        walk.names[jax.make_jaxpr(jnp.cos)(X).jaxpr.invars[0]] = closed.jaxpr.invars[0]
        walk.eqns += walk
        assert walk.result() is closed


class TestChanges:
    def test_left_out(self):
        closed = jax.make_jaxpr(lambda x: jnp.sin(x + 0.0) + 0.0)(X)
        assert text(without_zeros(closed)) == golden("{ lambda ; a:f32[3]. let b:f32[3] = sin a in (b,) }")

    def test_names_reach_through_names(self):
        closed = jax.make_jaxpr(lambda x: (x + 0.0 + 0.0, x + 1.0))(X)
        assert text(without_zeros(closed)) == golden("{ lambda ; a:f32[3]. let b:f32[3] = add a 1.0:f32[] in (a, b) }")

    def test_added(self):
        def held(closed):
            walk = Walk(closed)
            for eqn in walk:
                walk.eqns.append(new_barrier(eqn.invars, eqn.source_info))
                walk.eqns.append(eqn.replace(invars=walk.eqns[-1].outvars))
            return walk.result()

        assert text(held(jax.make_jaxpr(jnp.sin)(X))) == golden(
            "{ lambda ; a:f32[3]. let b:f32[3] = optimization_barrier a; c:f32[3] = sin b in (c,) }"
        )

    def test_constants_stay(self):
        closed = jax.make_jaxpr(lambda x: (x + 0.0) * TABLE)(X)
        after = without_zeros(closed)
        assert list(map(id, closed_consts(after))) == list(map(id, closed_consts(closed)))
        np.testing.assert_array_equal(eval_local(after, [TABLE])[0], TABLE**2)

    def test_an_open_one_stays_open(self):
        body = open_jaxpr(jax.make_jaxpr(lambda x: x + 0.0)(X))
        assert type(without_zeros(body)) is type(body)
        assert without_zeros(body).eqns == []

    def test_in_regions(self):
        closed = jax.make_jaxpr(in_regions)(X)
        after = without_zeros(closed)
        assert sum(eqn.primitive.name == "add" for eqn in equations(closed)) == 3
        assert sum(eqn.primitive.name == "add" for eqn in equations(after)) == 1
        for value in (TABLE, -TABLE):
            np.testing.assert_array_equal(eval_local(after, [value])[0], eval_local(closed, [value])[0])

    def test_in_one_branch(self):
        closed = jax.make_jaxpr(lambda x: lax.cond(x[0] > 0, lambda y: y + 0.0, jnp.cos, x))(X)
        (before,) = (eqn for eqn in equations(closed) if eqn.primitive.name == "cond")
        (after,) = (eqn for eqn in equations(without_zeros(closed)) if eqn.primitive.name == "cond")
        same = [new is old for new, old in zip(after.params["branches"], before.params["branches"], strict=True)]
        assert same == [True, False]

    def test_in_regions_of_some_primitives(self):
        closed = jax.make_jaxpr(in_regions)(X)
        walk = Walk(closed, without_zeros, within={"scan"})
        walk.eqns += walk
        same = [new is old for new, old in zip(walk.eqns, closed.jaxpr.eqns, strict=True)]
        assert [eqn.primitive.name for eqn in walk.eqns] == ["scan", "while"]
        assert same == [False, True]

    def test_not_in_regions_unless_asked(self):
        closed = jax.make_jaxpr(in_regions)(X)
        walk = Walk(closed)
        walk.eqns += [eqn for eqn in walk if not (eqn.primitive.name == "add" and is_zero(eqn.invars[1]))]
        assert walk.result() is closed


class TestEquations:
    def test_renamed_operands(self):
        x, y = (jax.make_jaxpr(jnp.sin)(X).jaxpr.invars[0] for _ in range(2))
        eqn = jax.make_jaxpr(lambda x: x + 1.0)(X).jaxpr.eqns[0]
        assert with_renamed_operands(eqn, {x: y}) is eqn
        after = with_renamed_operands(eqn, {eqn.invars[0]: y})
        assert after.invars == [y, eqn.invars[1]]
        assert after.outvars == eqn.outvars
        assert renamed(x, {x: y}) is y
        assert renamed(eqn.invars[1], {x: y}) is eqn.invars[1]

    def test_regions_that_stay(self):
        closed = jax.make_jaxpr(in_regions)(X)
        for eqn in open_jaxpr(closed).eqns:
            assert with_regions(eqn, lambda inner: inner) is eqn


KINDS = {"zero": lambda x, _: x + 0.0, "one": lambda x, _: x + 1.0, "sin": lambda x, _: jnp.sin(x), "add": jnp.add}
LINES = st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 99), st.integers(0, 99)))


def program(rows):
    """Straight-line code: each line reads values that are there by then; the last ones are the results."""

    def run(x):
        values = [x]
        for kind, first, second in rows:
            values.append(KINDS[kind](values[first % len(values)], values[second % len(values)]))
        return values[-3:]

    return jax.make_jaxpr(run)(X)


@settings(max_examples=40, deadline=None)
@given(LINES)
def test_any_program_computes_the_same_without_its_zeros(rows):
    closed = program(rows)
    after = without_zeros(closed)
    zeros = sum(kind == "zero" for kind, _, _ in rows)
    assert len(open_jaxpr(after).eqns) == len(open_jaxpr(closed).eqns) - zeros
    assert (after is closed) == (not zeros)
    assert without_zeros(after) is after
    for new, old in zip(eval_local(after, [TABLE]), eval_local(closed, [TABLE]), strict=True):
        np.testing.assert_array_equal(new, old)
