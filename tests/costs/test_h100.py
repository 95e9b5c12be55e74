"""Real steps compiled for 32 H100s: what the simulator says of them, and of their memory what XLA says."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import jax_deepcompile as deepcompile
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.memory import memory_of
from jax_deepcompile.costs.network import Network
from jax_deepcompile.costs.simulator import Simulation, simulate
from jax_deepcompile.costs.streams import Stream
from jax_deepcompile.hlo import reader as hlo
from jax_deepcompile.lowering.compile import compile_options
from models import gpt2, llama, mixtral

pytestmark = pytest.mark.h100_aot

LAYERS = 4
LLAMA = dataclasses.replace(llama.LLAMA3_70B, n_layers=LAYERS)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def mesh():
    return deepcompile.targets.h100(nodes=4).make_mesh((32,), ("fsdp",))


def linen_step(model, loss_of, tokens: int):
    def create(key):
        params = model.init(key, jnp.zeros((1, 16), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=OPTIMIZER)

    @deepcompile.shard(mesh(), passes=())
    def step(state, batch):
        def loss(params):
            return loss_of(state.apply_fn({"params": params}, batch[:, :-1]), batch[:, 1:])

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    batch = jax.ShapeDtypeStruct((32, tokens + 1), jnp.int32)
    return step.trace(jax.eval_shape(create, jax.random.key(0)), batch)


def mixtral_step(tokens: int):
    config = dataclasses.replace(mixtral.MIXTRAL_8X7B, n_layers=2)

    def create():
        model = mixtral.Mixtral(config, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    def step(model, optimizer, batch):
        def loss(model, batch):
            return mixtral.next_token_loss(model(batch[:, :-1])[0], batch[:, 1:])

        value, grads = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, grads)
        return value

    batch = jax.ShapeDtypeStruct((32, tokens + 1), jnp.int32)
    return deepcompile.shard(step, mesh(), passes=()).trace(*nnx.eval_shape(create), batch)


@cache
def compiled(name: str, double_buffered: bool = False):
    """A compiled step: a Llama of 70B's widths, a GPT-2 without a scan, a Mixtral."""
    if name == "llama":
        traced = linen_step(llama.Llama(LLAMA), llama.next_token_loss, tokens=1024)
    elif name == "gpt2":
        config = dataclasses.replace(gpt2.GPT2_SMALL, n_layers=2, dropout_rate=0.0, dtype=jnp.bfloat16)
        traced = linen_step(gpt2.GPT2(config), gpt2.next_token_loss, tokens=512)
    else:
        traced = mixtral_step(tokens=512)
    options = {"xla_gpu_enable_while_loop_double_buffering": True} if double_buffered else None
    return traced.lower().compile(options)


@cache
def simulated(name: str, double_buffered: bool = False, costs: CostModel | None = None) -> Simulation:
    return simulate(hlo.read(compiled(name, double_buffered).as_text()), costs or CostModel())


@pytest.mark.parametrize(
    ("name", "double_buffered"),
    [
        ("llama", True),
        ("gpt2", False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("llama", False), ("mixtral", False), ("mixtral", True))
        ),
    ],
)
def test_memory_is_what_xla_assigns(name: str, double_buffered: bool):
    xla = compiled(name, double_buffered).memory_analysis()
    use = memory_of(hlo.read(compiled(name, double_buffered).as_text()))
    assert use.argument_bytes == xla.argument_size_in_bytes
    assert use.output_bytes == xla.output_size_in_bytes - xla.alias_size_in_bytes
    assert use.temporary_bytes == pytest.approx(xla.temp_size_in_bytes, rel=0.001)
    assert use.live_peak_bytes <= use.peak_bytes


def test_gathers_and_reductions_are_those_of_the_program():
    layer = 2 * LLAMA.d_model * (LLAMA.n_heads + LLAMA.n_kv_heads) * LLAMA.head_dim + 3 * LLAMA.d_model * LLAMA.d_ff
    head, embeddings = LLAMA.vocab_size * LLAMA.d_model, 32 * 1024 * LLAMA.d_model
    run = simulated("llama")
    assert run.gathered_bytes == pytest.approx(2 * (2 * LAYERS * layer + head + embeddings), rel=0.01)
    assert 2 * LAYERS * layer < run.reduced_bytes < 4 * (LAYERS * layer + head + embeddings)


