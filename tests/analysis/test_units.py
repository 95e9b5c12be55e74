"""Who needs whom, what is gathered, which way collectives run: one small jaxpr each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Literal

from jax_deepcompile._jax_compat import open_jaxpr, scan_counts
from jax_deepcompile.analysis.dataflow import needed_for, slim_barriers, with_names
from jax_deepcompile.analysis.gathers import find_gathers, first_uses, outermost
from jax_deepcompile.analysis.leading import collectives_along_leading_dimension
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.parts import split_body
from jax_deepcompile.analysis.stacks import stacked_reductions
from jax_deepcompile.ir.rewrite import without_barriers
from jax_deepcompile.ir.traversal import free_variables, reached_from
from tests.transforms.programs import sharded, stack_loss, stack_shapes

pytestmark = pytest.mark.pure

AXIS = [("fsdp", 8)]


def traced(fun, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return open_jaxpr(jax.make_jaxpr(fun, axis_env=AXIS)(*args))


def names(eqns) -> list[str]:
    return [eqn.primitive.name for eqn in eqns]


def test_needed_reached_and_free():
    jaxpr = traced(lambda x, y: (jnp.sin(x) + y, jnp.cos(y)), (4,), (4,))
    x, y = jaxpr.invars
    assert names(needed_for(jaxpr.eqns, jaxpr.outvars[:1])) == ["sin", "add"]
    assert names(needed_for(jaxpr.eqns, [x])) == []
    assert set(jaxpr.outvars) & reached_from(jaxpr.eqns, {x}) == {jaxpr.outvars[0]}
    assert free_variables(jaxpr.eqns, jaxpr.outvars) == [x, y]


def test_barriers_lose_what_nobody_reads_but_those_of_two_stay():
    three = traced(lambda x, y, z: lax.optimization_barrier((x, y, z))[0] + 1, (4,), (4,), (4,))
    assert [len(eqn.invars) for eqn in slim_barriers(three.eqns, three.outvars)] == [1, 2]
    two = traced(lambda x, y: lax.optimization_barrier((x, y))[0] + 1, (4,), (4,))
    assert [len(eqn.invars) for eqn in slim_barriers(two.eqns, two.outvars)] == [2, 2]
    assert names(without_barriers(three).eqns) == ["add"]


def test_what_is_read_by_another_name_is_not_made():
    jaxpr = traced(lambda x: (jnp.sin(x + 1.0), jnp.cos(x)), (4,))
    sine, cosine = jaxpr.outvars
    after = with_names(jaxpr, {sine: cosine})
    assert names(after.eqns) == ["cos"]
    assert after.outvars == [cosine, cosine]
    assert names(with_names(jaxpr, {}).eqns) == names(jaxpr.eqns)


def test_gathers_of_inputs_are_found_and_those_of_results_are_not():
    def fun(w, x):
        whole = lax.all_gather(w.astype(jnp.bfloat16), "fsdp", tiled=True)
        return whole, lax.all_gather(w @ x, "fsdp", tiled=True)

    jaxpr = traced(fun, (4, 4), (4, 4))
    (gather,) = find_gathers(jaxpr, jaxpr.invars)
    assert gather.sources == (jaxpr.invars[0],)
    assert gather.size_bytes == 8 * 4 * 4 * 2
    assert first_uses(jaxpr, [gather.result, jaxpr.invars[0]]) == [len(jaxpr.eqns), 0]


def test_gathers_of_what_elementwise_work_joins_are_of_all_that_it_reads():
    def fun(whole, scale, other, x):
        def gathered(integers, scale):
            return lax.all_gather(integers.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16), "fsdp", tiled=True)

        return gathered(whole, scale), gathered(whole, scale), gathered(whole, other), gathered(whole, whole @ x)

    jaxpr = traced(fun, (4, 4), (1, 4), (1, 4), (4, 4))
    one, same, unlike = find_gathers(jaxpr, jaxpr.invars)
    assert one.sources == (jaxpr.invars[0], jaxpr.invars[1])
    assert one.key == same.key != unlike.key
    assert outermost([one, same, unlike]) == (one, same, unlike)


def test_equal_gathers_have_equal_keys_and_outer_ones_hide_inner_ones():
    def fun(w):
        held, _ = lax.optimization_barrier((w, w[0, 0]))
        one, again = (lax.all_gather(each, "fsdp", tiled=True) for each in (w, held))
        return one + again, lax.all_gather(lax.all_gather(w, "fsdp", axis=1, tiled=True), "fsdp", tiled=True)

    jaxpr = traced(fun, (4, 4))
    found = find_gathers(jaxpr, jaxpr.invars)
    assert len(found) == 4
    assert found[0].key == found[1].key
    assert found[3] in outermost(found)
    assert found[2] not in outermost(found)


@pytest.mark.parametrize(("axis", "expected"), [(0, ["all_gather"]), (1, ["transpose", "all_gather", "transpose"])])
def test_collectives_run_along_the_leading_dimension(axis, expected):
    jaxpr = collectives_along_leading_dimension(
        traced(lambda w: lax.all_gather(w, "fsdp", axis=axis, tiled=True), (4, 6))
    )
    assert names(jaxpr.eqns) == expected
    (gather,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "all_gather")
    assert gather.params["all_gather_dimension"] == 0


def test_untiled_collectives_are_left():
    jaxpr = traced(lambda w: lax.all_gather(w, "fsdp", axis=1), (4, 6))
    assert names(collectives_along_leading_dimension(jaxpr).eqns) == ["all_gather"]


def test_a_layer_loop_splits_into_gathers_work_and_reductions():
    program, _ = sharded(stack_loss, {"stack": stack_shapes()})
    forward, backward = find_loops(program)
    assert (forward.name, backward.name, backward.reverse) == ("stack @forward", "stack @backward", True)
    for loop, reduces in ((forward, False), (backward, True)):
        split = split_body(loop.eqn)
        assert "all_gather" in names(split.early.jaxpr.eqns)
        assert "dot_general" not in names(split.early.jaxpr.eqns)
        assert "all_gather" not in names(split.main.jaxpr.eqns)
        assert bool(split.late_outputs) == reduces
        assert ("reduce_scatter" in names(split.late.jaxpr.eqns)) == reduces


def test_a_loop_that_stacks_a_constant():
    """JAX hands on what does not change as a literal."""

    def loss(params, batch):
        x, flags = lax.scan(lambda x, layer: (jnp.tanh(x @ layer), True), batch, params["w"])
        return jnp.mean(x**2) * flags.sum()

    program, _ = sharded(loss, {"w": (5, 16, 16)})
    for loop in find_loops(program):
        assert all(reduction.output < len(loop.eqn.outvars) for reduction in stacked_reductions(loop.eqn))
        assert set(split_body(loop.eqn).late_outputs) <= set(range(len(loop.eqn.outvars)))
    assert any(isinstance(atom, Literal) for loop in find_loops(program) for atom in stacked_outputs(loop))


def stacked_outputs(loop) -> list:
    return open_jaxpr(loop.eqn.params["jaxpr"]).outvars[scan_counts(loop.eqn)[1] :]
