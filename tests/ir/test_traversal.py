"""Calls are gone after inlining, and every equation still says where the user wrote it."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_deepcompile._jax_compat import closed_consts, open_jaxpr, user_line
from jax_deepcompile.ir.traversal import equations, inline_calls, nested_jaxprs

pytestmark = pytest.mark.pure

X = jax.ShapeDtypeStruct((3,), jnp.float32)
TABLE = np.arange(3, dtype=np.float32)


def flat(function, *args):
    return inline_calls(jax.make_jaxpr(function)(*(args or (X,))))


def text(jaxpr) -> str:
    """The jaxpr in one line, spaces and line breaks evened out."""
    return " ".join(str(jaxpr).replace(";", " ").split())


def golden(expected: str) -> str:
    return " ".join(expected.replace(";", " ").split())


def names(jaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in open_jaxpr(jaxpr).eqns]


@jax.jit
def jitted(x):
    return jnp.sin(x)


@jax.jit
def nested(x):
    return jitted(x) * jnp.asarray(TABLE)


class TestCalls:
    def test_jit(self):
        assert names(jax.make_jaxpr(jitted)(X)) == ["jit"]
        assert text(flat(jitted)) == golden("{ lambda ; a:f32[3]. let b:f32[3] = sin a in (b,) }")

    def test_a_function_called_twice_gets_variables_of_its_own_each_time(self):
        assert text(flat(lambda x: jitted(jitted(x)))) == golden(
            "{ lambda ; a:f32[3]. let b:f32[3] = sin a; c:f32[3] = sin b in (c,) }"
        )

    def test_nested_jit_with_constants(self):
        closed = flat(nested)
        assert text(closed) == golden("{ lambda a:f32[3]; b:f32[3]. let c:f32[3] = sin b; d:f32[3] = mul c a in (d,) }")
        (table,) = closed_consts(closed)
        np.testing.assert_array_equal(table, TABLE)

    def test_a_constant_of_a_function_called_twice_is_one_constant(self):
        assert len(closed_consts(flat(lambda x: nested(nested(x))))) == 1

    def test_operands_passed_through_swapped_and_literal(self):
        swapped = flat(lambda x, y: jax.jit(lambda a, b: (b, a, 1.0))(x, y), X, X)
        assert text(swapped) == golden("{ lambda ; a:f32[3] b:f32[3]. let in (b, a, 1.0:f32[]) }")

    def test_results_nobody_reads(self):
        ignored = flat(lambda x: jax.jit(lambda a: (jnp.sin(a), jnp.cos(a)))(x)[1])
        assert text(ignored) == golden("{ lambda ; a:f32[3]. let _:f32[3] = sin a; b:f32[3] = cos a in (b,) }")

    def test_nothing_to_inline(self):
        closed = jax.make_jaxpr(lambda x: jnp.sin(x) * x)(X)
        assert text(inline_calls(closed)) == text(closed)


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(primals[0]), tangents[0] * 7.0))


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, cotangent: (cotangent * x,))


class TestCustomDerivatives:
    @pytest.mark.parametrize("function", [with_jvp, with_vjp])
    def test_the_function_itself(self, function):
        assert text(flat(lambda x: function(x))) == golden("{ lambda ; a:f32[3]. let b:f32[3] = sin a in (b,) }")

    def test_the_users_jvp_has_done_its_work(self):
        tangent = flat(lambda x: jax.jvp(with_jvp, (x,), (x,))[1])
        assert text(tangent) == golden(
            "{ lambda ; a:f32[3]. let _:f32[3] = sin a; b:f32[3] = mul a 7.0:f32[] in (b,) }"
        )

    def test_the_users_vjp_has_done_its_work(self):
        cotangent = flat(lambda x: jax.vjp(with_vjp, x)[1](x))
        assert text(cotangent) == golden("{ lambda ; a:f32[3]. let _:f32[3] = sin a; b:f32[3] = mul a a in (b,) }")


class TestCheckpoints:
    @pytest.mark.parametrize("prevent_cse", [True, False])
    def test_the_forward_pass_has_no_barrier(self, prevent_cse):
        region = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), prevent_cse=prevent_cse)
        assert text(flat(region)) == golden("{ lambda ; a:f32[3]. let b:f32[3] = sin a; c:f32[3] = sin b in (c,) }")

    def test_the_recomputation_is_kept_apart_by_a_barrier(self):
        region = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
        assert text(flat(lambda x: jax.vjp(region, x)[1](x))) == golden(
            """{ lambda ; a:f32[3]. let
            b:f32[3] = sin a
            _:f32[3] = sin b
            c:f32[3] d:f32[3] = optimization_barrier a a
            e:f32[3] = sin c
            f:f32[3] = cos c
            g:f32[3] = cos e
            h:f32[3] = mul d g
            i:f32[3] = mul h f
            in (i,) }"""
        )

    def test_no_barrier_where_it_was_not_asked_for(self):
        region = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), prevent_cse=False)
        assert names(flat(lambda x: jax.vjp(region, x)[1](x))) == ["sin", "sin", "sin", "cos", "cos", "mul", "mul"]

    def test_no_barrier_inside_a_loop_that_keeps_passes_apart(self):
        def layer(x, _):
            return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), prevent_cse=False)(x), None

        step = flat(lambda x: jax.vjp(lambda x: lax.scan(layer, x, None, length=2)[0], x)[1](x))
        assert not any(eqn.primitive.name == "optimization_barrier" for eqn in equations(step))

    def test_a_barrier_inside_a_loop(self):
        def layer(x, _):
            return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x), None

        step = flat(lambda x: jax.vjp(lambda x: lax.scan(layer, x, None, length=2)[0], x)[1](x))
        forward, backward = (eqn.params["jaxpr"] for eqn in open_jaxpr(step).eqns if eqn.primitive.name == "scan")
        assert "optimization_barrier" not in names(forward)
        assert names(backward).count("optimization_barrier") == 1


class TestRegions:
    def test_scan(self):
        looped = flat(lambda x: lax.scan(lambda c, _: (jitted(c), None), x, None, length=2)[0])
        (eqn,) = open_jaxpr(looped).eqns
        assert text(eqn.params["jaxpr"]) == golden("{ lambda ; a:f32[3]. let b:f32[3] = sin a in (b,) }")

    def test_constants_stay_inside_the_loop_that_uses_them(self):
        looped = flat(lambda x: lax.scan(lambda c, _: (nested(c), None), x, None, length=2)[0])
        (eqn,) = open_jaxpr(looped).eqns
        assert names(eqn.params["jaxpr"]) == ["sin", "mul"]
        assert len(closed_consts(eqn.params["jaxpr"])) + len(closed_consts(looped)) == 1

    def test_while_has_both_its_jaxprs_flattened(self):
        positive = jax.jit(lambda x: jnp.sum(x) > 0)
        looped = flat(lambda x: lax.while_loop(positive, jitted, x))
        (eqn,) = open_jaxpr(looped).eqns
        assert names(eqn.params["cond_jaxpr"]) == ["reduce_sum", "gt"]
        assert names(eqn.params["body_jaxpr"]) == ["sin"]

    def test_cond_has_every_branch_flattened(self):
        switched = flat(lambda i, x: lax.switch(i, [jitted, nested, jnp.cos], x), jax.ShapeDtypeStruct((), "int32"), X)
        eqn = open_jaxpr(switched).eqns[-1]
        assert [names(branch) for branch in eqn.params["branches"]] == [["sin"], ["sin", "mul"], ["cos"]]

    def test_a_loop_inside_a_branch_inside_a_loop(self):
        def inner(x):
            return lax.scan(lambda c, _: (jitted(c), None), x, None, length=2)[0]

        def body(c, _):
            return lax.cond(c[0] > 0, inner, jax.jit(inner), c), None

        looped = flat(lambda x: lax.scan(body, x, None, length=2)[0])
        found = [eqn.primitive.name for eqn in equations(looped)]
        assert "jit" not in found
        assert found.count("sin") == 2


class TestWalking:
    def test_equations_include_nested_ones(self):
        closed = jax.make_jaxpr(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x))(X)
        found = [eqn.primitive.name for eqn in equations(closed)]
        assert {"sin", "cos", "cond"} <= set(found)
        assert found.index("cond") < found.index("sin")

    def test_nested_jaxprs_of_a_plain_equation(self):
        (eqn,) = jax.make_jaxpr(jnp.sin)(X).eqns
        assert nested_jaxprs(eqn) == []


def first_user_of_cached_library_code(x):
    return jax.nn.silu(x)


def second_user_of_cached_library_code(x):
    return jax.nn.silu(x)


def the_users_loop(x):
    return lax.scan(lambda c, _: (jnp.clip(c, 0.0, 1.0), None), x, None, length=2)[0]


def written_in(function) -> str:
    return f"{__file__}:{inspect.getsourcelines(function)[1] + 1} ({function.__name__}"


class TestPositions:
    @pytest.mark.parametrize("function", [first_user_of_cached_library_code, second_user_of_cached_library_code])
    def test_library_code_cached_from_another_trace_is_where_this_user_called_it(self, function):
        jax.make_jaxpr(first_user_of_cached_library_code)(X)
        for eqn in equations(flat(function)):
            assert user_line(eqn).startswith(written_in(function)), eqn

    def test_the_innermost_line_of_the_users_own(self):
        (eqn,) = open_jaxpr(flat(lambda x: jitted(x))).eqns
        assert user_line(eqn) == f"{__file__}:{inspect.getsourcelines(jitted.__wrapped__)[1] + 2} (jitted)"

    def test_inside_loops(self):
        jax.make_jaxpr(lambda x: jnp.clip(x, 0.0, 1.0))(X)
        for eqn in equations(flat(the_users_loop)):
            assert user_line(eqn).startswith(written_in(the_users_loop)), eqn

    def test_the_barrier_of_a_checkpoint(self):
        region = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
        (barrier,) = (
            eqn
            for eqn in equations(flat(lambda x: jax.vjp(region, x)[1](x)))
            if eqn.primitive.name == "optimization_barrier"
        )
        assert user_line(barrier).startswith(f"{__file__}:")
