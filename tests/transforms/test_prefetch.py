"""Prefetched gathers: the same bits, as many gathers, each started just early enough."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.names import gather_names, value_names
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.planner.candidate import Environment, evaluate
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.unrolled import room_bytes
from jax_deepcompile.transforms.prefetch import Prefetch, choose_prefetches, parameter_gathers
from tests.partition.steps import lines, shapes
from tests.planner.situations import UNROLLED, Clock, unrolled_loss
from tests.transforms.programs import WIDTH, assert_same_work, h100s, sharded, stack_loss, stack_shapes

LAYERS = 4
CHAIN = {f"layer{index}": (WIDTH, WIDTH) for index in range(LAYERS)}


def chain_loss(params, x):
    for index in range(LAYERS):
        x = jnp.tanh(x @ params[f"layer{index}"])
    return jnp.mean(x**2)


def forward(params=CHAIN):
    """The products of a chain of layers, a gather right before each."""
    step = deepcompile.shard(lambda state, x: (state, chain_loss(state["params"], x)), {"fsdp": 8})
    traced = step.trace({"params": shapes(params)}, shapes((16, WIDTH)))
    return traced.sharded, step.mesh


def products(program) -> list[int]:
    return [index for index, eqn in enumerate(open_jaxpr(program.jaxpr).eqns) if eqn.primitive.name == "dot_general"]


def waiting(waits_for: dict[int, int]) -> tuple[Prefetch, ...]:
    """That the gathers of these layers wait for the products of those."""
    names = ["chain_loss dot_general", *(f"chain_loss dot_general #{place}" for place in range(2, LAYERS + 1))]
    return tuple(Prefetch(f"layer{layer}", names[product]) for layer, product in waits_for.items())


def order(program) -> list[str]:
    return [line.split()[0] for line in lines(program, ("all_gather", "dot_general", "optimization_barrier"))]


@pytest.mark.pure
@pytest.mark.parametrize(
    ("gather_s", "slack", "waits_for"),
    [
        (1.0, 1.0, {2: 0, 3: 1}),
        (0.5, 1.0, {2: 0, 3: 1}),
        (0.5, 2.0, {2: 0, 3: 1}),
        (0.0, 1.0, {1: 0, 2: 1, 3: 2}),
        (2.0, 1.0, {3: 0}),
        (1.0, 1.5, {3: 0}),
        (1.5, 1.0, {3: 0}),
    ],
    ids=["one ahead", "no anchor between", "slack doubles", "free", "two ahead", "slack", "rounded to earlier"],
)
def test_the_latest_start_that_hides(gather_s, slack, waits_for):
    program, _ = forward()
    assert choose_prefetches(program, Clock(gather_s=gather_s), slack) == waiting(waits_for)


@pytest.mark.pure
def test_gathers_longer_than_all_compute_start_with_the_program():
    program, _ = forward()
    assert choose_prefetches(program, Clock(gather_s=10.0)) == ()


GATHERED = 4 * WIDTH * WIDTH
"""Bytes of one layer."""


@pytest.mark.pure
@pytest.mark.parametrize(
    ("room", "waits_for"),
    [
        (lambda place, dots: 9 * GATHERED, {3: 0}),
        (lambda place, dots: 0, {1: 0, 2: 1, 3: 2}),
        (lambda place, dots: 2 * GATHERED, {1: 0, 3: 0}),
        (lambda place, dots: 9 * GATHERED if place > dots[1] else 0, {1: 0, 2: 1, 3: 1}),
        (lambda place, dots: 9 * GATHERED if place <= dots[1] else 0, {2: 1, 3: 2}),
    ],
    ids=["enough", "none", "for two", "late", "early"],
)
def test_the_earliest_start_that_memory_has_room_for(room, waits_for):
    program, _ = forward()
    dots = products(program)
    room_bytes = [room(place, dots) for place in range(len(open_jaxpr(program.jaxpr).eqns))]
    assert choose_prefetches(program, Clock(gather_s=2.0), 1.0, room_bytes) == waiting(waits_for)


@pytest.mark.pure
def test_one_layer_has_nothing_to_wait_for():
    step = deepcompile.shard(lambda state, x: (state, jnp.mean(x @ state["w"])), {"fsdp": 8})
    program = step.trace(shapes({"w": (WIDTH, WIDTH)}), shapes((16, WIDTH))).sharded
    assert parameter_gathers(program)
    assert choose_prefetches(program, Clock(gather_s=0.0)) == ()


@pytest.mark.pure
def test_gathers_in_loops_are_left():
    program, _ = sharded(stack_loss, {"stack": stack_shapes()})
    assert parameter_gathers(program) == ()
    assert choose_prefetches(program, Clock()) == ()


@pytest.mark.pure
def test_a_gather_waits_for_what_its_use_needs_only():
    """Two towers: the second one's weights do not wait for the first tower."""

    def towers(params, x):
        left, right = x @ params["a"], x @ params["b"]
        return jnp.mean((left @ params["c"]) * (right @ params["d"]))

    step = deepcompile.shard(lambda state, x: (state, towers(state, x)), {"fsdp": 8})
    program = step.trace(shapes(dict.fromkeys("abcd", (WIDTH, WIDTH))), shapes((16, WIDTH))).sharded
    eqns = open_jaxpr(program.jaxpr).eqns
    gathers = parameter_gathers(program)
    results = dict(zip(gather_names(program, (), gathers), (gather.result for gather in gathers), strict=True))
    values = {name: value for value, name in value_names(program.jaxpr, phased=True).items()}
    chosen = choose_prefetches(program, Clock(gather_s=0.0))
    assert chosen
    for decision in chosen:
        (use,) = (eqn for eqn in eqns if results[decision.gather] in eqn.invars)
        assert values[decision.after] in use.invars


