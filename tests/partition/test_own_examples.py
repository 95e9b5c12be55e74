"""What a step draws, closes over or counts is divided by rows, as examples are, where what is made of it goes on so."""

from __future__ import annotations

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jax_deepcompile as deepcompile
from tests.partition.steps import ADAM, BATCH, FLAT, GATHER, HYBRID, MLP, SCATTER, D, descend, lines, mlp, moves, shapes


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z):
        x = nn.Dense(4 * 4 * 128)(z).reshape(-1, 4, 4, 128)
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.ConvTranspose(64, (4, 4), (2, 2))(x)))
        return jnp.tanh(nn.ConvTranspose(1, (4, 4), (2, 2))(x))


GENERATOR = Generator()

KEY = jax.eval_shape(lambda: jax.random.key(0))


def traced(step, *args, mesh: Mapping[str, int] = FLAT, **options):
    return deepcompile.shard(step, mesh, state_argnums=0, **options).trace(*args)


def products(traced) -> list[str]:
    return lines(traced.sharded, ("dot_general",))


def generates(rows: int):
    """The loss of images that are made of noise."""

    def loss(p, key):
        x = jax.random.normal(key, (rows, D))
        for name in sorted(p):
            x = jnp.tanh(x @ p[name])
        return jnp.mean(x**2)

    return loss


def generator(p, key):
    return descend(p, jax.grad(generates(64))(p, key)), 0.0


