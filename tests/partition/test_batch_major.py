"""Examples that are put one after the other stay where they are, and what is computed of them is the same."""

from __future__ import annotations

import itertools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.extend import core as jex

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.traversal import equations, inline_calls
from jax_deepcompile.partition.batch_major import with_batch_major
from jax_deepcompile.partition.example_rows import ExampleRows, in_step_order, side_by_side
from jax_deepcompile.partition.rearranged_examples import rearranged
from tests.cases import examples
from tests.equality.harness import MESHES, assert_close
from tests.partition.steps import descend, lines, moves

B, T, D, LAYERS = 16, 8, 8, 3
KEY = jax.random.key(3)


def layer(w, h):
    h = h + jax.nn.softmax(jnp.einsum("bsd,btd->bst", h @ w["q"], h @ w["k"])) @ h
    h = h / jnp.linalg.norm(h, axis=-1, keepdims=True)
    return h + jax.nn.gelu(h.reshape(-1, D) @ w["u"]).reshape(h.shape)


def net(p, h, key=None, remat=True):
    def one(h, each):
        w, number = each
        h = layer(w, h)
        if key is not None:
            h = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, h.shape), h / 0.9, 0)
        return h, None

    return lax.scan(jax.checkpoint(one) if remat else one, h, (p, jnp.arange(LAYERS)))[0]


def views(p, x, y):
    a, b = jnp.split(net(p, jnp.concatenate([x, y])), 2)
    return jnp.mean((a - b + 1) ** 2)


def unrolled(p, x, y):
    h = jnp.concatenate([x, y])
    for number in range(LAYERS):
        h = layer(jax.tree.map(operator.itemgetter(number), p), h)
    return jnp.mean(h[:B] * h[B:])


def dropped(p, x, y):
    h = net(p, jnp.concatenate([x, y]), KEY)
    return jnp.mean(h[:B] * h[B:])


def masks_kept(p, x, y):
    """The masks of the forward pass are stacked for the backward one."""
    h = net(p, jnp.concatenate([x, y]), KEY, remat=False)
    return jnp.mean(h[:B] * h[B:])


def time_major(p, x, y):
    h = jnp.swapaxes(net(p, x), 0, 1).reshape(-1, D) @ p["u"][0]
    return jnp.mean((jax.nn.relu(h).reshape(T, B, D) - jnp.swapaxes(y, 0, 1)) ** 2)


def guided(p, x, y):
    """Classifier-free guidance."""
    a, b = jnp.split(net(p, jnp.tile(x, (2, 1, 1))), 2)
    return jnp.mean((a + 4 * (b - a) - y) ** 2)


def contrastive(p, x, y):
    h = net(p, jnp.concatenate([x, y])).mean(1)
    chances = jax.nn.log_softmax(h @ h.T - 1e9 * jnp.eye(2 * B))
    return -jnp.mean(jnp.take_along_axis(chances, ((jnp.arange(2 * B) + B) % (2 * B))[:, None], 1))


def recurrent(p, x, y):
    """Two views, [time, view, batch], with a state that begins with zeros."""

    def cell(c, inputs):
        c = jnp.tanh(c @ p["q"][0] + inputs @ p["k"][0])
        return c, c

    _, h = lax.scan(cell, jnp.zeros((2 * B, D)), jnp.swapaxes(jnp.concatenate([x, y]), 0, 1))
    a, b = jnp.split((h.reshape(-1, D) @ p["u"][0]).reshape(T, 2 * B, D), 2, axis=1)
    return jnp.mean((a - b) ** 2 + a)


def real_and_fake(p, x, y):
    fake = net(p, jax.random.normal(KEY, x.shape))
    labels = jnp.concatenate([jnp.ones((B, 1)), jnp.zeros((B, 1))])
    return jnp.mean((net(p, jnp.concatenate([x, fake])).mean((1, 2))[:, None] - labels) ** 2)


