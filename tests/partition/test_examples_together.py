"""Examples that are needed all together, to be joined or sorted, are divided otherwise for that, and not gathered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_deepcompile as deepcompile
from tests.cases import examples
from tests.equality.harness import MESHES, assert_close
from tests.partition.steps import BATCH, MLP, descend, lines, mlp, moves, shapes

B = 32

TOGETHER = {
    "interleaved": lambda x: jnp.stack([x, -x], 1).reshape(2 * B, -1),
    "halves": lambda x: jnp.concatenate(jnp.split(x, 2)[::-1]),
    "turned": lambda x: x[::-1],
    "rolled": lambda x: jnp.roll(x, 3, axis=0),
    "sorted": lambda x: jnp.sort(x, axis=0),
    "running": lambda x: jnp.cumsum(x, axis=0) / B,
}


def step_of(together):
    def step(p, batch):
        def loss(p):
            x = together(batch["x"])
            y = jnp.concatenate([batch["y"]] * (x.shape[0] // B))
            return mlp(p, {"x": x, "y": y})

        value, gradients = jax.value_and_grad(loss)(p)
        return descend(p, gradients), value

    return step


def traced(together, mesh=MESHES["8"]):
    return deepcompile.shard(step_of(together), mesh).trace(shapes(MLP), shapes(BATCH))


@pytest.mark.pure
class TestWhatMoves:
    def test_golden(self):
        exchanged = [move for move in moves(traced(TOGETHER["sorted"])) if "all_to_all" in move]
        there, back = "all_to_all fsdp: f32[4,16] -> f32[32,2]", "all_to_all fsdp: f32[32,2] -> f32[4,16]"
        assert exchanged == [there, back]

    @pytest.mark.parametrize("name", TOGETHER)
    def test_no_device_has_all_examples(self, name):
        found = traced(TOGETHER[name])
        assert not [move for move in moves(found) if "all_gather" in move and ("[32,16]" in move or "[64,16]" in move)]
        assert all("f32[4,16]" in line or "f32[8,16]" in line for line in lines(found.sharded, ("tanh",)))

    def test_what_no_other_dimension_divides_is_gathered(self):
        """Seven columns on eight devices."""

        def step(p, batch):
            def loss(p):
                x = jnp.sort(batch["x"][:, :7], axis=0)
                return jnp.mean((x @ p["w0"][:7]) ** 2)

            return descend(p, jax.grad(loss)(p)), loss(p)

        found = moves(deepcompile.shard(step, MESHES["8"]).trace(shapes(MLP), shapes(BATCH)))
        assert [move for move in found if move == "all_gather fsdp: f32[4,7] -> f32[32,7]"]

    def test_numbers_of_examples_are_gathered(self):
        """One for each has no other dimension."""

        def step(p, batch):
            def loss(p):
                return jnp.mean(jnp.sort(jnp.tanh(batch["x"] @ p["w0"]).sum(1)) * jnp.arange(B))

            return descend(p, jax.grad(loss)(p)), loss(p)

        found = moves(deepcompile.shard(step, MESHES["8"]).trace(shapes(MLP), shapes(BATCH)))
        assert not [move for move in found if "all_to_all" in move]

    def test_in_loops_too(self):
        def step(p, batch):
            def loss(p):
                x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(jnp.flip(x, 0) @ p["w0"]), None), batch["x"], None, length=3)
                return jnp.mean(x**2)

            return descend(p, jax.grad(loss)(p)), loss(p)

        found = moves(deepcompile.shard(step, MESHES["8"]).trace(shapes(MLP), shapes(BATCH)))
        assert not [move for move in found if "all_gather" in move and "[32,16]" in move]


@pytest.mark.cpu_mesh
@examples(16)
@given(
    st.lists(st.sampled_from(sorted(TOGETHER)), min_size=1, max_size=3),
    st.sampled_from(sorted(MESHES)),
    st.sampled_from([7, 8, 16]),
)
def test_values_are_those_of_one_device(names, mesh, width):
    def together(x):
        for name in names:
            x = TOGETHER[name](x[:B])
        return x

    rng = np.random.default_rng(width)
    p = {name: rng.standard_normal((width, width), np.float32) / 4 for name in MLP}
    batch = {name: rng.standard_normal((B, width), np.float32) for name in BATCH}
    step = step_of(together)
    expected = jax.jit(step)(p, batch)
    assert_close(deepcompile.shard(step, MESHES[mesh])(p, batch), expected, 1e-5, "step")