@pytest.mark.pure
def test_before_and_after():
    program, _ = forward()
    assert order(program) == ["all_gather", "dot_general"] * LAYERS
    after = Prefetch.apply(program, None, choose_prefetches(program, Clock(), slack=1.0))
    pinned = ["dot_general", "optimization_barrier", "all_gather"]
    assert order(after) == ["all_gather", *pinned, "all_gather", *pinned, "dot_general", "dot_general"]


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("gather_s", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize(
    ("loss", "params"), [(chain_loss, CHAIN), (unrolled_loss, UNROLLED)], ids=["residuals", "recomputed"]
)
def test_values_and_counts_stay_the_same(loss, params, gather_s):
    program, mesh = sharded(loss, params)
    decisions = choose_prefetches(program, Clock(gather_s=gather_s))
    assert decisions
    planned = Prefetch.apply(program, None, decisions)
    assert_same_work(planned, program, mesh)


@pytest.fixture(scope="module")
def wide():
    """Six wide layers on 8 H100s, the base program and the one with its gathers pinned, compiled."""
    depth, width, inner, rows = 6, 4096, 16384, 2048

    def block(x, params):
        up, down = (params[name].astype(jnp.bfloat16) for name in ("up", "down"))
        return x + jax.nn.relu(x @ up) @ down

    def loss(params, x):
        for index in range(depth):
            x = jax.checkpoint(block)(x, params[f"layer{index}"])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    params = {f"layer{index}": {"up": (width, inner), "down": (inner, width)} for index in range(depth)}
    x = jax.ShapeDtypeStruct((8 * rows, width), jnp.bfloat16)
    program, mesh = sharded(loss, params, x, h100s(), optax.sgd(0.1))
    environment = Environment(mesh, "cuda", CostModel(), None)
    return program, environment, evaluate(program, Plan("0"), environment)


@pytest.mark.h100_aot
def test_pinned_gathers_are_waited_for_less(wide):
    program, environment, base = wide
    decisions = choose_prefetches(program, environment.costs)
    pinned = evaluate(program, Plan("0", decisions), environment)
    assert len(decisions) > 16
    assert pinned.prediction.exposed_s < base.prediction.exposed_s
    assert pinned.prediction.step_s < 1.01 * base.prediction.step_s
    assert pinned.simulation.gathered_bytes == base.simulation.gathered_bytes
    assert pinned.prediction.peak_bytes <= 1.05 * base.prediction.peak_bytes


@pytest.mark.h100_aot
def test_gathers_start_as_early_as_the_limit_allows(wide):
    program, environment, base = wide
    limited = dataclasses.replace(environment, limit_bytes=base.prediction.peak_bytes + (100 << 20))

    def peak_bytes(environment) -> int:
        room = room_bytes(program, base, environment)
        decisions = choose_prefetches(program, environment.costs, slack=4.0, room_bytes=room)
        return evaluate(program, Plan("0", decisions), environment).prediction.peak_bytes

    assert peak_bytes(limited) <= 1.03 * limited.limit_bytes < peak_bytes(environment)