def crops(p, x, y):
    """DINO's: all go through the network, the first two are what the others are compared to."""
    h = net(p, jnp.concatenate([x, y, x + y, x - y])).mean(1)
    target, others = jax.nn.softmax(h[: 2 * B].reshape(2, B, D)), jax.nn.log_softmax(h.reshape(4, B, D))
    return -jnp.mean(jnp.einsum("ibd,jbd->ijb", lax.stop_gradient(target), others))


def convolved(p, x, y):
    h = jnp.concatenate([x, y])
    h = lax.conv_general_dilated(h, p["q"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID")
    return jnp.mean(h[:B] * h[B:])


def in_turn(p, x, y):
    """Joined and split in every iteration."""

    def one(pair, w):
        a, b = jnp.split(layer(w, jnp.concatenate(pair)), 2)
        return (b, a), a[:, 0]

    (a, b), first = lax.scan(one, (x, y), p)
    return jnp.mean(a * b) + jnp.mean(first**2)


def in_branches(p, x, y):
    h = lax.cond(jnp.sum(p["q"]) < 0, lambda h: h, lambda h: h * 2, jnp.concatenate([x, y]))
    (_, h) = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, lax.stop_gradient(h)))
    a, b = jnp.split(net(p, h), 2)
    return jnp.mean((a - b) ** 2)


def own_keys(p, x, y):
    noise = jax.vmap(lambda key: jax.random.normal(key, (T, D)))(jax.random.split(KEY, 2 * B))
    a, b = jnp.split(net(p, jnp.concatenate([x, y]) + noise), 2)
    return jnp.mean(a * b)


def flattened(p, x, y):
    h = jnp.concatenate([x.reshape(-1, D), y.reshape(-1, D)]) @ p["q"][0]
    return jnp.mean(jnp.prod(h.reshape(2, B, T, D), 0))


def added_again(p, x, y):
    h = jnp.concatenate([jnp.concatenate([x, y]), x * y])
    return jnp.mean(net(p, h)[B:] ** 2) + jnp.mean(h[:B] * h[2 * B :])


def split_with_nothing_left(p, x, y):
    a, b, none = jnp.split(net(p, jnp.concatenate([x, y])), [B, 2 * B])
    return jnp.mean(a * b) + jnp.sum(none)


STAYING = (
    views, unrolled, dropped, masks_kept, time_major, guided, recurrent, real_and_fake, crops, convolved, in_turn,
    in_branches, own_keys, flattened, added_again,
    split_with_nothing_left,
)  # fmt: skip


def normalized(p, x, y):
    """Statistics of all, and the largest of all."""
    h = jnp.concatenate([x, y])
    h = net(p, (h - h.mean((0, 1))) / jnp.sqrt(h.var((0, 1)) + 1e-5))
    return jnp.mean((h.mean(1) - jax.nn.one_hot(jnp.arange(2 * B) % D, D)) ** 2) + jnp.max(h)


def chosen(p, x, y):
    h = jnp.tanh(jnp.concatenate([x, y]) @ p["q"][0]).mean((1, 2))
    return h[jnp.argmax(h)] + lax.stop_gradient(jnp.argmax(h) * 1.0)


def in_another_order(p, x, y):
    h = jnp.concatenate([x, y])
    a, b = jnp.split(net(p, h)[jnp.argsort(h.sum((1, 2)))], 2)
    return jnp.mean((a - b) ** 2)


def running(p, x, y):
    h = jnp.cumsum(jnp.tanh(jnp.concatenate([x, y]) @ p["q"][0]), 0)
    return jnp.mean(h[:B] ** 2) + jnp.mean(h[B:])


def one_by_one(p, x, y):
    h = jnp.concatenate([x, y])
    _, h = lax.scan(lambda c, row: (c + row.mean(), jnp.tanh(row @ p["q"][0]) + c), 0.0, h)
    return jnp.mean(h[:B] * h[B:])


def flipped_in_a_branch(p, x, y):
    h = lax.cond(jnp.sum(p["q"]) > 0, lambda h: h, lambda h: jnp.flip(h, 0), jnp.concatenate([x, y]))
    return jnp.mean(net(p, h)[:B] ** 2)