def test_a_step_takes_its_matrix_products_and_then_some():
    layer = 2 * LLAMA.d_model * (LLAMA.n_heads + LLAMA.n_kv_heads) * LLAMA.head_dim + 3 * LLAMA.d_model * LLAMA.d_ff
    head = LLAMA.vocab_size * LLAMA.d_model
    flops = 1024 * (8 * LAYERS * layer + 6 * head)
    run = simulated("llama")
    assert flops / (0.7 * 989.4e12) < run.compute_s < 2 * flops / (0.7 * 989.4e12)
    assert run.bound_s <= run.step_s
    assert run.step_s == pytest.approx(run.compute_s + run.exposed_communication_s)
    assert 0 < run.exposed_communication_s < run.communication_s
    assert run.copy_s == 0


def test_loops_are_the_layers():
    forward, backward = simulated("llama").loops
    assert forward.trip_count == LAYERS
    assert backward.trip_count in (LAYERS, LAYERS - 1)  # XLA may peel a trip to pipeline its reductions
    assert 2 < backward.trip.compute_s / forward.trip.compute_s < 4


def test_double_buffering_halves_the_trips():
    once, twice = simulated("llama").loops, simulated("llama", double_buffered=True).loops
    assert [loop.trip_count for loop in twice] == [loop.trip_count // 2 for loop in once]
    for one, two in zip(once, twice, strict=True):
        assert two.trip.compute_s == pytest.approx(2 * one.trip.compute_s, rel=0.1)
    assert simulated("llama", double_buffered=True).gathered_bytes == simulated("llama").gathered_bytes


def test_a_program_without_a_scan_has_no_loops():
    run = simulated("gpt2")
    assert run.loops == ()
    assert {event.trips for event in run.timeline} == {1}
    assert run.exposed_communication_s < run.communication_s


def test_one_network_card_exposes_more():
    slow = simulated("llama", costs=CostModel(network=Network(nics_per_node=1)))
    fast = simulated("llama")
    assert slow.compute_s == fast.compute_s
    assert slow.communication_s > 4 * fast.communication_s
    assert slow.step_s > fast.step_s


def test_events_say_where_they_come_from():
    kernels = [event for event in simulated("llama").timeline if event.stream is Stream.COMPUTE]
    heaviest = max(kernels, key=lambda event: event.trips * (event.end_s - event.start_s))
    assert "models/llama.py:" in heaviest.source
    assert heaviest.op_name.endswith("dot_general")


def test_copies_from_and_to_the_host_are_told_from_kernels():
    """A scan over weights that stay on the host and activations that go there."""
    placed, width, layers = mesh(), 4096, 6
    host = NamedSharding(placed.abstract_mesh, PartitionSpec(), memory_kind="pinned_host")
    device = NamedSharding(placed.abstract_mesh, PartitionSpec())

    def run(x, weights):
        def layer(x, weight):
            x = jnp.tanh(x @ jax.device_put(weight, jax.memory.Space.Device))
            return x, jax.device_put(x, jax.memory.Space.Host)

        return jax.lax.scan(layer, x, weights)

    x = jax.ShapeDtypeStruct((width, width), jnp.bfloat16, sharding=NamedSharding(placed, PartitionSpec()))
    weights = jax.ShapeDtypeStruct((layers, width, width), jnp.bfloat16, sharding=host)
    lowered = jax.jit(run, out_shardings=(device, host)).trace(x, weights).lower(lowering_platforms=("cuda",))
    executable = lowered.compile(compiler_options=compile_options("cuda"))
    found = simulate(hlo.read(executable.as_text()), CostModel())
    stack_s = layers * 2 * width**2 / 55e9
    assert found.copy_s == pytest.approx(2 * stack_s, rel=0.05)
    assert found.step_s == pytest.approx(found.compute_s + found.exposed_copy_s)
    assert {event.stream for event in found.timeline} == {Stream.COMPUTE, Stream.TO_HOST, Stream.FROM_HOST}
    xla = executable.memory_analysis()
    assert found.memory.host_bytes == xla.host_argument_size_in_bytes + xla.host_output_size_in_bytes
    assert found.memory.temporary_bytes == pytest.approx(xla.temp_size_in_bytes, rel=0.03)
