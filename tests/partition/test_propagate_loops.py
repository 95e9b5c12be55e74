"""Loops and branches: what is gathered before them, in them, and what never is."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from tests.partition.steps import (
    ADAM,
    BATCH,
    GATHER,
    MLP,
    SCATTER,
    SUM,
    D,
    descend,
    lines,
    mlp,
    moves,
    squares,
    trace,
    trace_training,
)

pytestmark = pytest.mark.pure

SERIES = {"x": (32, 6, D)}
RECURRENT = {"wx": (D, D), "wh": (D, D)}


class TestLayerLoops:
    def test_a_layer_is_gathered_when_its_turn_comes(self):
        def loss(p, batch):
            return squares(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], p["w"])[0], batch)

        traced = trace_training(loss, {"w": (8, D, D)}, BATCH, optimizer=ADAM)
        assert moves(traced) == ["scan 8", f"  {GATHER}", SUM, "scan 8", f"  {SCATTER}", f"  {GATHER}"]

    def test_a_checkpointed_layer_is_gathered_once_for_recomputation_and_gradient(self):
        def loss(p, batch):
            body = jax.checkpoint(lambda x, w: (jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]), None), prevent_cse=False)
            return squares(lax.scan(body, batch["x"], p)[0], batch)

        found = moves(trace_training(loss, {"a": (8, D, 2 * D), "b": (8, 2 * D, D)}, BATCH, optimizer=ADAM))
        gathers = ["  all_gather fsdp: f32[2,32] -> f32[16,32]", "  all_gather fsdp: f32[4,16] -> f32[32,16]"]
        backward = found.index("scan 8", 1)
        assert [line for line in found[:backward] if "gather" in line] == gathers
        assert sorted(line for line in found[backward:] if "gather" in line) == sorted(gathers)

    def test_a_loop_that_knows_nothing_of_the_batch_stays_sharded(self):
        def step(p, batch):
            new = descend(p, jax.grad(mlp)(p, batch))
            return lax.fori_loop(0, 3, lambda _, p: jax.tree.map(lambda w: w * 0.9 + 0.01 * jnp.sign(w), p), new)

        found = lines(trace(step, MLP, BATCH).sharded)
        loop = found.index("scan 3")
        assert not any("all_gather" in line or "[16,16]" in line for line in found[loop:])


def recurrent(p, batch, rerun=lambda cell: cell):
    @rerun
    def cell(h, x):
        h = jnp.tanh(x @ p["wx"] + h @ p["wh"])
        return h, h

    return jnp.mean(lax.scan(cell, jnp.zeros((32, D)), jnp.swapaxes(batch["x"], 0, 1))[1] ** 2)


class TestRecurrentLoops:
    def test_parameters_are_gathered_once_before_the_loop(self):
        found = moves(trace_training(recurrent, RECURRENT, SERIES, optimizer=ADAM))
        assert found[:2] == [GATHER, GATHER]
        assert not any("all_gather" in line for line in found[2:])

    @pytest.mark.parametrize("rerun", [lambda cell: cell, jax.checkpoint], ids=["once", "checkpoint"])
    def test_gradients_are_summed_once_after_the_loop(self, rerun):
        found = moves(trace_training(partial(recurrent, rerun=rerun), RECURRENT, SERIES, optimizer=ADAM))
        assert not any(line.startswith("  reduce_scatter") for line in found)
        assert sum(line.startswith("reduce_scatter") for line in found) == 2

    def test_layers_that_share_their_parameters_are_recurrent_too(self):
        def loss(p, batch):
            layer = jax.checkpoint(lambda x, _: (jnp.tanh(x @ p["wx"]) @ p["wh"], None))
            return jnp.mean(lax.scan(layer, batch["x"], None, length=4)[0] ** 2)

        found = moves(trace_training(loss, RECURRENT, BATCH, optimizer=ADAM))
        assert not any(line.startswith("  reduce_scatter") for line in found)

    @pytest.mark.parametrize("whole", [True, False], ids=["activations", "batch"])
    def test_chunks_of_activations_are_no_microbatches(self, whole):
        """A loss over chunks sums its gradients after the loop, accumulated steps in every iteration."""

        def chunked(p, x):
            @jax.checkpoint
            def chunk(x):
                return jnp.sum(jax.nn.logsumexp(x @ p["wh"], axis=-1))

            return lax.scan(lambda total, x: (total + chunk(x), None), 0.0, jnp.swapaxes(x, 0, 1))[0]

        def loss(p, batch):
            return chunked(p, jnp.tanh(batch["x"] @ p["wx"]) if whole else batch["x"])

        found = moves(trace_training(loss, RECURRENT, SERIES, optimizer=ADAM))
        assert any(line.startswith("  reduce_scatter") for line in found) != whole

    def test_steps_of_training_share_what_is_not_trained(self):
        """Which may be large, and is gathered in every step where that reads it twice."""

        def steps(p, batch):
            def loss(w, x):
                return jnp.mean((jax.checkpoint(lambda w, x: jnp.tanh(x @ p["wx"]) @ w)(w, x)) ** 2)

            def train(w, x):
                return w - 0.1 * jax.grad(loss)(w, x), None

            return {"wx": p["wx"], "wh": lax.scan(train, p["wh"], jnp.swapaxes(batch["x"], 0, 1))[0]}

        found = moves(trace(steps, RECURRENT, SERIES))
        assert f"  {GATHER}" in found


class TestExampleLoops:
    def test_each_device_maps_over_its_own_examples(self):
        def loss(p, batch):
            return jnp.mean(lax.map(lambda x: jnp.sum(jnp.tanh(p["w"] @ x) ** 2), batch["x"]))

        traced = trace_training(loss, {"w": (D, D)}, {"x": (32, D)}, optimizer=ADAM)
        assert moves(traced) == [GATHER, SUM, "reduce_scatter fsdp: f32[16,16] -> f32[2,16]"]
        assert [line for line in lines(traced.sharded) if line.startswith("scan")] == ["scan 4", "scan 4"]

    def test_a_loop_whose_iterations_depend_on_each_other_is_not_shared(self):
        def step(w, batch):
            return w, lax.scan(lambda c, x: (jnp.tanh(c * 0.5 + x), None), jnp.zeros(D), batch["x"])[0]

        assert any(line.startswith("scan 32") for line in lines(trace(step, (D, D), BATCH).sharded))


class TestMicrobatches:
    @staticmethod
    def accumulated(pieces: int):
        def step(p, batch):
            split = jax.tree.map(lambda v: v.reshape(pieces, -1, *v.shape[1:]), batch)

            def body(total, piece):
                return jax.tree.map(jnp.add, total, jax.grad(mlp)(p, piece)), None

            total, _ = lax.scan(body, jax.tree.map(jnp.zeros_like, p), split)
            return descend(p, total)

        return lines(trace(step, MLP, {"x": (128, D), "y": (128, D)}).sharded)

    @pytest.mark.parametrize("pieces", [2, 4, 8, 16])
    def test_accumulated_gradients_stay_sharded(self, pieces):
        found = self.accumulated(pieces)
        loop = found.index(f"scan {pieces}")
        body = [line.strip() for line in found[loop + 1 :] if line.startswith("  ")]
        assert body.count("add f32[2,16] f32[2,16] -> f32[2,16]") == 3
        assert not any(line.startswith("add") and "[16,16]" in line for line in body)

    @pytest.mark.parametrize("pieces", [2, 4, 8, 16])
    def test_every_device_works_on_a_part_of_every_piece(self, pieces):
        size = 128 // pieces // 8
        assert any(f"dot_general f32[{size},16] f32[16,16]" in line for line in self.accumulated(pieces))

    @pytest.mark.parametrize("pieces", [8, 16])
    def test_pieces_are_exchanged_where_there_is_one_for_each_device(self, pieces):
        found = self.accumulated(pieces)
        before = found[: found.index(f"scan {pieces}")]
        assert sum(line.startswith("all_to_all") for line in before) == 2
        assert not any(line.startswith("all_gather") for line in before)


class TestParametersOfWhile:
    """What is decoded until all have stopped reads all parameters, once for every token."""

    @staticmethod
    def decoded(layers: int):
        def step(p, batch):
            def body(carry):
                turn, h = carry
                for number in range(layers):
                    h = jnp.tanh(h @ p[f"w{number % 3}"])
                return turn + 1, h

            return lax.while_loop(lambda carry: (carry[0] < 9) & (jnp.max(carry[1]) > 0.1), body, (0, batch["x"]))[1]

        return moves(trace(step, MLP, BATCH))

    def test_are_gathered_once(self):
        found = self.decoded(3)
        assert found[:4] == [GATHER] * 3 + ["while"]
        assert f"  {GATHER}" not in found

    def test_are_gathered_in_every_iteration_if_they_are_for_several_uses(self):
        found = self.decoded(9)
        assert found[0] == "while"
        assert found.count(f"  {GATHER}") == 9


class TestPredicates:
    def test_of_while_are_the_same_everywhere(self):
        def step(p, batch):
            def going(carry):
                turn, gradient = carry
                return (turn < 5) & (sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)) > 1.0)

            def body(carry):
                return carry[0] + 1, jax.tree.map(lambda g: g * 0.5, carry[1])

            return descend(p, lax.while_loop(going, body, (0, jax.grad(mlp)(p, batch)))[1])

        found = moves(trace(step, MLP, BATCH))
        assert found[found.index("while") + 1 :] == [f"  {SUM}"]

    def test_of_cond_are_the_same_everywhere(self):
        def step(p, batch):
            loss, gradient = jax.value_and_grad(mlp)(p, batch)
            return lax.cond(loss < 1.0, descend, lambda p, _: p, p, gradient)

        found = lines(trace(step, MLP, BATCH).sharded)
        assert found.index(SUM) < found.index("cond")
        assert not any("all_gather" in line or "psum" in line for line in found[found.index("cond") :])

    def test_a_branch_taken_by_an_example_of_its_own_is_a_choice(self):
        def step(w, batch):
            return w * 0.9, jax.vmap(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x))(batch["x"]).mean()

        assert moves(trace(step, (D, D), BATCH)) == [SUM]

    def test_gradients_are_summed_as_they_are_made_although_a_branch_reads_them(self):
        """Held as partial sums until the branch they would take the room of the whole, unsharded model."""

        def step(p, batch):
            return lax.cond(batch["x"].mean() < 1.0, descend, lambda p, _: p, p, jax.grad(mlp)(p, batch))

        found = [line.split()[0] for line in lines(trace(step, MLP, BATCH).sharded)]
        assert "dot_general" in found[found.index("reduce_scatter") :]

    @pytest.mark.parametrize(
        "optimizer", [optax.MultiSteps(ADAM, 2).gradient_transformation(), optax.apply_if_finite(ADAM, 3)]
    )
    def test_the_same_inside_optimizers(self, optimizer):
        traced = trace_training(mlp, MLP, BATCH, optimizer=optimizer)
        found = [line.split()[0] for line in lines(traced.sharded)]
        assert "dot_general" in found[found.index("reduce_scatter") :]
