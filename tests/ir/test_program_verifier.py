"""Every invariant has a program that breaks it and a message with its number."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend import core as jex
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_deepcompile._jax_compat import new_var, open_jaxpr
from jax_deepcompile.errors import InvariantError
from jax_deepcompile.ir.placement import PARTIAL, REPLICATE, MeshAxes, Placement
from jax_deepcompile.ir.program import Port, Program, Role, View
from jax_deepcompile.ir.traversal import inline_calls
from jax_deepcompile.ir.verifier import verify

pytestmark = pytest.mark.pure

R, P = REPLICATE, PARTIAL
MESH = MeshAxes(("fsdp",), (4,))
WHOLE, SPLIT, SUM = Placement((R,)), Placement((0,)), Placement((P,))


def closed(function, *shapes, axes=MESH) -> jex.ClosedJaxpr:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    environment = list(zip(axes.names, axes.sizes, strict=True))
    return inline_calls(jax.make_jaxpr(function, axis_env=environment)(*arguments))


def port(shape, placement=None, path="w", **changes) -> Port:
    return dataclasses.replace(Port(path, Role.PARAM, shape, "float32", placement), **changes)


W = port((8, 3))


def program(function=jnp.sin, inputs=(W,), outputs=None, state=((0, 0),), view=View.GLOBAL) -> Program:
    shapes = [
        p.shape if view is View.GLOBAL or p.placement is None else p.placement.local_shape(p.shape, MESH)
        for p in inputs
    ]
    outputs = inputs if outputs is None else outputs
    tree = jax.tree.structure([*outputs])
    return Program("step", closed(function, *shapes), inputs, outputs, tree, state, MESH, view)


def with_equations(valid: Program, change) -> Program:
    """``valid`` with ``change(jaxpr)``'s fields in its jaxpr."""
    jaxpr = open_jaxpr(valid.jaxpr)
    return valid.replace(jaxpr=jex.ClosedJaxpr(jaxpr.replace(**change(jaxpr)), []))


def broken(number: int, program: Program) -> str:
    with pytest.raises(InvariantError, match=f"^invariant {number} does not hold") as error:
        verify(program)
    return str(error.value)


def two_sines(x):
    return jnp.sin(jnp.sin(x))


class TestValidProgramsPass:
    def test_in_the_global_view(self):
        verify(program())
        verify(program(inputs=(port((8, 3), SPLIT),)))

    def test_in_the_local_view(self):
        verify(program(lambda w: lax.psum(w, "fsdp"), (port((8, 3), SPLIT),), view=View.LOCAL))

    def test_with_loops_branches_and_literals(self):
        def step(w):
            w = lax.fori_loop(0, 3, lambda i, w: w + 1.0, w)
            return lax.cond(w[0, 0] > 0, jnp.sin, jnp.cos, w)

        verify(program(step))

    def test_with_a_state_leaf_passed_through(self):
        verify(program(lambda w: w))

    def test_with_a_result_nobody_reads(self):
        verify(program(lambda w: lax.scan(lambda c, x: (c, x), w, w)[0]))

    def test_with_the_users_own_manual_region(self):
        mesh = AbstractMesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))

        def step(w):
            spec = PartitionSpec("fsdp")
            return jax.shard_map(
                lambda block: lax.psum(block, "fsdp") + block, mesh=mesh, in_specs=spec, out_specs=spec
            )(w)

        jaxpr = inline_calls(jax.make_jaxpr(step)(jax.ShapeDtypeStruct((8, 3), jnp.float32)))
        verify(program().replace(jaxpr=jaxpr))

    def test_where_an_output_that_is_no_state_differs(self):
        verify(program(jnp.sum, outputs=(port(()),), state=()))


class TestDefinitions:
    """Invariant 1."""

    def test_used_before_defined(self):
        swapped = with_equations(program(two_sines), lambda jaxpr: {"eqns": jaxpr.eqns[::-1]})
        assert "sin reads" in broken(1, swapped)

    def test_defined_twice(self):
        again = with_equations(program(two_sines), lambda jaxpr: {"eqns": [*jaxpr.eqns, jaxpr.eqns[-1]]})
        assert "defined once" in broken(1, again)

    def test_an_input_defined_again(self):
        def change(jaxpr):
            return {"eqns": [*jaxpr.eqns, jaxpr.eqns[0].replace(outvars=jaxpr.invars)]}

        assert "defined once" in broken(1, with_equations(program(), change))

    def test_an_input_named_twice(self):
        two = program(lambda a, b: a, (port((8, 3)), port((8, 3), path="v")), state=(), outputs=(port((8, 3)),))
        verify(two)
        twice = with_equations(two, lambda jaxpr: {"invars": [jaxpr.invars[0]] * 2})
        assert "defined once" in broken(1, twice)

    def test_an_output_never_made(self):
        lost = with_equations(program(), lambda jaxpr: {"outvars": [new_var(jaxpr.outvars[0].aval)]})
        assert "is never made" in broken(1, lost)

    def test_inside_a_loop(self):
        looped = program(lambda w: lax.scan(lambda c, _: (two_sines(c), None), w, None, length=2)[0])

        def change(jaxpr):
            (eqn,) = jaxpr.eqns
            body = eqn.params["jaxpr"]
            inner = open_jaxpr(body).replace(eqns=open_jaxpr(body).eqns[::-1])
            return {"eqns": [eqn.replace(params={**eqn.params, "jaxpr": jex.ClosedJaxpr(inner, [])})]}

        verify(looped)
        assert "sin reads" in broken(1, with_equations(looped, change))


