"""What a traced step knows of its inputs and outputs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jax_deepcompile._jax_compat import closed_consts, open_jaxpr
from jax_deepcompile.errors import StateChangedError, StateNotReturnedError
from jax_deepcompile.frontend.call import Argument, PureCall, PureStep, argument_names
from jax_deepcompile.frontend.signature import Signature
from jax_deepcompile.frontend.trace import Traced, trace_function, trace_init, trace_step
from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.ir.program import Program, Role
from jax_deepcompile.ir.traversal import equations

pytestmark = pytest.mark.pure

MESH = MeshAxes(("fsdp",), (8,))
W = jax.ShapeDtypeStruct((8, 4), jnp.float32)
V = jax.ShapeDtypeStruct((4,), jnp.float32)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)
BATCH = {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)}


def trace(step, *args, state=(0,), batch=(1,), **kwargs) -> Traced:
    signature = Signature("step", state, batch=batch, names=argument_names(step, len(args)))
    arguments = tuple(Argument(signature.name_of(place), place) for place in range(len(args)))
    call = PureCall(PureStep(step, arguments), args, kwargs)
    return trace_step(trace_function(call, signature), call, signature, MESH)


def roles(program: Program) -> dict[str, Role]:
    return {port.path: port.role for port in program.inputs}


def names(program: Program) -> list[str]:
    return [eqn.primitive.name for eqn in equations(program.jaxpr)]


class TrainState(NamedTuple):
    step: jax.Array
    params: dict
    opt_state: optax.OptState


class TestRoles:
    def test_by_path(self):
        state = {"params": {"w": W}, "opt_state": {"mu": W}, "step": COUNT}
        traced = trace(lambda state, batch, rate, *, scale: state, state, BATCH, V, scale=V)
        assert roles(traced.program) == {
            "state['params']['w']": Role.PARAM,
            "state['opt_state']['mu']": Role.OPTIMIZER,
            "state['step']": Role.PARAM,
            "batch['x']": Role.BATCH,
            "rate": Role.OTHER,
            "scale": Role.OTHER,
        }

    @pytest.mark.parametrize("name", ["opt_state", "optimizer", "opt", "optimizer_state"])
    def test_names_of_optimizers(self, name):
        traced = trace(lambda state, batch: state, {name: (V, {"w": W})}, BATCH)
        assert [port.role for port in traced.program.inputs] == [Role.OPTIMIZER, Role.OPTIMIZER, Role.BATCH]

    def test_a_name_that_only_contains_one_is_a_parameter(self):
        traced = trace(lambda state, batch: state, {"option": W, "adopt": V}, BATCH)
        assert [port.role for port in traced.program.inputs] == [Role.PARAM, Role.PARAM, Role.BATCH]

    def test_attributes_count_as_names(self):
        state = TrainState(COUNT, {"w": W}, (optax.TraceState({"w": W}),))
        found = roles(trace(lambda state, batch: state, state, BATCH).program)
        assert found["state.opt_state[0].trace['w']"] is Role.OPTIMIZER
        assert found["state.params['w']"] is Role.PARAM

    def test_an_argument_of_its_own(self):
        def step(params, opt_state, batch):
            return params, opt_state

        traced = trace(step, {"w": W}, {"mu": W}, BATCH, state=(0, 1), batch=(2,))
        assert roles(traced.program)["opt_state['mu']"] is Role.OPTIMIZER

    def test_several_batches(self):
        traced = trace(lambda s, x, y: s, W, BATCH["x"], BATCH["x"], batch=(1, 2))
        assert roles(traced.program) == {"s": Role.PARAM, "x": Role.BATCH, "y": Role.BATCH}

    def test_positions_have_names_where_the_signature_has_none(self):
        traced = trace(lambda *args: args[0], W, BATCH["x"])
        assert list(roles(traced.program)) == ["args[0]", "args[1]"]

    def test_ports_tell_shapes_and_dtypes(self):
        traced = trace(lambda state, batch: state, {"w": W, "n": 3, "key": jax.random.key(0)}, BATCH)
        found = {port.path: (port.shape, port.dtype) for port in traced.program.inputs}
        assert found == {
            "state['w']": ((8, 4), "float32"),
            "state['n']": ((), "int32"),
            "state['key']": ((), "key<fry>"),
            "batch['x']": ((16, 8), "float32"),
        }

    def test_everything_an_initialisation_makes_is_state(self):
        traced = trace_init(lambda key: {"params": jnp.zeros((8,)), "opt": jnp.zeros((8,))}, (0,), {}, MESH)
        outputs = [(port.path, port.role) for port in traced.program.outputs]
        assert outputs == [("state['opt']", Role.OPTIMIZER), ("state['params']", Role.PARAM)]
        assert [port.role for port in traced.program.inputs] == [Role.OTHER]


def update(state):
    return jax.tree.map(lambda leaf: leaf + 1, state)


STATE = {"a": W, "b": V}


class TestReturnedState:
    @pytest.mark.parametrize(
        ("step", "pairs"),
        [
            (lambda s, b: update(s), ((0, 0), (1, 1))),
            (lambda s, b: (update(s), 1.0), ((0, 0), (1, 1))),
            (lambda s, b: (1.0, update(s)), ((0, 1), (1, 2))),
            (lambda s, b: [1.0, [2.0, update(s)]], ((0, 2), (1, 3))),
            (lambda s, b: {"loss": 1.0, "state": update(s)}, ((0, 1), (1, 2))),
            (lambda s, b: {"state": update(s), "aux": (1.0, 2.0)}, ((0, 2), (1, 3))),
            (lambda s, b: ({"z": 1.0, "k": {"s": update(s), "a": 1.0}}, 3.0), ((0, 1), (1, 2))),
        ],
    )
    def test_wherever_it_is_returned(self, step, pairs):
        assert trace(step, STATE, BATCH).program.state_outputs == pairs

    def test_outputs_in_the_states_place_are_the_states_ports(self):
        program = trace(lambda s, b: ({"loss": jnp.sum(s["a"])}, update(s)), STATE, BATCH).program
        assert [(port.path, port.role) for port in program.outputs] == [
            ("out[0]['loss']", Role.OTHER),
            ("s['a']", Role.PARAM),
            ("s['b']", Role.PARAM),
        ]

    @pytest.mark.parametrize("swap", [False, True])
    def test_several_arguments_in_any_order(self, swap):
        def step(params, moments, batch):
            out = (update(params), update(moments))
            return (*out[::-1], 1.0) if swap else (*out, 1.0)

        program = trace(step, {"w": W}, (W, V), BATCH, state=(0, 1), batch=(2,)).program
        assert sorted(program.state_outputs) == ([(0, 2), (1, 0), (2, 1)] if swap else [(0, 0), (1, 1), (2, 2)])

    def test_arguments_of_one_form_are_matched_in_order(self):
        program = trace(lambda p, q, b: (update(p), update(q)), W, W, BATCH, state=(0, 1), batch=(2,)).program
        assert program.state_outputs == ((0, 0), (1, 1))

    def test_metrics_of_another_shape_are_not_taken_for_the_state(self):
        program = trace(lambda s, b: (jnp.sum(s), s + 1), W, BATCH).program
        assert program.state_outputs == ((0, 1),)

    def test_an_empty_state_before_another(self):
        def step(params, stats, batch):
            return stats, update(params)

        assert trace(step, {"w": W}, {}, BATCH, state=(0, 1), batch=(2,)).program.state_outputs == ((0, 0),)

    @pytest.mark.parametrize("empty", [{}, (), optax.EmptyState(), None])
    def test_an_empty_state_after_another(self, empty):
        def step(params, stats, batch):
            return update(params), stats, 1.0

        assert trace(step, {"w": W}, empty, BATCH, state=(0, 1), batch=(2,)).program.state_outputs == ((0, 0),)

    def test_none_is_returned(self):
        with pytest.raises(StateNotReturnedError, match="does not return its state"):
            trace(lambda s, b: 1.0, STATE, BATCH)

    @pytest.mark.parametrize(
        ("step", "message"),
        [
            (lambda s, b: {**s, "a": s["a"].T}, "was float32.8,4. and is float32.4,8."),
            (lambda s, b: {**s, "a": s["a"].astype(jnp.bfloat16)}, "was float32.8,4. and is bfloat16.8,4."),
            (lambda s, b: ({"a": s["a"]}, 1.0), "s.'b'. is missing"),
            (lambda s, b: ({**s, "c": s["a"]}, 1.0), "s.'c'. is new"),
        ],
    )
    def test_one_that_changed(self, step, message):
        with pytest.raises(StateChangedError, match=message):
            trace(step, STATE, BATCH)


class TestDeadCode:
    def test_what_reaches_no_output_is_gone(self):
        def step(w, batch):
            jnp.sin(batch["x"])
            return w + 1

        assert names(trace(step, W, BATCH).program) == ["add"]

    def test_inputs_nobody_reads_stay(self):
        program = trace(lambda w, batch: w + 1, W, BATCH).program
        assert len(open_jaxpr(program.jaxpr).invars) == len(program.inputs) == 2

    def test_unused_results_of_loops_are_gone(self):
        def step(w, batch):
            carry, _ = lax.scan(lambda c, _: (c + 1, jnp.sin(c)), w, None, length=3)
            return carry

        assert "sin" not in names(trace(step, W, BATCH).program)

    def test_unused_carries_of_loops_are_gone(self):
        def step(w, batch):
            (carry, _), _ = lax.scan(lambda c, _: ((c[0] + 1, jnp.sin(c[1])), None), (w, w), None, length=3)
            return carry

        assert "sin" not in names(trace(step, W, BATCH).program)

    def test_effects_stay(self):
        def step(w, batch):
            jax.debug.print("sum {}", jnp.sum(batch["x"]))
            return w + 1

        found = names(trace(step, W, BATCH).program)
        assert "reduce_sum" in found
        assert any(name.startswith("debug_") for name in found)

    def test_effects_inside_loops_stay(self):
        def step(w, batch):
            def body(c, _):
                jax.debug.print("sum {}", jnp.sum(c))
                return c + 1, None

            lax.scan(body, batch["x"], None, length=2)
            return w + 1

        assert "scan" in names(trace(step, W, BATCH).program)

    def test_constants_match_their_variables(self):
        table, unused = np.ones((8, 4), np.float32), np.zeros(5, np.float32)

        def step(w, batch):
            jnp.sin(jnp.asarray(unused))
            return w * jnp.asarray(table)

        jaxpr = trace(step, W, BATCH).program.jaxpr
        assert len(open_jaxpr(jaxpr).constvars) == len(closed_consts(jaxpr))
        assert any(const is table or np.array_equal(const, table) for const in closed_consts(jaxpr))


class TestTracing:
    def test_no_call_is_left(self):
        program = trace(lambda w, batch: jax.jit(jax.checkpoint(jnp.tanh))(w), W, BATCH).program
        assert names(program) == ["tanh"]

    def test_arguments_on_a_mesh_are_traced_as_on_one_device(self):
        mesh = jax.make_mesh((8,), ("fsdp",))
        there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
        placed = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=there)
        program = trace(lambda w, batch: w @ w.T @ w, placed, BATCH).program
        plain = trace(lambda w, batch: w @ w.T @ w, W, BATCH).program
        assert str(program.jaxpr) == str(plain.jaxpr)

    def test_the_form_of_a_call_tells_shapes_dtypes_and_weak_types_apart(self):
        def form(*args):
            return called(*args).form

        def called(*args):
            return PureCall(PureStep(len, tuple(Argument("arg", place) for place in range(len(args)))), args, {})

        assert form(W, V) == form(W, V)
        assert len({form(W, V), form(V, V), form(W, COUNT), form(W, 1.0), form(W, {"x": V})}) == 5
        assert form(W, 1.0) != form(W, np.float32(1.0))
        assert form(W, 1.0) == form(W, 2.0)
        assert form(np.zeros((8, 4))) == form(jnp.zeros((8, 4))) == form(W)
        assert form(W, 1.0) == called(W, 1.0).without_values().form
