"""Gradient accumulation: what the loop holds, what stays outside, and what cannot be divided into microbatches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from jax_deepcompile.analysis.microbatches import choose_rounds
from jax_deepcompile.partition.partition import partition_step
from jax_deepcompile.transforms.microbatch import accumulate
from tests.partition.steps import FLAT, HYBRID, lines, moves, shapes, training_step

pytestmark = pytest.mark.pure

PARAMS = {"up": (16, 32), "bias": (32,), "down": (32, 8)}
BATCH = {"x": (32, 16), "y": (32, 8), "mask": (32,)}
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def errors_of_examples(params, batch):
    hidden = jnp.tanh(batch["x"].astype(params["up"].dtype) @ params["up"] + params["bias"])
    return jnp.square(hidden @ params["down"] - batch["y"]).sum(axis=-1)


def mean_loss(params, batch):
    return errors_of_examples(params, batch).mean()


def masked_loss(params, batch):
    return (errors_of_examples(params, batch) * batch["mask"]).sum() / batch["mask"].sum()


def half_precision_loss(params, batch):
    return mean_loss(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), batch)


def trace(loss, mesh=FLAT, microbatches=4, optimizer=OPTIMIZER, params=PARAMS, batch=BATCH):
    params = shapes(params)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    step = deepcompile.shard(training_step(loss, optimizer), mesh, microbatches=microbatches)
    return step.trace(state, shapes(batch))


def refused(loss, **kwargs) -> str:
    with pytest.raises(errors.WholeBatchNeededError) as caught:
        trace(loss, **kwargs)
    return str(caught.value)


def split_at_loops(traced) -> list[list[str]]:
    """The collectives before the first loop, in it, between it and the second, and so on."""
    parts: list[list[str]] = [[]]
    for line in moves(traced):
        inside = line.startswith(("  ", "scan"))
        if inside != (len(parts) % 2 == 0):
            parts.append([])
        parts[-1].append(line.strip())
    return parts


def carried(traced) -> list[str]:
    """What the last loop adds up, smallest first."""
    *_, loop = (eqn for eqn in traced.sharded.jaxpr.eqns if eqn.primitive.name == "scan")
    return sorted((var.aval.str_short(short_dtypes=True) for var in loop.outvars), key=lambda text: (len(text), text))


def test_a_product_before_and_after():
    def step(state, x):
        loss, gradient = jax.value_and_grad(lambda w: (x @ w).sum())(state)
        return state - gradient, loss

    sharded = deepcompile.shard(step, FLAT, microbatches=2)
    traced = sharded.trace(*shapes(((8, 4), (16, 8))))
    before = partition_step(traced.program, sharded.mesh, ("fsdp",), ("fsdp",), 2).program
    after = accumulate(before, sharded.mesh)
    counting = {"mul", "lt", "select_n"}
    assert [line for line in lines(before) if line.split()[0] not in counting] == [
        "axis_index  -> i32[]",
        "add i32[] i32[] -> i32[]",
        "add i32[] i32[] -> i32[]",
        "dynamic_slice f32[2,8] i32[] i32[] -> f32[1,8]",
        "all_gather fsdp: f32[1,4] -> f32[8,4]",
        "dot_general f32[1,8] f32[8,4] -> f32[1,4]",
        "reduce_sum f32[1,4] -> f32[]",
        "broadcast_in_dim f32[] -> f32[1,4]",
        "dot_general f32[1,4] f32[1,8] -> f32[4,8]",
        "transpose f32[4,8] -> f32[8,4]",
        "reduce_scatter fsdp: f32[8,4] -> f32[1,4]",
        "psum microbatch: f32[1,4] -> f32[1,4]",
        "sub f32[1,4] f32[1,4] -> f32[1,4]",
        "psum fsdp,microbatch: f32[] -> f32[]",
    ]
    assert [line for line in lines(after) if line.split()[0] not in counting] == [
        "iota  -> i32[2]",
        "broadcast_in_dim f32[] -> f32[1,4]",
        "scan 2",
        "  add i32[] i32[] -> i32[]",
        "  add i32[] i32[] -> i32[]",
        "  dynamic_slice f32[2,8] i32[] i32[] -> f32[1,8]",
        "  all_gather fsdp: f32[1,4] -> f32[8,4]",
        "  dot_general f32[1,8] f32[8,4] -> f32[1,4]",
        "  reduce_sum f32[1,4] -> f32[]",
        "  broadcast_in_dim f32[] -> f32[1,4]",
        "  dot_general f32[1,4] f32[1,8] -> f32[4,8]",
        "  transpose f32[4,8] -> f32[8,4]",
        "  reduce_scatter fsdp: f32[8,4] -> f32[1,4]",
        "  add f32[1,4] f32[1,4] -> f32[1,4]",
        "  add f32[] f32[] -> f32[]",
        "psum fsdp: f32[] -> f32[]",
        "sub f32[1,4] f32[1,4] -> f32[1,4]",
    ]


def test_without_microbatches_nothing_changes():
    traced = trace(mean_loss, microbatches=1)
    assert accumulate(traced.sharded, None) is traced.sharded  # type: ignore[arg-type]
    assert "gradient accumulation" not in traced.explain()


def test_gradients_are_scattered_in_the_loop_and_added_up_as_shards():
    before, inside, after = split_at_loops(trace(mean_loss))
    assert before == []
    assert sorted(line.split()[0] for line in inside) == ["all_gather"] * 3 + ["reduce_scatter"] * 3 + ["scan"]
    assert after == ["psum fsdp: f32[] -> f32[]"]


def test_gradients_are_summed_over_replicas_once_after_the_loop():
    _, inside, after = split_at_loops(trace(mean_loss, HYBRID))
    assert not any(line.startswith("psum") for line in inside)
    assert sorted(after) == [
        "psum data,fsdp: f32[] -> f32[]",
        "psum data: f32[4,32] -> f32[4,32]",
        "psum data: f32[8,8] -> f32[8,8]",
        "psum data: f32[8] -> f32[8]",
    ]


def test_what_the_whole_batch_must_tell_in_advance_gets_a_short_loop():
    traced = trace(masked_loss)
    text = lines(traced.sharded)
    first, second = (index for index, line in enumerate(text) if line == "scan 4")
    short = [line.split()[0] for line in text[first + 1 : second] if line.startswith("  ")]
    assert set(short) <= {"add", "mul", "lt", "select_n", "dynamic_slice", "reduce_sum"}
    assert text[second - 1 :][0].split()[0] != "psum"
    assert "psum fsdp: f32[] -> f32[]" in text[first:second]


def test_half_precision_gradients_are_added_in_32_bits():
    traced = trace(half_precision_loss)
    scattered = [line for line in moves(traced) if "reduce_scatter" in line]
    assert len(scattered) == 3
    assert all(": bf16" in line for line in scattered)
    assert carried(traced) == ["f32[]", "f32[4]", "f32[4,8]", "f32[2,32]"]


def test_half_precision_state_is_added_in_32_bits_too():
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in PARAMS.items()}
    traced = trace(mean_loss, params=params, optimizer=optax.sgd(0.1))
    assert carried(traced) == ["f32[]", "f32[4]", "f32[4,8]", "f32[2,32]"]
    assert "convert_element_type f32[4,8] -> bf16[4,8]" in lines(traced.sharded)


def test_every_gradient_is_carried_once_whoever_reads_it():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    assert carried(trace(mean_loss, optimizer=optimizer)) == ["f32[]", "f32[4]", "f32[4,8]", "f32[2,32]"]


@pytest.mark.parametrize("mesh", [FLAT, HYBRID])
def test_gradients_that_nobody_shards_are_whole_before_they_are_clipped(mesh):
    """Left unsummed until the parameter is updated, they would be kept for all microbatches: the norm comes later."""

    def loss(params, batch):
        logits = batch["x"] @ params["kernel"] + params["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), OPTIMIZER)
    batch = {"x": (16, 24), "label": jax.ShapeDtypeStruct((16,), jnp.int32)}
    traced = trace(loss, mesh, 2, optimizer, {"kernel": (24, 67), "bias": (67,)}, batch)
    assert [line for line in lines(traced.sharded) if line == "scan 2"] == ["scan 2"]
    assert "f32[67]" in carried(traced)


def test_what_does_not_depend_on_the_microbatch_is_computed_once():
    def loss(params, batch):
        scale = jnp.exp(params["bias"]).sum()
        return scale * mean_loss(params, batch)

    text = lines(trace(loss).sharded)
    assert [line.startswith("  ") for line in text if line.split()[0] == "exp"] == [False]


def test_metrics_of_single_examples_are_put_side_by_side():
    def step(state, batch):
        values = errors_of_examples(state, batch)
        return state, (values, values.max())

    text = moves(deepcompile.shard(step, FLAT, microbatches=4).trace(shapes(PARAMS), shapes(BATCH)))
    assert "all_gather fsdp: f32[4] -> f32[32]" in text
    assert "pmax fsdp: f32[] -> f32[]" in text


def test_explain_tells_of_a_loop_without_sums():
    """Minibatches that the step takes out of its batch itself, an update each, are not worked on in parts."""

    def step(state, batch):
        for part in range(2):
            halves = jax.tree.map(lambda leaf, part=part: leaf.reshape(2, -1, *leaf.shape[1:])[part], batch)
            gradients = jax.grad(mean_loss)(state, halves)
            state = jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, state, gradients)
        return state

    traced = deepcompile.shard(step, FLAT, microbatches=2, passes=()).trace(shapes(PARAMS), shapes(BATCH))
    assert "nothing is summed over the loop, so no gradient is accumulated" in traced.explain()


def test_explain_tells_of_the_loop():
    text = trace(mean_loss).explain()
    assert "gradient accumulation: 4 microbatches of 1 example a device; 4 sums over the loop" in text
    assert "reduce_scatter over fsdp: 12 a step" in text
    assert "2 microbatches of 2 examples a device" in trace(mean_loss, microbatches=2).explain()


@pytest.mark.parametrize("count", [0, -2, 1.0, "4", True])
def test_the_number_of_microbatches_is_checked(count):
    with pytest.raises(errors.MicrobatchCountError, match="must be a positive whole number") as caught:
        deepcompile.shard(lambda state, batch: state, FLAT, microbatches=count)
    assert f"microbatches is {count!r}" in str(caught.value)


def test_examples_must_divide():
    with pytest.raises(errors.MicrobatchNotDivisibleError) as caught:
        trace(mean_loss, microbatches=3)
    assert str(caught.value) == (
        "batch leaf batch['mask'] has shape (32,): each of 8 devices holds 4 of its 32 examples, and 4 do not divide "
        "into 3 microbatches. Use microbatches=1, 2, 4, or a batch of 48 examples. If it holds no examples, make it an "
        "argument of its own, which is replicated, or name the arguments that do: shard(..., batch_argnums=...), "
        "() for none."
    )


def test_normalising_over_the_batch_is_refused():
    def loss(params, batch):
        hidden = batch["x"] @ params["up"]
        centre = hidden.mean(axis=0)  # here
        return ((hidden - centre) @ params["down"]).sum()

    text = refused(loss)
    line = loss.__code__.co_firstlineno + 2
    assert f"test_microbatch.py:{line} (" in text
    assert text.startswith("reduce_sum at ")
    assert (
        "with microbatches=4 only a part of it is there at a time: the step goes on with the result, and dot_general"
        in text
    )
    assert "LayerNorm or GroupNorm" in text
    assert "use microbatches=1" in text


def test_a_loss_that_weighs_its_own_gradient_is_refused():
    def loss(params, batch):
        return jnp.sqrt(mean_loss(params, batch))

    wide = {"x": (256, 16), "y": (256, 8), "mask": (256,)}
    params = {"up": (16, 256), "bias": (256,), "down": (256, 8)}
    assert refused(loss, params=params, batch=wide).startswith("reduce_sum at ")


def test_centring_the_batch_itself_is_a_short_loop():
    def loss(params, batch):
        centred = batch["x"] - batch["x"].mean(axis=0)
        return mean_loss(params, batch | {"x": centred})

    assert [line for line in lines(trace(loss).sharded) if line == "scan 4"] == ["scan 4"] * 2


def test_a_deviation_is_found_from_the_losses_kept_of_every_example():
    def step(state, batch):
        return state, jnp.std(errors_of_examples(state, batch))

    text = lines(deepcompile.shard(step, FLAT, microbatches=4).trace(shapes(PARAMS), shapes(BATCH)).sharded)
    first, second = (index for index, line in enumerate(text) if line == "scan 4")
    assert sum("dot_general" in line for line in text[first:second]) == 2
    assert not any("dot_general" in line or "dynamic_slice" in line for line in text[second:])


def test_totals_of_totals_and_of_parameters_that_were_gathered_again():
    """Without end, once: what a total reads was replaced, and the total no longer recognised."""

    def program(w, x):
        mine = lax.dynamic_index_in_dim(x, lax.axis_index("microbatch"), keepdims=False)
        again, _ = lax.optimization_barrier((w, mine))
        total = lax.psum(mine * again, "microbatch")
        first = jnp.where(lax.axis_index("microbatch") == 0, w, 0)
        return lax.psum(first - total * again * mine, "microbatch")

    args = (jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((2, 3), jnp.float32))
    jaxpr = jax.make_jaxpr(program, axis_env=[("microbatch", 2)])(*args).jaxpr
    sums, last = choose_rounds(jaxpr, "microbatch", 2, kept_bytes=1 << 10).loops
    assert [total.how for total in (*sums.totals, *last.totals)] == ["psum", "psum"]
    assert last.totals[0].result is jaxpr.outvars[0]


def test_a_metric_takes_the_work_of_a_later_loop():
    """The critic's gradient is waited for; what the actor does is computed once, where the actor is trained."""

    def step(state, batch):
        gradient = jax.grad(lambda w: jnp.mean((jnp.tanh(batch["x"] @ w) - batch["x"]) ** 2))(state["critic"])
        critic = state["critic"] - 0.1 * gradient

        def actor_loss(actor):
            action = jnp.tanh(batch["x"] @ actor["in"]) @ actor["out"]
            return jnp.tanh(action @ critic).mean(), action.mean()

        (loss, action), gradients = jax.value_and_grad(actor_loss, has_aux=True)(state["actor"])
        actor = jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, state["actor"], gradients)
        return {"critic": critic, "actor": actor}, {"loss": loss, "action": action}

    state = shapes({"critic": (16, 16), "actor": {"in": (16, 256), "out": (256, 16)}})
    text = lines(deepcompile.shard(step, FLAT, microbatches=4).trace(state, shapes(BATCH)).sharded)
    first, second = (index for index, line in enumerate(text) if line == "scan 4")
    assert sum("dot_general" in line for line in text[first:second]) == 2
    assert sum("dot_general" in line for line in text[second:]) == 7