class TestPorts:
    """Invariant 2."""

    def test_an_input_without_a_port(self):
        assert "0 input ports for 1 inputs" in broken(2, program().replace(inputs=()))

    def test_an_output_without_a_port(self):
        assert "0 output ports for 1 outputs" in broken(2, program().replace(outputs=()))

    def test_another_shape(self):
        message = broken(2, program().replace(inputs=(port((3, 8)),)))
        assert "input w is float32[8, 3], its port says float32[3, 8]" in message

    def test_another_dtype(self):
        assert "its port says bfloat16[8, 3]" in broken(2, program().replace(outputs=(port((8, 3), dtype="bfloat16"),)))

    def test_in_the_local_view_shapes_are_those_of_blocks(self):
        local = program(inputs=(port((8, 3), SPLIT),), view=View.LOCAL)
        verify(local)
        broken(2, local.replace(inputs=(port((8, 3), WHOLE),)))


class TestCollectives:
    """Invariant 3."""

    @pytest.mark.parametrize(
        "collective",
        [
            lambda w: lax.psum(w, "fsdp"),
            lambda w: lax.pmax(w, "fsdp"),
            lambda w: lax.pmin(w, "fsdp"),
            lambda w: lax.all_gather(w, "fsdp", axis=1, tiled=True)[:, :3],
            lambda w: jnp.tile(lax.psum_scatter(w, "fsdp", scatter_dimension=0, tiled=True), (4, 1)),
            lambda w: lax.all_to_all(w, "fsdp", 0, 0, tiled=True),
            lambda w: lax.ppermute(w, "fsdp", [(0, 1), (1, 0)]),
            lambda w: w + lax.axis_index("fsdp"),
        ],
    )
    def test_in_the_global_view(self, collective):
        assert "over fsdp in the global view" in broken(3, program(collective))
        verify(program(collective, (port((8, 3), WHOLE),), view=View.LOCAL))

    def test_over_an_axis_the_mesh_lacks(self):
        other = MeshAxes(("model",), (4,))
        jaxpr = closed(lambda w: lax.psum(w, "model"), (8, 3), axes=other)
        local = program(inputs=(port((8, 3), WHOLE),), view=View.LOCAL).replace(jaxpr=jaxpr)
        assert "psum over model in the local view" in broken(3, local)

    def test_inside_a_loop(self):
        def step(w):
            return lax.scan(lambda c, _: (lax.psum(c, "fsdp"), None), w, None, length=2)[0]

        broken(3, program(step))


class TestPlacements:
    """Invariants 4 and 5."""

    @pytest.mark.parametrize("placement", [Placement((1,)), Placement((2,))])
    def test_a_split_that_does_not_fit(self, placement):
        message = broken(4, program().replace(inputs=(port((8, 3), placement),)))
        assert f"w [8, 3] cannot be {placement.describe(MESH)}" in message

    @pytest.mark.parametrize(
        "placement",
        [
            Placement((1,)),
            pytest.param(Placement((2,))),
        ],
    )
    def test_a_split_that_does_not_fit_in_the_local_view(self, placement):
        local = program(inputs=(port((8, 3), WHOLE),), view=View.LOCAL)
        ill = port((8, 3), placement)
        body = closed(jnp.sin, (8, 0)) if placement.axes[0] == 1 else local.jaxpr
        broken(4, local.replace(inputs=(ill,), outputs=(ill,), jaxpr=body))

    def test_none_in_the_local_view(self):
        local = program(inputs=(port((8, 3), WHOLE),), view=View.LOCAL)
        assert "has none in the local view" in broken(4, local.replace(inputs=(port((8, 3)),)))

    def test_an_output_that_is_a_partial_sum(self):
        message = broken(5, program().replace(outputs=(port((8, 3), SUM),), state_outputs=()))
        assert message.startswith("invariant 5 does not hold (no output is a partial sum): w.")

    def test_an_input_may_be_one(self):
        verify(program(outputs=(port((8, 3), WHOLE),), inputs=(port((8, 3), SUM),), state=(), view=View.LOCAL))


class TestAliases:
    """Invariant 6."""

    def test_two_outputs_take_one_buffer(self):
        two = program(lambda w: (w + 1, w + 2), outputs=(port((8, 3)),) * 2, state=((0, 0), (0, 1)))
        assert "a buffer is taken once" in broken(6, two)

    def test_one_output_takes_two_buffers(self):
        inputs = (port((8, 3)), port((8, 3), path="v"))
        two = program(lambda w, v: w + v, inputs, (port((8, 3)),), state=((0, 0), (1, 0)))
        broken(6, two)

    @pytest.mark.parametrize(
        ("change", "field"),
        [({"placement": SPLIT}, "placement"), ({"memory_kind": "pinned_host"}, "memory_kind")],
    )
    def test_state_that_comes_back_elsewhere(self, change, field):
        moved = port((8, 3), **{"placement": WHOLE, **change})
        message = broken(6, program(inputs=(port((8, 3), WHOLE),), outputs=(moved,)))
        assert f"w: {field} " in message

    def test_state_that_comes_back_in_another_shape(self):
        assert "w: shape (8, 3) becomes (3, 8)" in broken(6, program(lambda w: w.T, outputs=(port((3, 8)),)))

    def test_state_that_comes_back_in_another_dtype(self):
        cast = program(lambda w: w.astype(jnp.bfloat16), outputs=(port((8, 3), dtype="bfloat16"),))
        assert "w: dtype float32 becomes bfloat16" in broken(6, cast)

    def test_the_same_change_in_an_output_that_is_no_state(self):
        verify(program(lambda w: w.T, outputs=(port((3, 8)),), state=()))
