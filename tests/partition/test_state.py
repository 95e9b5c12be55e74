"""Which dimension of every state leaf is split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType

import jax_deepcompile as deepcompile
from jax_deepcompile.frontend.trace import trace_init
from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.partition.partition import partition_init
from jax_deepcompile.stages import TracedStep
from tests.partition.steps import (
    BATCH,
    FLAT,
    HYBRID,
    D,
    count,
    moves,
    placements,
    reasons,
    squares,
    trace,
    trace_training,
)

pytestmark = pytest.mark.pure

LAYERS = 8
STACK = {"w": (LAYERS, D, D)}


def layer(x, w):
    return jnp.tanh(x @ w)


def scanned(p, batch):
    return squares(lax.scan(lambda x, w: (layer(x, w), None), batch["x"], p["w"])[0], batch)


def where(state, mesh=FLAT, step=lambda s, batch: jax.tree.map(lambda leaf: leaf + 1, s)) -> TracedStep:
    return trace(step, state, {"x": (8,)}, mesh)


def of_state(traced: TracedStep) -> set[str]:
    """The placements of everything in the state that is an array."""
    ports = traced.sharded.inputs
    return {port.where.describe(traced.sharded.mesh) for port in ports if port.role.is_state and port.shape}


class TestOneLeaf:
    @pytest.mark.parametrize(
        ("shape", "placement"),
        [
            ((8,), "shard(0: fsdp)"),
            ((16, 3), "shard(0: fsdp)"),
            ((24, 8), "shard(0: fsdp)"),
            ((3, 16), "shard(1: fsdp)"),
            ((3, 3, 5, 32), "shard(3: fsdp)"),
            ((), "replicate"),
            ((1,), "replicate"),
            ((4,), "replicate"),
            ((9, 15), "replicate"),
            pytest.param(
                (0,),
                "replicate",
            ),
        ],
    )
    def test_the_first_dimension_that_divides(self, shape, placement):
        assert placements(where({"w": shape}))["s['w']"] == placement

    def test_nothing_is_said_of_the_first_dimension(self):
        assert reasons(where({"w": (16, 3)})) == {}

    def test_why_not_an_earlier_dimension(self):
        assert reasons(where({"w": (3, 5, 16)}))["s['w']"] == (
            "dimension 2: 0 (3) does not divide by 8, 1 (5) does not divide by 8"
        )

    def test_odd_shapes_are_replicated_and_the_reason_names_the_padding(self):
        assert reasons(where({"w": (15, 9)}))["s['w']"] == (
            "replicated: no dimension of (15, 9) divides by 8; padded by 6.7% it would, at the price of another shape "
            "in your state"
        )

    def test_scalars_and_keys_are_replicated_without_a_word(self):
        def step(state, batch):
            return state, jax.random.uniform(state["keys"][0], ())

        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
        traced = where({"n": jax.ShapeDtypeStruct((), jnp.int32), "keys": keys}, step=step)
        assert placements(traced)["state['keys']"] == placements(traced)["state['n']"] == "replicate"
        assert reasons(traced) == {}

    def test_state_is_not_split_over_data_axes(self):
        traced = where({"w": (12, 8)}, HYBRID)
        assert placements(traced) == {"s['w']": "shard(0: fsdp)", "batch['x']": "shard(0: data, fsdp)"}

    def test_bytes_a_device(self):
        found = {leaf.path: leaf.bytes_per_device for leaf in where({"a": (16, 3), "b": (3,)}).partitioned.leaves}
        assert found == {"s['a']": 24, "s['b']": 12}

    def test_batches_and_other_arguments_are_no_leaves(self):
        assert [leaf.path for leaf in where({"w": (8,)}).partitioned.leaves] == ["s['w']"]


def nested_scans(p, batch):
    def block(x, ws):
        return lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0], None

    return squares(lax.scan(block, batch["x"], p["w"])[0], batch)


def python_indexed(p, batch):
    x = batch["x"]
    for i in range(LAYERS):
        x = layer(x, p["w"][i])
    return squares(x, batch)


def unpacked(p, batch):
    x = batch["x"]
    for w in p["w"]:
        x = layer(x, w)
    return squares(x, batch)


def dynamically_sliced(p, batch):
    def body(i, x):
        return layer(x, lax.dynamic_index_in_dim(p["w"], i, keepdims=False))

    return squares(lax.fori_loop(0, LAYERS, body, batch["x"]), batch)


def through_a_checkpoint(p, batch):
    body = jax.checkpoint(lambda x, w: (layer(x, w), None), prevent_cse=False)
    return squares(lax.scan(body, batch["x"], p["w"])[0], batch)


def cast_first(p, batch):
    ws = p["w"].astype(jnp.bfloat16)
    x = lax.scan(lambda x, w: (layer(x, w), None), batch["x"].astype(jnp.bfloat16), ws)[0]
    return squares(x.astype(jnp.float32), batch)


class TestStacks:
    @pytest.mark.parametrize(
        "loss", [scanned, python_indexed, unpacked, dynamically_sliced, through_a_checkpoint, cast_first]
    )
    def test_are_split_inside_their_layers(self, loss):
        traced = trace_training(loss, STACK, BATCH, optimizer=optax.adam(1e-3))
        assert of_state(traced) == {"shard(1: fsdp)"}
        assert set(reasons(traced).values()) == {"dimension 1: 0 is a loop's"}
        assert count(traced, "all_to_all") == 0

    def test_of_stacks(self):
        traced = trace_training(nested_scans, {"w": (LAYERS, LAYERS, D, D)}, BATCH, optimizer=optax.adam(1e-3))
        assert of_state(traced) == {"shard(2: fsdp)"}
        assert reasons(traced)["state['params']['w']"] == "dimension 2: 0 is a loop's, 1 is a loop's"

    def test_passed_through_a_loop_over_microbatches(self):
        def step(s, batch):
            pieces = jax.tree.map(lambda v: v.reshape(8, -1, D), batch)

            def body(total, piece):
                return jax.tree.map(jnp.add, total, jax.grad(scanned)(s, piece)), None

            gradients, _ = lax.scan(body, jax.tree.map(jnp.zeros_like, s), pieces)
            return jax.tree.map(lambda w, g: w - 0.1 * g, s, gradients)

        traced = trace(step, STACK, {"x": (64, D), "y": (64, D)})
        assert of_state(traced) == {"shard(1: fsdp)"}
        assert not any(line.startswith("all_gather") for line in moves(traced))

    def test_whose_layers_do_not_divide_are_split_between_them(self):
        def loss(p, batch):
            return squares(lax.scan(lambda x, b: (jnp.tanh(x + jnp.sum(b)), None), batch["x"], p["b"])[0], batch)

        assert of_state(trace_training(loss, {"b": (LAYERS, 3)}, BATCH)) == {"shard(0: fsdp)"}

    def test_that_are_used_whole_are_no_stacks(self):
        def experts(p, batch):
            return squares(jnp.einsum("bd,edf->bf", batch["x"], p["w"]), batch)

        assert of_state(trace_training(experts, STACK, BATCH)) == {"shard(0: fsdp)"}

    def test_a_loop_over_something_else_leaves_a_parameter_alone(self):
        def recurrent(p, batch):
            return squares(lax.fori_loop(0, 3, lambda _, x: layer(x, p["w"]), batch["x"]), batch)

        assert of_state(trace_training(recurrent, {"w": (D, D)}, BATCH)) == {"shard(0: fsdp)"}


class TestLeavesThatMeet:
    @pytest.mark.parametrize(
        "optimizer",
        [
            optax.adam(1e-3),
            optax.adam(1e-3, mu_dtype=jnp.bfloat16),
            optax.lion(1e-3),
            optax.sgd(0.1, momentum=0.9),
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
            optax.chain(optax.adaptive_grad_clip(0.1), optax.adamax(1e-3)),
            pytest.param(
                optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
            ),
            pytest.param(
                optax.apply_if_finite(optax.adam(1e-3), 3),
            ),
        ],
    )
    def test_moments_are_split_like_their_stack(self, optimizer):
        traced = trace_training(scanned, STACK, BATCH, optimizer=optimizer)
        assert of_state(traced) == {"shard(1: fsdp)"}
        assert count(traced, "all_to_all") == 0

    def test_an_average_is_split_like_its_stack(self):
        def step(s, batch):
            new = s["w"] - 0.1 * jax.grad(scanned)({"w": s["w"]}, batch)["w"]
            return {"w": new, "average": optax.incremental_update(new, s["average"], 0.1)}

        traced = trace(step, {"w": STACK["w"], "average": STACK["w"]}, BATCH)
        assert of_state(traced) == {"shard(1: fsdp)"}

    def test_an_average_inside_a_loop(self):
        def step(s, batch):
            def body(s, _):
                new = s["w"] - 0.1 * jax.grad(scanned)({"w": s["w"]}, batch)["w"]
                return {"w": new, "average": 0.9 * s["average"] + 0.1 * new}, None

            return lax.scan(body, s, None, length=2)[0]

        assert of_state(trace(step, {"w": STACK["w"], "average": STACK["w"]}, BATCH)) == {"shard(1: fsdp)"}

    def test_leaves_that_never_meet_have_nothing_to_do_with_each_other(self):
        def step(s, batch):
            return {**s, "w": s["w"] - 0.1 * jax.grad(scanned)({"w": s["w"]}, batch)["w"]}

        found = placements(trace(step, {"w": STACK["w"], "table": STACK["w"]}, BATCH))
        assert found["s['w']"] == "shard(1: fsdp)"
        assert found["s['table']"] == "shard(0: fsdp)"


def born(create, *args) -> dict[str, str]:
    """Where an initialisation puts every leaf."""
    traced = trace_init(create, args, {}, MeshAxes(("fsdp",), (8,)))
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    program = partition_init(traced.program, mesh, ("fsdp",)).program
    return {port.path: port.where.describe(program.mesh) for port in program.outputs}


class TestInitialisation:
    def test_a_plain_state_is_born_as_the_step_wants_it(self):
        def create(key):
            return {"w": jax.random.normal(key, (D, D)), "b": jnp.zeros(3), "key": key}

        found = born(create, jax.random.key(0))
        assert found == {"state['b']": "replicate", "state['key']": "replicate", "state['w']": "shard(0: fsdp)"}

    def test_a_stack_is_born_as_the_step_wants_it(self):
        def create(key):
            return {"w": jax.vmap(lambda key: jax.random.normal(key, (D, D)))(jax.random.split(key, LAYERS))}

        assert born(create, jax.random.key(0)) == {"state['w']": "shard(1: fsdp)"}


def test_axes_that_no_dimension_takes_together_are_placed_one_by_one():
    def step(state, batch):
        return jax.tree.map(lambda leaf: leaf - batch.sum(), state), 0.0

    state = {"w": jax.ShapeDtypeStruct((6, 12), jnp.float32), "odd": jax.ShapeDtypeStruct((3, 5), jnp.float32)}
    batch = jax.ShapeDtypeStruct((8,), jnp.float32)
    traced = deepcompile.shard(step, {"a": 2, "b": 4}, fsdp_axes=("a", "b")).trace(state, batch)
    odd, w = traced.partitioned.leaves
    assert w.placement.axes == (0, 1)
    assert w.bytes_per_device == 6 * 12 * 4 // 8
    assert odd.placement.is_replicated
    assert "w']: divided axis by axis: no dimension of (6, 12) divides by 8; padded by 33.3%" in traced.explain()