def test_what_is_heavy_and_counted_in_advance_does_not_take_the_loss_with_it():
    """How many are masked is found by sorting, which the loss needs too; but the loss needs the model more."""

    def loss(params, batch):
        scores = batch["x"] @ jnp.ones((16, 16))
        mask = scores <= jnp.sort(scores, axis=1)[:, 3:4] * batch["mask"][:, None]
        hidden = jnp.tanh(jnp.where(mask, 0, batch["x"]) @ params["up"]) @ params["down"]
        return (jnp.square(hidden - batch["y"]) * mask[:, :8]).sum() / mask.sum()

    text = lines(trace(loss).sharded)
    first, second = (index for index, line in enumerate(text) if line == "scan 4")
    assert not any("tanh" in line for line in text[first:second])
    assert any("tanh" in line for line in text[second:])


def test_statistics_of_which_none_needs_another_are_refused_with_their_line():
    """How many examples each class has is cheap, and known before the sums of what the model makes of them."""

    def step(state, batch):
        hidden = jnp.tanh(batch["x"] @ state["up"])
        kinds = (batch["mask"] > 0).astype(jnp.int32)
        counts = jax.ops.segment_sum(jnp.ones_like(batch["mask"]), kinds, 2)
        centres = jax.ops.segment_sum(hidden, kinds, 2) / counts[:, None]
        return state, {"spread": jnp.square(hidden - centres[kinds]).mean()}

    with pytest.raises(errors.WholeBatchNeededError, match=r"scatter-add at .*test_microbatch.py"):
        deepcompile.shard(step, FLAT, microbatches=4).trace(shapes(PARAMS), shapes(BATCH))


def test_rolling_over_the_batch_is_refused():
    def loss(params, batch):
        hidden = errors_of_examples(params, batch)
        return (hidden * jnp.roll(hidden, 1)).sum()

    text = refused(loss)
    assert "needs the whole batch in the middle of the step" in text
    assert f"test_microbatch.py:{loss.__code__.co_firstlineno + 2} (" in text


def test_two_views_of_an_example_may_stand_together():
    def loss(params, batch):
        both = jnp.stack([batch["x"], batch["x"] * 2], axis=1).reshape(-1, 16)
        found = (jnp.tanh(both @ params["up"]) @ params["down"]).reshape(-1, 2, 8)
        return jnp.square(found[:, 0] - found[:, 1]).mean()

    assert [line for line in lines(trace(loss).sharded) if line == "scan 4"] == ["scan 4"]


def test_a_statistic_inside_a_loop_of_layers_is_refused():
    def loss(params, batch):
        def layer(x, w):
            x = x @ w
            return x - x.mean(axis=0), None

        return jax.lax.scan(layer, batch, params)[0].sum()

    text = refused(loss, params=(3, 16, 16), batch=(32, 16))
    assert "a loop or branch, there or in what is called there, goes on with the result" in text
