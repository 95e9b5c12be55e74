"""Reductions one after the other: the same bits, as many of them, in the order in which gradients are ready."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.lowering.compile import combiner_options
from jax_deepcompile.planner.candidate import Environment, evaluate
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.transforms.reduce_in_order import OrderedReductions, reduce_in_order, reduction_buckets
from jax_deepcompile.transforms.unshard import ReusedGathers, repeated_gathers
from models import llama
from tests.cases import examples
from tests.partition.steps import lines, shapes, training_step
from tests.transforms.programs import WIDTH, assert_same_work, sharded, stack_loss, stack_shapes
from tests.transforms.test_prefetch import CHAIN, LAYERS, UNROLLED, chain_loss, unrolled_loss
from tests.transforms.test_unshard import accumulating

MATRIX_BYTES = WIDTH * WIDTH * 4


def reductions(program) -> list[int]:
    eqns = open_jaxpr(program.jaxpr).eqns
    return [place for place, eqn in enumerate(eqns) if eqn.primitive.name == "reduce_scatter"]


def order(program) -> list[str]:
    return [line.split()[0] for line in lines(program, ("reduce_scatter", "dot_general", "optimization_barrier"))]


@pytest.fixture(scope="module")
def chain():
    program, _ = sharded(chain_loss, CHAIN)
    return program


@pytest.mark.pure
@given(st.integers(1, 6 * MATRIX_BYTES))
@examples(20)
def test_buckets_hold_every_reduction_once_in_order(chain, bucket_bytes):
    (loss,), *buckets = reduction_buckets(chain.jaxpr, bucket_bytes)
    assert open_jaxpr(chain.jaxpr).eqns[loss].primitive.name == "psum"
    assert [place for bucket in buckets for place in bucket] == reductions(chain)
    assert all(len(bucket) * MATRIX_BYTES >= bucket_bytes for bucket in buckets[:-1])
    assert all((len(bucket) - 1) * MATRIX_BYTES < bucket_bytes for bucket in buckets)


@pytest.mark.pure
def test_the_order_is_that_of_the_gradients_not_of_the_program():
    """The optimizer reads the first layer's gradient first; the last layer's is ready first."""

    def step(state, x):
        grads = jax.grad(chain_loss)(state, x)
        return {name: state[name] - 0.1 * jnp.tanh(grads[name] * 2) for name in sorted(state)}

    program = deepcompile.shard(step, {"fsdp": 8}).trace(shapes(CHAIN), shapes((16, WIDTH))).sharded
    eqns = open_jaxpr(program.jaxpr).eqns
    firsts = [eqns[place].invars[0] for bucket in reduction_buckets(program.jaxpr, 1) for place in bucket]
    made = [next(at for at, eqn in enumerate(eqns) if var in eqn.outvars) for var in firsts]
    assert len(made) == LAYERS
    assert made == sorted(made)


@pytest.mark.pure
def test_before_and_after(chain):
    layer, again = ["dot_general", "dot_general", "reduce_scatter"], ["optimization_barrier"]
    assert order(chain)[LAYERS:] == ["dot_general", "reduce_scatter", *layer, *again, *layer, *again, *layer]
    first = ["dot_general", "optimization_barrier", "reduce_scatter"]
    waits = [*layer[:2], "optimization_barrier", "reduce_scatter"]
    after = order(reduce_in_order(chain, MATRIX_BYTES))[LAYERS:]
    assert after == [*first, *waits, *again, *waits, *again, *waits]


@pytest.mark.pure
def test_one_bucket_waits_for_the_loss_alone(chain):
    waits = [line.split()[0] for line in lines(reduce_in_order(chain, 100 * MATRIX_BYTES), ("psum", "reduce_scatter"))]
    assert waits == ["psum", *LAYERS * ["reduce_scatter"]]
    step = deepcompile.shard(lambda params, x: jax.grad(chain_loss)(params, x), {"fsdp": 8})
    alone = step.trace(shapes(CHAIN), shapes((16, WIDTH))).sharded
    assert len(reductions(alone)) == LAYERS
    assert reduce_in_order(alone, 100 * MATRIX_BYTES) is alone


@pytest.mark.pure
def test_one_reduction_waits_for_the_loss():
    program, _ = sharded(lambda params, x: jnp.mean((x @ params["w"]) ** 2), {"w": (WIDTH, WIDTH)})
    (_loss,), *buckets = reduction_buckets(program.jaxpr, 1)
    assert buckets == [tuple(reductions(program))]


@pytest.mark.pure
@pytest.mark.parametrize("params", [CHAIN, {"layer0": (WIDTH, WIDTH)}], ids=["four", "one"])
def test_a_norm_of_the_gradients_is_summed_after_them(params):
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))

    def loss(params, x):
        for kernel in params.values():
            x = jnp.tanh(x @ kernel)
        return jnp.mean(x**2)

    program, _ = sharded(loss, params, optimizer=clipped)
    sums = [place for place, eqn in enumerate(open_jaxpr(program.jaxpr).eqns) if eqn.primitive.name == "psum"]
    (early, *_) = reduction_buckets(program.jaxpr, MATRIX_BYTES)
    assert len(sums) > len(early) == 1
    assert reduce_in_order(program, MATRIX_BYTES) is not program


@pytest.mark.pure
def test_reductions_in_loops_are_left():
    program, _ = sharded(stack_loss, {"stack": stack_shapes()})
    assert reduction_buckets(program.jaxpr, 1) == ()
    assert reduce_in_order(program, 1) is program


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("matrices", [1, 2, 3])
@pytest.mark.parametrize(
    ("loss", "params"), [(chain_loss, CHAIN), (unrolled_loss, UNROLLED)], ids=["residuals", "recomputed"]
)
def test_values_and_counts_stay_the_same(loss, params, matrices):
    program, mesh = sharded(loss, params)
    planned = reduce_in_order(program, matrices * MATRIX_BYTES)
    assert planned is not program
    assert_same_work(planned, program, mesh)


@pytest.mark.cpu_mesh
def test_microbatches_reduce_in_order_where_they_are_asked_to():
    program, mesh = accumulating(chain_loss, CHAIN)
    assert reduce_in_order(program, MATRIX_BYTES) is program
    assert reduce_in_order(program, 100 * MATRIX_BYTES, in_loops=True) is program
    planned = reduce_in_order(program, MATRIX_BYTES, in_loops=True)
    (before,), (after,) = (find_loops(each) for each in (program, planned))
    waits = [
        sum(eqn.primitive.name == "optimization_barrier" for eqn in open_jaxpr(loop.eqn.params["jaxpr"]).eqns)
        for loop in (before, after)
    ]
    assert waits[1] - waits[0] == LAYERS - 1
    assert_same_work(planned, program, mesh)


@pytest.fixture(scope="module")
def unrolled():
    """Six layers of Llama-3-8B on 32 H100s, nothing gathered again: as they are, and reduced in order."""
    mesh = deepcompile.targets.h100(nodes=4).make_mesh((32,), ("fsdp",))
    small = dataclasses.replace(llama.LLAMA3_8B, n_layers=6, vocab_size=32_768)
    model = llama.Llama(dataclasses.replace(small, scan_layers=False, remat_policy=None))

    def loss(params, tokens):
        return jnp.mean(jax.nn.logsumexp(model.apply(params, tokens).astype(jnp.float32), axis=-1))

    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1024), jnp.int32))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    tokens = jax.ShapeDtypeStruct((32, 1024), jnp.int32)
    program = deepcompile.shard(training_step(loss, optimizer), mesh, passes=()).trace(state, tokens).sharded
    environment = Environment(mesh, "cuda", CostModel(), None)
    kept = ReusedGathers(tuple(repeated_gathers(program)))
    plain = Plan("0", (kept,)).replace(options=combiner_options(512 << 20, 16 << 20))
    both = (plain, plain.having(OrderedReductions, [OrderedReductions(128 << 20)]))
    return [evaluate(program, each, environment) for each in both]


@pytest.mark.h100_aot
def test_backward_goes_on_while_gradients_are_reduced(unrolled):
    base, in_order = unrolled
    assert in_order.prediction.exposed_s < 0.9 * base.prediction.exposed_s
    assert in_order.simulation.reduced_bytes == pytest.approx(base.simulation.reduced_bytes, abs=1024)  # bar scalars
    assert in_order.prediction.peak_bytes <= 1.05 * base.prediction.peak_bytes
    reductions = [event for event in in_order.simulation.timeline if event.kind == "reduce-scatter"]
    large = [event for event in reductions if event.sent_bytes > 1 << 24]
    computed = [event for event in in_order.simulation.timeline if "transpose(jvp" in event.op_name]
    last_s = max(event.end_s for event in computed)
    assert sum(event.end_s < last_s for event in large) > len(large) / 2