def rolled_in_a_loop(p, x, y):
    h = jnp.concatenate([x, y])
    h = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["q"][i]) + jnp.roll(h, 1, 0), h)
    return jnp.mean(h[:B] * h[B:])


def of_other_lengths(p, x, y):
    h = jnp.tanh(jnp.concatenate([x, y[:4]]) @ p["q"][0])
    return jnp.mean(h[:B] ** 2) + jnp.mean(h[B:])


def beside_two_of_each(p, x, y):
    """Rows of an example that are together already meet some that are not."""
    h = jnp.tanh(jnp.concatenate([x, y]) @ p["q"][0]) * jnp.stack([x, y], 1).reshape(2 * B, T, D)
    return jnp.mean(h[:B] ** 2) + jnp.mean(h[B:])


def sorted_rows(p, x, y):
    h = jnp.sort(jnp.tanh(jnp.concatenate([x, y]) @ p["q"][0]), 0)
    return jnp.mean(h[:B] * h[B:])


def shuffled(p, x, y):
    rows = jnp.swapaxes(x, 0, 1).reshape(-1, D)[jax.random.permutation(KEY, T * B)]
    return jnp.mean(net(p, rows.reshape(B, T, D)) ** 2)


ELSEWHERE = (
    normalized, contrastive, chosen, in_another_order, running, one_by_one, flipped_in_a_branch, rolled_in_a_loop,
    of_other_lengths, beside_two_of_each, sorted_rows, shuffled,
)  # fmt: skip


def params(seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal((LAYERS, D, D), np.float32)) / 4 for name in "qku"}


def batch(seed: int = 1) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal((B, T, D), np.float32)) for name in "xy"}


def step_of(loss):
    def step(p, batch):
        value, gradients = jax.value_and_grad(loss)(p, batch["x"], batch["y"])
        return descend(p, gradients), value

    return step


