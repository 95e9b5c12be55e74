"""What the partitioner moves, and what it leaves where it is."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from jax_deepcompile.report.words import cut
from tests.partition.steps import (
    ADAM,
    BATCH,
    GATHER,
    HYBRID,
    MLP,
    SCATTER,
    SUM,
    D,
    count,
    descend,
    lines,
    mlp,
    moves,
    squares,
    trace,
    trace_training,
)

pytestmark = pytest.mark.pure


class TestPerceptron:
    def test_one_layer(self):
        """The whole local program of ``w -= 0.1 * grad(mean((x @ w - y) ** 2))``."""

        def step(w, batch):
            return w - 0.1 * jax.grad(lambda w: squares(batch["x"] @ w, batch))(w)

        assert lines(trace(step, (D, D), BATCH).sharded) == [
            "all_gather fsdp: f32[2,16] -> f32[16,16]",
            "dot_general f32[4,16] f32[16,16] -> f32[4,16]",
            "sub f32[4,16] f32[4,16] -> f32[4,16]",
            "mul f32[] f32[4,16] -> f32[4,16]",
            "div f32[] f32[] -> f32[]",
            "broadcast_in_dim f32[] -> f32[4,16]",
            "mul f32[4,16] f32[4,16] -> f32[4,16]",
            "dot_general f32[4,16] f32[4,16] -> f32[16,16]",
            "transpose f32[16,16] -> f32[16,16]",
            "reduce_scatter fsdp: f32[16,16] -> f32[2,16]",
            "mul f32[] f32[2,16] -> f32[2,16]",
            "sub f32[2,16] f32[2,16] -> f32[2,16]",
        ]

    def test_what_the_step_returns_whole_is_brought_together_at_the_end(self):
        """The loss and the backward pass read the part of a device, as if nothing else were asked of it."""

        def step(w, batch, returned=True):
            def loss_of(w):
                logits = batch["x"] @ w
                return squares(logits, batch), logits

            (loss, logits), gradient = jax.value_and_grad(loss_of, has_aux=True)(w)
            return w - 0.1 * gradient, loss, logits if returned else ()

        plain = lines(trace(functools.partial(step, returned=False), (D, D), BATCH).sharded)
        assert lines(trace(step, (D, D), BATCH).sharded) == [*plain, "all_gather fsdp: f32[4,16] -> f32[32,16]"]

    def test_what_is_scattered_in_one_piece_is_transposed_afterwards(self):
        """The leading dimension of ``w`` does not divide, so its gradient is scattered where that one leads."""

        def step(w, batch):
            return w - 0.1 * jax.grad(lambda w: jnp.mean((batch["x"][:, :6] @ w) ** 2))(w)

        found = lines(trace(step, (6, D), BATCH).sharded)
        scatter = found.index("reduce_scatter fsdp: f32[16,6] -> f32[2,6]")
        assert found[scatter + 1] == "transpose f32[2,6] -> f32[6,2]"

    def test_sums_that_others_want_as_they_are_are_scattered_once(self):
        """``u`` is read as it is and transposed: one scatter serves both."""

        def step(p, batch):
            u = jnp.einsum("bi,bj->ij", batch["x"], batch["x"])
            return {"a": p["a"] - u, "b": p["b"] - jnp.transpose(jnp.sin(u))}

        traced = trace(step, {"a": (D, D), "b": (D, D)}, BATCH)
        assert count(traced, "reduce_scatter") + count(traced, "psum") == 1

    def test_three_layers_with_adam(self):
        """The first layer needs no gradient of its input and the last is used again at once: one gather each."""
        traced = trace_training(mlp, MLP, BATCH, optimizer=ADAM)
        assert moves(traced) == [GATHER] * 3 + [SUM, SCATTER, SCATTER, GATHER, SCATTER]

    def test_gathering_again_waits_for_the_backward_pass(self):
        program = trace_training(mlp, MLP, BATCH, optimizer=ADAM).sharded
        found = lines(program)
        (barrier,) = (index for index, line in enumerate(found) if line.startswith("optimization_barrier"))
        assert found[barrier] == "optimization_barrier f32[2,16] f32[4,16] -> f32[2,16] f32[4,16]"
        assert found[barrier + 1] == GATHER
        assert found[:barrier].count(GATHER) == 3

    def test_the_optimizer_computes_on_shards(self):
        found = lines(trace_training(mlp, MLP, BATCH, optimizer=ADAM).sharded)
        last = max(index for index, line in enumerate(found) if line.startswith("reduce_scatter"))
        assert not any("f32[16,16]" in line for line in found[last + 1 :])
        assert sum(line.startswith("sqrt f32[2,16]") for line in found) == 3

    def test_casts_come_before_gathers(self):
        def loss(p, batch):
            x = batch["x"].astype(jnp.bfloat16)
            for name in sorted(p):
                x = jnp.tanh(x @ p[name].astype(jnp.bfloat16))
            return squares(x.astype(jnp.float32), batch)

        traced = trace_training(loss, MLP, BATCH, optimizer=ADAM)
        gather, scatter = (line.replace("f32", "bf16") for line in (GATHER, SCATTER))
        assert moves(traced) == [gather] * 3 + [SUM, scatter, scatter, gather, scatter]

    def test_hybrid_meshes_sum_shards_over_data(self):
        found = moves(trace_training(mlp, MLP, BATCH, HYBRID, ADAM))
        gather = "all_gather fsdp: f32[4,16] -> f32[16,16]"
        summed = ["reduce_scatter fsdp: f32[16,16] -> f32[4,16]", "psum data: f32[4,16] -> f32[4,16]"]
        assert found == [gather] * 3 + ["psum data,fsdp: f32[] -> f32[]", *summed * 2, gather, *summed]

    def test_clipping_by_the_global_norm_sums_one_number_more(self):
        clipped = optax.chain(optax.clip_by_global_norm(1.0), ADAM)
        plain, clipping = (moves(trace_training(mlp, MLP, BATCH, optimizer=optimizer)) for optimizer in (ADAM, clipped))
        assert clipping == [*plain, SUM]


class TestUses:
    def test_adjacent_uses_share_a_gather(self):
        traced = trace_training(lambda p, batch: squares(batch["x"] @ p["w"] @ p["w"], batch), {"w": (D, D)}, BATCH)
        assert (count(traced, "all_gather"), count(traced, "reduce_scatter")) == (1, 1)
        assert not any(line.startswith("optimization_barrier") for line in lines(traced.sharded))

    def test_uses_far_apart_do_not(self):
        def loss(p, batch):
            x = batch["x"] @ p["w"]
            for _ in range(2):
                x = jnp.tanh(x @ p["between0"]) @ p["between1"]
            return squares(x @ p["w"], batch)

        def step(p, batch):
            return p, loss(p, batch)

        params = {"w": (D, D), "between0": (D, 2 * D), "between1": (2 * D, D)}
        assert moves(trace(step, params, BATCH)).count(GATHER) == 2

    def test_kernels_of_convolutions_are_reversed_after_they_are_gathered(self):
        """So that backward gathers what forward does, and the last layer's copy serves both."""

        def loss(p, batch):
            x = batch["x"].reshape(-1, 8, 8, 3)
            for name in sorted(p):
                layout = ("NHWC", "HWIO", "NHWC")
                x = jnp.tanh(jax.lax.conv_general_dilated(x, p[name], (1, 1), "SAME", dimension_numbers=layout))
            return jnp.mean(x**2)

        kernels = {"a": (3, 3, 3, D), "b": (3, 3, D, D), "c": (3, 3, D, D)}
        traced = trace_training(loss, kernels, {"x": (32, 192)})
        assert lines(traced.sharded, ["all_gather", "rev"]) == [
            "all_gather fsdp: f32[3,3,3,2] -> f32[3,3,3,16]",
            "all_gather fsdp: f32[3,3,2,16] -> f32[3,3,16,16]",
            "all_gather fsdp: f32[3,3,2,16] -> f32[3,3,16,16]",
            "rev f32[3,3,16,16] -> f32[3,3,16,16]",
            "all_gather fsdp: f32[3,3,2,16] -> f32[3,3,16,16]",
            "rev f32[3,3,16,16] -> f32[3,3,16,16]",
        ]

    def test_parts_of_a_batch_that_are_no_multiple_of_the_devices_are_split_by_their_examples(self):
        """``(4, 16)`` of 64 examples for 8 devices: each part is split, no device works on all of it."""

        def step(w, batch):
            losses = []
            for part in batch["x"].reshape(4, -1, D):
                loss, gradient = jax.value_and_grad(lambda w, part=part: jnp.mean((part @ w) ** 2))(w)
                w = w - 0.1 * gradient
                losses.append(loss)
            return w, jnp.stack(losses)

        traced = trace(step, (D, D), {"x": (64, D)})
        products = lines(traced.sharded, ["dot_general"])
        assert products[0] == "dot_general f32[2,16] f32[16,16] -> f32[2,16]"
        assert len(products) == 8
        assert not any("f32[16,16] f32" in line or line.endswith("f32[16,16] f32[16,16]") for line in products)

    def test_products_that_are_cheaper_whole_are_named(self):
        """Of a sum that every device gets: to split its square, too, would be one more collective."""

        def step(w, batch):
            gram = w.T @ w
            return w - w @ (gram @ gram), None

        explained = trace(step, (D, D), BATCH).explain()
        assert "% of products outside of loops; split, it would move more" in explained
        assert "nothing that could be split" not in explained

    def test_of_many_lines_all_primitives_are_named(self):
        many = [f"  {name} at step.py:{line}" for line, name in enumerate(["sort"] * 7 + ["eig", "schur", "eig"])]
        assert cut(many, names=True) == [*many[:7], "  … and 3 more: eig, schur"]
        assert cut(many)[-1] == "  … and 3 more"
        assert cut(many[:8], names=True) == many[:8]

    def test_what_nobody_gathers_is_reversed_in_parts(self):
        traced = trace(lambda w, batch: (w - 0.1 * w[:, ::-1], batch["x"].mean()), (D, 9), BATCH)
        assert lines(traced.sharded, ["all_gather", "rev"]) == ["rev f32[2,9] -> f32[2,9]"]

    def test_tied_embeddings_scatter_one_gradient(self):
        def loss(p, batch):
            x = jnp.tanh(p["e"][batch["tokens"]] @ p["w"])
            return jnp.mean(jax.nn.logsumexp(x @ p["e"].T, axis=-1))

        tokens = jax.ShapeDtypeStruct((32, 4), jnp.int32)
        found = moves(trace_training(loss, {"e": (64, D), "w": (D, D)}, {"tokens": tokens}, optimizer=ADAM))
        assert found.count("reduce_scatter fsdp: f32[64,16] -> f32[8,16]") == 1
        assert sum(line.startswith("reduce_scatter") for line in found) == 2
        assert sum(line.startswith("all_gather") for line in found) == 2

    def test_what_only_the_optimizer_reads_is_never_gathered(self):
        def step(s, batch):
            gradient = jax.grad(lambda w: squares(batch["x"] @ w, batch))(s["w"])
            slow = 0.9 * s["slow"] + 0.1 * s["w"]
            return {"w": s["w"] - 0.1 * gradient, "slow": slow, "old": s["w"]}

        assert moves(trace(step, {"w": (D, D), "slow": (D, D), "old": (D, D)}, BATCH)) == [GATHER, SCATTER]

    def test_what_is_not_split_is_never_gathered(self):
        def loss(p, batch):
            return squares(batch["x"] * p["scale"] + p["shift"], batch)

        traced = trace_training(loss, {"scale": (1, 1), "shift": ()}, BATCH, optimizer=ADAM)
        assert count(traced, "all_gather") == 0
        assert count(traced, "reduce_scatter") == 0

    def test_frozen_parameters_have_no_gradient_to_scatter(self):
        def step(s, batch):
            gradient = jax.grad(lambda trained: mlp({**trained, **s["frozen"]}, batch))(s["trained"])
            return {"trained": descend(s["trained"], gradient), "frozen": s["frozen"]}

        traced = trace(step, {"trained": {"w0": (D, D), "w2": (D, D)}, "frozen": {"w1": (D, D)}}, BATCH)
        assert count(traced, "reduce_scatter") == 2

    def test_evaluation_scatters_nothing(self):
        traced = trace(lambda p, batch: (p, mlp(p, batch)), MLP, BATCH)
        assert moves(traced) == [GATHER] * 3 + [SUM]

    def test_metrics_are_summed_never_gathered(self):
        def step(w, batch):
            y = batch["x"]
            metrics = {"mean": y.mean(), "norm": jnp.sum(w**2), "worst": y.max(), "each": y.mean(axis=0)}
            return w * 0.9, metrics

        traced = trace(step, (D, D), BATCH)
        assert count(traced, "all_gather") == 0
        largest, undefined = "pmax fsdp: f32[] -> f32[]", "pmax fsdp: i32[] -> i32[]"
        assert sorted(moves(traced)) == [largest, undefined, "psum fsdp: f32[16] -> f32[16]", SUM, SUM]

    def test_a_result_for_each_example_comes_back_whole(self):
        traced = trace(lambda w, batch: (w * 0.9, batch["x"].sum(-1)), (D, D), BATCH)
        assert moves(traced) == ["all_gather fsdp: f32[4] -> f32[32]"]

    def test_activations_are_never_moved(self):
        found = lines(trace_training(mlp, MLP, BATCH, optimizer=ADAM).sharded)
        assert not any("f32[32,16]" in line for line in found)