@pytest.mark.pure
class TestDivided:
    def test_noise_of_a_step_without_a_batch(self):
        found = traced(generator, shapes(MLP), KEY)
        assert products(found)[0] == "dot_general f32[8,16] f32[16,16] -> f32[8,16]"
        assert {line.split()[0] for line in moves(found)} == {"all_gather", "reduce_scatter"}

    def test_images_that_a_generator_makes_of_noise(self):
        def step(variables, key):
            def loss(p):
                z = jax.random.normal(key, (64, 64))
                images, more = GENERATOR.apply({**variables, "params": p}, z, mutable=["batch_stats"])
                return jnp.mean(images**2), more

            (_, more), g = jax.value_and_grad(loss, has_aux=True)(variables["params"])
            return {"params": descend(variables["params"], g), **more}, 0.0

        variables = jax.eval_shape(GENERATOR.init, jax.random.key(0), jnp.zeros((64, 64)))
        found = traced(step, variables, KEY)
        assert "f32[8,8,8,64]" in lines(found.sharded, ("conv_general_dilated",))[0].split("->")[1]
        assert "computed whole on every device: nothing that could be split" in str(found.explain())

    def test_noise_beside_a_batch_of_as_many(self):
        def step(p, batch, key):
            return descend(p, jax.grad(lambda p: generates(32)(p, key) + mlp(p, batch))(p)), 0.0

        found = traced(step, shapes(MLP), shapes(BATCH), KEY)
        assert all("f32[4,16]" in line for line in products(found))
        assert not any("all_to_all" in line for line in moves(found))

    def test_keys_that_examples_are_drawn_with(self):
        def step(p, key):
            def loss(p):
                keys = jax.random.split(key, 64)
                return jnp.mean(jnp.tanh(jax.vmap(lambda key: jax.random.normal(key, (D,)))(keys) @ p["w0"]) ** 2)

            return descend(p, jax.grad(loss)(p)), 0.0

        found = traced(step, shapes({"w0": (D, D)}), KEY)
        assert products(found)[0] == "dot_general f32[8,16] f32[16,16] -> f32[8,16]"

    def test_rows_of_a_table_that_are_drawn(self):
        def step(p, table, key):
            def loss(p):
                return jnp.mean((table[jax.random.randint(key, (64,), 0, 100)] @ p["w0"]) ** 2)

            return descend(p, jax.grad(loss)(p)), 0.0

        found = traced(step, shapes({"w0": (D, D)}), shapes((100, D)), KEY, batch_argnums=())
        assert products(found)[0] == "dot_general f32[8,16] f32[16,16] -> f32[8,16]"

    def test_in_microbatches_each_has_its_own(self):
        def step(p, batch, key):
            noisy = {**batch, "x": batch["x"] + jax.random.normal(key, (32, D))}
            return descend(p, jax.grad(mlp)(p, noisy)), 0.0

        found = traced(step, shapes(MLP), shapes(BATCH), KEY, microbatches=2)
        assert products(found)[:2] == ["scan 2", "  dot_general f32[2,16] f32[16,16] -> f32[2,16]"]

    @pytest.mark.parametrize("given", ["closed over", "counted"])
    def test_points_whose_residuals_have_second_derivatives(self, given):
        points = np.linspace(0, 1, 64, dtype=np.float32)

        def u(p, x):
            return jnp.sum(jnp.tanh(jnp.tanh(x * p["w0"]) @ p["w1"]))

        def step(p):
            def loss(p):
                xs = jnp.asarray(points) if given == "closed over" else jnp.linspace(0, 1, 64)
                return jnp.mean((jax.vmap(lambda x: jax.grad(jax.grad(u, 1), 1)(p, x))(xs) - xs) ** 2)

            return descend(p, jax.grad(loss)(p))

        found = traced(step, shapes({"w0": (D,), "w1": (D, D)}))
        assert not any("64," in line for line in products(found))

    @pytest.mark.parametrize("examples_first", [True, False])
    @pytest.mark.parametrize("of", ["trained", "closed over"])
    def test_what_every_example_begins_with(self, of, examples_first):
        """Queries that attend to one another before they see the example; features of a fixed graph."""
        fixed = np.ones((24, D), np.float32)

        def step(p, x):
            def loss(p):
                q = p["q"] if of == "trained" else fixed
                q = jnp.repeat(q[None], 32, 0) if examples_first else jnp.repeat(q[:, None], 32, 1).swapaxes(0, 1)
                q = jax.nn.softmax(jnp.tanh(q @ p["w0"]) @ q.swapaxes(1, 2)) @ (q @ p["w1"])
                return jnp.mean(jnp.einsum("bqd,bd->bq", q, x["x"] @ p["w2"]) ** 2)

            return descend(p, jax.grad(loss)(p)), 0.0

        found = traced(step, shapes(MLP | {"q": (24, D)}), shapes(BATCH))
        assert {line.split()[0] for line in moves(found)} == {"all_gather", "reduce_scatter"}
        assert not [line for line in products(found) if "[32," in line]

    def test_all_examples_that_it_closes_over(self):
        """Positions are counted too, and are for all examples alike."""
        tokens = np.zeros((64, 32), np.int32)

        def step(p):
            def loss(p):
                x = p["tokens"][tokens] + p["positions"][jnp.arange(32)]
                return jnp.mean(jnp.tanh(jnp.tanh(x @ p["w0"]) @ p["w1"]) ** 2)

            return descend(p, jax.grad(loss)(p))

        found = traced(step, shapes({"tokens": (80, D), "positions": (40, D), "w0": (D, D), "w1": (D, D)}))
        assert products(found)[0] == "dot_general f32[8,32,16] f32[16,16] -> f32[8,32,16]"
        assert not any(line.endswith("f32[64,32,16]") for line in moves(found))