@pytest.mark.pure
class TestWhatMoves:
    def test_golden(self):
        closed = jax.make_jaxpr(lambda x, y: jnp.tanh(jnp.concatenate([x, y]))[:4])(*[jnp.ones((4, 16))] * 2)
        after = inline_calls(with_batch_major(inline_calls(closed), [True, True]))
        assert lines(_Program(closed)) == [
            "concatenate f32[4,16] f32[4,16] -> f32[8,16]",
            "tanh f32[8,16] -> f32[8,16]",
            "slice f32[8,16] -> f32[4,16]",
        ]
        assert lines(_Program(after)) == [
            "reshape f32[4,16] -> f32[4,1,1,16]",
            "reshape f32[4,16] -> f32[4,1,1,16]",
            "concatenate f32[4,1,1,16] f32[4,1,1,16] -> f32[4,2,1,16]",
            "reshape f32[4,2,1,16] -> f32[8,16]",
            "tanh f32[8,16] -> f32[8,16]",
            "reshape f32[8,16] -> f32[4,2,1,16]",
            "slice f32[4,2,1,16] -> f32[4,1,1,16]",
            "reshape f32[4,1,1,16] -> f32[4,16]",
        ]

    @pytest.mark.parametrize("loss", STAYING)
    def test_no_example_leaves_its_device(self, loss):
        traced = deepcompile.shard(step_of(loss), MESHES["8"]).trace(params(), batch())
        assert not [move for move in moves(traced) if "all_to_all" in move]
        assert "activations moved between devices: none" in str(traced.explain())
        drawn = [
            eqn.outvars[0].aval.shape for eqn in equations(traced.sharded.jaxpr) if "threefry" in str(eqn.primitive)
        ]
        assert all(math.prod(shape) <= 2 * B * T * D // 8 for shape in drawn if len(shape) > 2)

    @pytest.mark.parametrize("loss", [normalized, contrastive])
    def test_small_results_that_all_meet_move_alone(self, loss):
        found = moves(deepcompile.shard(step_of(loss), MESHES["8"]).trace(params(), batch()))
        assert not [move for move in found if "all_to_all" in move]

    @pytest.mark.parametrize("loss", [running, sorted_rows, rolled_in_a_loop, shuffled, beside_two_of_each])
    def test_what_would_move_later_moves_at_once(self, loss):
        def flat(p, x, y):
            return inline_calls(jax.make_jaxpr(step_of(loss))(p, {"x": x, "y": y}))

        closed = flat(params(), **batch())
        assert with_batch_major(closed, [False] * 3 + [True] * 2) is closed

    def test_nothing_is_done_without_a_batch(self):
        closed = inline_calls(jax.make_jaxpr(step_of(views))(params(), batch()))
        assert with_batch_major(closed, [False] * 5) is closed


class _Program:
    def __init__(self, jaxpr) -> None:
        self.jaxpr = jaxpr


@pytest.mark.pure
@pytest.mark.parametrize("loss", [*STAYING, *ELSEWHERE])
def test_jaxprs_are_equal(loss):
    """Of the rewritten one, on one device, to the order of sums."""
    step = step_of(loss)
    closed = inline_calls(jax.make_jaxpr(step)(params(), batch()))
    changed = with_batch_major(closed, [False] * 3 + [True] * 2)
    jex.check_jaxpr(open_jaxpr(changed))
    made = jax.jit(jex.jaxpr_as_fun(changed))(*jax.tree.leaves((params(), batch())))
    for left, right in zip(made, jax.tree.leaves(jax.jit(step)(params(), batch())), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


@pytest.mark.cpu_mesh
@examples(12)
@given(st.sampled_from((*STAYING, *ELSEWHERE)), st.sampled_from(sorted(MESHES)), st.booleans())
def test_values_are_those_of_one_device(loss, mesh, several):
    step, options = step_of(loss), {"microbatches": 2} if several else {}
    expected = jax.jit(step)(params(), batch())
    try:
        made = deepcompile.shard(step, MESHES[mesh], **options)(params(), batch())
    except errors.WholeBatchNeededError:
        assert several
        assert loss in ELSEWHERE
        return
    except errors.BatchNotDivisibleError:
        assert B % math.prod(MESHES[mesh].values())
        return
    assert_close(made, expected, 1e-5, "step")


def factors() -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from([1, 2, 3]), max_size=3)


def merged(sizes: list[int], cuts: list[bool]) -> tuple[int, ...]:
    """Adjacent ``sizes`` as one wherever there is no cut."""
    ends = [place for place, cut in enumerate([*cuts[: len(sizes) - 1], True], 1) if cut]
    return tuple(math.prod(sizes[start:end]) for start, end in itertools.pairwise([0, *ends]))


@pytest.mark.pure
@examples(200)
@given(
    factors(),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3]),
    factors(),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_reshapes(ahead, copies, each, behind, cuts):
    """What holds examples, [..., copies * examples * each, ...], becomes any other shape of the same numbers."""
    count = 5
    shape = (*ahead, copies * count * each, *behind)
    new_shape = merged([*ahead, copies, count, each, *behind], cuts)
    rows, dim = ExampleRows(copies, count, each), len(ahead)
    x = jnp.arange(math.prod(shape)).reshape(shape)
    (eqn,) = jax.make_jaxpr(lambda x: lax.reshape(x, new_shape))(x).eqns or [None]
    if eqn is None:
        return
    change = rearranged(eqn, [{dim: rows}], [True])
    kept, results = change.operands[0], change.results[0]
    given = side_by_side(x, dim, rows) if kept else x
    made = given.reshape(new_shape) if change.compute is None else change.compute(given)
    for new_dim, new_rows in results.items():
        assert (new_shape[new_dim], count) == (new_rows.copies * new_rows.block, new_rows.examples)
        made = in_step_order(made, new_dim, new_rows)
    np.testing.assert_array_equal(made, x.reshape(new_shape))
    assert results or not kept