@pytest.mark.pure
class TestAsItWas:
    def test_what_is_repeated_within_an_example_is_where_the_example_is(self):
        """As often as there are examples: pairs of those have both."""

        def step(p, x):
            def loss(p):
                z = jnp.tanh(x["x"] @ p["w0"])
                apart = jnp.broadcast_to(jnp.sum(z, 1)[:, None], (32, 32)) - jnp.sum(x["y"] @ p["w1"], 1)[None]
                return jnp.mean(jax.nn.logsumexp(apart, axis=1))

            return descend(p, jax.grad(loss)(p)), 0.0

        found = traced(step, shapes(MLP), shapes(BATCH))
        assert not any("all_to_all" in line for line in moves(found))
        assert all("[4," in line for line in lines(found.sharded, ("exp",)))

    def test_a_constant_for_weights_is_where_they_are(self):
        kept = np.tri(D, dtype=np.float32)

        def step(p, masked):
            return descend(p, jax.grad(lambda p: jnp.mean(jnp.tanh(p["w0"] * (kept if masked else 2.0)) ** 2))(p))

        found, plain = (
            moves(traced(lambda p, masked=masked: step(p, masked), shapes({"w0": (D, D)}))) for masked in (True, False)
        )
        assert found == plain

    def test_data_that_examples_are_drawn_from(self):
        data = np.zeros((96, D), np.float32)

        def step(p, key):
            def loss(p):
                return jnp.mean(jnp.tanh(jnp.asarray(data)[jax.random.randint(key, (64,), 0, 96)] @ p["w0"]) ** 2)

            return descend(p, jax.grad(loss)(p))

        found = traced(step, shapes({"w0": (D, D)}), KEY)
        assert products(found)[0] == "dot_general f32[8,16] f32[16,16] -> f32[8,16]"
        assert moves(found) == [GATHER, SCATTER]

    def test_noise_for_weights_is_where_they_are(self):
        def step(p, batch, key):
            def noisy(p):
                return mlp({name: w + jax.random.normal(key, w.shape) for name, w in p.items()}, batch)

            return descend(p, jax.grad(noisy)(p)), 0.0

        def plain(p, batch, key):
            return descend(p, jax.grad(mlp)(p, batch)), 0.0

        found = traced(step, shapes(MLP), shapes(BATCH), KEY)
        assert moves(found) == moves(traced(plain, shapes(MLP), shapes(BATCH), KEY))
        drawn = lines(found.sharded, ("erf_inv",))
        assert set(drawn) == {"erf_inv f32[2,16] -> f32[2,16]"}

    def test_what_is_drawn_for_all_examples_alike_is_drawn_whole(self):
        def step(p, batch, key):
            kept = jax.random.bernoulli(key, 0.5, (D,))
            return descend(p, jax.grad(mlp)(p, {**batch, "x": batch["x"] * kept})), 0.0

        found = traced(step, shapes(MLP), shapes(BATCH), KEY)
        assert not any("bool" in line for line in moves(found))
        assert "bool[16]" in "\n".join(lines(found.sharded, ("select_n", "convert_element_type", "lt")))

    def test_random_features_of_all_examples_are_drawn_whole(self):
        def step(p, batch, key):
            features = jax.random.normal(key, (64, D))

            def loss(p):
                return jnp.mean(jnp.cos(batch["x"] @ p["w0"] @ features.T) ** 2)

            return descend(p, jax.grad(loss)(p)), 0.0

        found = traced(step, shapes({"w0": (D, D)}), shapes(BATCH), KEY)
        assert moves(found) == [GATHER, SCATTER]

    def test_an_order_is_of_all(self):
        def step(p, batch, key):
            order = jax.random.permutation(key, 32)
            return descend(p, jax.grad(lambda p: jnp.sum(jnp.sin(p["w0"]) * order.mean()))(p)), batch["x"].mean()

        found = traced(step, shapes({"w0": (D, D)}), shapes(BATCH), KEY)
        assert not any("u32" in line or "s32" in line for line in moves(found))


@pytest.mark.parametrize("of_while", [False, True])
@pytest.mark.pure
def test_examples_stay_where_they_are_while_a_loop_trains(of_while):
    """Parameters, moments and the number of updates follow from the batch in a loop over loops of updates."""

    def update(state, _):
        loss, g = jax.value_and_grad(mlp)(state["p"], state["batch"])
        updates, opt_state = ADAM.update(g, state["o"], state["p"])
        return {**state, "p": optax.apply_updates(state["p"], updates), "o": opt_state}, loss

    def epoch(state, _):
        return lax.scan(update, state, None, length=3)

    def step(p, o, batch):
        state = {"p": p, "o": o, "batch": batch}
        if of_while:
            steps = batch["x"].astype(int)[0, 0]
            state = lax.while_loop(lambda c: c[1] < steps, lambda c: (epoch(c[0], None)[0], c[1] + 1), (state, 0))[0]
        else:
            state, _ = lax.scan(epoch, state, None, length=2)
        return state["p"], state["o"]

    p = shapes({"w0": (D, 4 * D), "w1": (4 * D, D)})
    found = moves(deepcompile.shard(step, FLAT).trace(p, jax.eval_shape(ADAM.init, p), shapes(BATCH)))
    kinds = {line.split()[0] for line in found if "32,16" not in line and "i32[" not in line}
    assert kinds == {"scan", "all_gather", "reduce_scatter", *(["while"] if of_while else [])}


def values(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.cpu_mesh
@settings(deadline=None, max_examples=10)
@given(
    rows=st.sampled_from([8, 12, 24, 32]),
    width=st.sampled_from([3, 8, 16]),
    mesh=st.sampled_from([FLAT, HYBRID, {"fsdp": 4}]),
    microbatches=st.sampled_from([1, 2]),
    of_keys=st.booleans(),
)
def test_drawn_numbers_are_those_of_one_device(rows, width, mesh, microbatches, of_keys):
    def step(p, batch, key):
        def loss(p):
            keys = jax.random.split(key, rows)
            drawn = jax.vmap(lambda key: jax.random.normal(key, (width,)))(keys) if of_keys else None
            z = jax.random.normal(key, (rows, width)) if drawn is None else drawn
            made = jnp.tanh(z @ p["a"]) @ p["b"]
            score = jnp.mean(jax.nn.softplus(made @ p["c"])) + jnp.mean((batch @ p["c"]) ** 2)
            return score + jnp.mean(jax.random.uniform(key, (width, 16)) * p["a"])

        def update(p, _):
            return descend(p, jax.grad(loss)(p)), loss(p)

        return lax.scan(update, p, None, length=2) if microbatches == 1 else update(p, None)

    keys = jax.random.split(jax.random.key(1), 4)
    p = {"a": (width, 16), "b": (16, width), "c": (width, 8)}
    p = {name: jax.random.normal(key, shape) / 4 for (name, shape), key in zip(p.items(), keys, strict=False)}
    args = jax.random.normal(keys[3], (32, width)), jax.random.key(5)
    expected = values(jax.jit(step)(p, *args))
    got = deepcompile.shard(step, mesh, state_argnums=0, batch_argnums=1, microbatches=microbatches)(p, *args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), values(got), expected)


@pytest.mark.cpu_mesh
@settings(deadline=None, max_examples=10)
@given(
    rows=st.sampled_from([8, 12, 24]),
    width=st.sampled_from([3, 8, 16]),
    mesh=st.sampled_from([FLAT, HYBRID, {"fsdp": 4}]),
    counted=st.booleans(),
    edges=st.sampled_from([None, 16, 40]),
)
def test_numbers_of_a_full_batch_are_those_of_one_device(rows, width, mesh, counted, edges):
    """As a graph's are: sums over edges, of which there are more than points."""
    random = np.random.default_rng(0)
    points = random.normal(size=(rows, width)).astype(np.float32)
    ends = random.integers(0, rows, (2, edges or 1))

    def step(p):
        def loss(p):
            x = jnp.sin(jnp.arange(rows)[:, None] * jnp.arange(width)) if counted else points
            made = jnp.tanh(x @ p["a"]) @ p["b"]
            if edges:
                made = jax.ops.segment_sum(made[ends[0]], ends[1], num_segments=rows)
            return jnp.mean((made @ p["c"] - jnp.arange(rows)[:, None]) ** 2)

        return descend(p, jax.grad(loss)(p)), loss(p)

    shapes = {"a": (width, 16), "b": (16, width), "c": (width, 8)}
    p = {name: random.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    expected = values(jax.jit(step)(p))
    got = deepcompile.shard(step, mesh, state_argnums=0)(p)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), values(got), expected)
