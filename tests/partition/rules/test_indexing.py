"""Rules of gather, scatter and dynamic slices."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile.partition.rules.base import Kind
from tests.cases import examples
from tests.partition.rules.harness import check, integers, rules_of, seeds, sizes
from tests.partition.rules.ways import splittable

pytestmark = pytest.mark.cpu_mesh

Mode = lax.GatherScatterMode


@dataclass(frozen=True)
class Indexing:
    """A legal gather, or the scatter that is its mirror image."""

    operand: tuple[int, ...]
    indices: np.ndarray
    windowed: tuple[int, ...]
    slice_sizes: tuple[int, ...]
    offset_dims: tuple[int, ...]
    collapsed: tuple[int, ...]
    index_map: tuple[int, ...]
    operand_batching: tuple[int, ...]
    index_batching: tuple[int, ...]
    mode: lax.GatherScatterMode

    def gather(self, operand, indices, fill_value=None):
        numbers = lax.GatherDimensionNumbers(
            self.offset_dims, self.collapsed, self.index_map, self.operand_batching, self.index_batching
        )
        return lax.gather(operand, indices, numbers, self.slice_sizes, mode=self.mode, fill_value=fill_value)

    def scatter(self, apply, operand, indices, updates):
        numbers = lax.ScatterDimensionNumbers(
            self.offset_dims, self.collapsed, self.index_map, self.operand_batching, self.index_batching
        )
        return apply(operand, indices, updates, numbers, mode=self.mode)


@st.composite
def indexings(draw) -> Indexing:
    operand = tuple(draw(st.lists(sizes, min_size=1, max_size=3)))
    roles = [draw(st.sampled_from(("batching", "collapsed", "part", "full"))) for _ in operand]
    batching = tuple(dim for dim, role in enumerate(roles) if role == "batching")
    window = [dim for dim, role in enumerate(roles) if role in ("part", "full")]
    slices = tuple(
        size if role == "full" else draw(st.integers(1, size)) if role == "part" else 1
        for role, size in zip(roles, operand, strict=True)
    )
    indexed = [dim for dim, role in enumerate(roles) if role != "batching" and draw(st.booleans())]
    assume(indexed)  # without coordinates jaxlib 0.10 and 0.11 lose updates of scatters and crash on gathers
    index_map = tuple(draw(st.permutations(indexed)))
    own = draw(st.lists(sizes, max_size=2))
    order = draw(st.permutations(range(len(own) + len(batching))))
    batch_sizes = [*own, *(operand[dim] for dim in batching)]
    batch_shape = [batch_sizes[source] for source in order]
    rank = len(window) + len(batch_shape)
    offset_dims = tuple(sorted(draw(st.permutations(range(rank)))[: len(window)]))
    mode = draw(st.sampled_from((Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS)))
    random = np.random.default_rng(draw(seeds))
    margin = 0 if mode is Mode.PROMISE_IN_BOUNDS else 2
    starts = [random.integers(-margin, operand[dim] - slices[dim] + margin + 1, batch_shape) for dim in index_map]
    indices = np.stack(starts, axis=-1) if starts else np.zeros((*batch_shape, 0))
    return Indexing(
        operand,
        indices.astype(np.int32),
        tuple(slices[dim] for dim in window),
        slices,
        offset_dims,
        tuple(dim for dim, role in enumerate(roles) if role == "collapsed"),
        index_map,
        batching,
        tuple(order.index(len(own) + position) for position in range(len(batching))),
        mode,
    )


@pytest.mark.parametrize("dtype", [np.uint32, np.uint8])
def test_indices_without_a_sign_are_not_compared(dtype):
    table, tokens = np.zeros((16, 8), np.float32), np.zeros((8, 1), dtype)
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    ((_, rule),) = rules_of(lambda x, i: lax.gather(x, i, numbers, (1, 8)), table, tokens, primitive="gather")
    assert splittable(rule) == ([{1}, {0}], [{0, 1}])


def test_truth_values_are_not_added_up():
    table, tokens = np.zeros((16, 8), bool), np.zeros((8,), np.int32)
    ((_, rule),) = rules_of(lambda x, i: x[i], table, tokens, primitive="gather")
    assert splittable(rule) == ([{1}, {0}], [{0, 1}])


@examples(64)
@given(indexings(), seeds, st.sampled_from((None, 0, 7)), st.sampled_from((np.float32, np.int32)))
def test_gather(indexing, seed, fill_value, dtype):
    operand = integers(indexing.operand, seed, dtype)
    check(lambda x, i: indexing.gather(x, i, fill_value), operand, indexing.indices, primitives=["gather"])


SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}


@examples(80)
@given(indexings(), seeds, st.sampled_from(sorted(SCATTERS)), st.sampled_from((np.float32, np.int32)))
def test_scatter(indexing, seed, name, dtype):
    low, high = (-1, 2) if name == "scatter-mul" else (-4, 5)
    operand = integers(indexing.operand, seed, dtype, low, high)
    updates_shape = jax.eval_shape(indexing.gather, operand, indexing.indices).shape
    updates = integers(updates_shape, seed + 1, dtype, low, high)
    apply = SCATTERS[name]
    check(lambda *args: indexing.scatter(apply, *args), operand, indexing.indices, updates, primitives=[name])


@examples(10)
@given(sizes, seeds, st.booleans())
def test_scatter_of_distinct_rows(rows, seed, unique):
    table, rows_of = integers((16, 8), seed), np.random.default_rng(seed).permutation(16)[:rows]
    check(
        lambda x, i, y: x.at[i].set(y, unique_indices=unique),
        table,
        rows_of,
        integers((rows, 8), seed + 1),
        primitives=["scatter"],
    )


def test_scatter_is_linear_only_where_each_element_is_written_once():
    table, row, rows = np.zeros((16, 8), np.float32), np.zeros((), np.int32), np.zeros(8, np.int32)

    def linear(function, *args):
        ((_, rule),) = rules_of(function, *args, primitive="scatter")
        return rule.linear

    assert linear(lambda x, i: x.at[i].set(1.0), table, row) == (frozenset({0, 2}),)
    assert linear(lambda x, i: x.at[i].set(1.0, unique_indices=True), table, rows) == (frozenset({0, 2}),)
    assert linear(lambda x, i: x.at[i].set(1.0), table, rows) == ()
    assert linear(lambda x, i: x.at[i].apply(jnp.sin), table, row) == ()


@examples(12)
@given(st.lists(sizes, min_size=1, max_size=3), seeds, st.data())
def test_dynamic_slice_and_update(shape, seed, data):
    parts = [data.draw(st.sampled_from(sorted({1, size, max(size // 2, 1)}))) for size in shape]
    starts = [data.draw(st.integers(-2, size + 2)) for size in shape]

    def shifted(x, y, *starts):
        return lax.dynamic_slice(x, starts, parts), lax.dynamic_update_slice(x, y, starts)

    check(
        shifted,
        integers(shape, seed),
        integers(parts, seed + 1),
        *starts,
        primitives=["dynamic_slice", "dynamic_update_slice"],
    )


@pytest.mark.parametrize("start", [4, 9, 40, -3])
def test_what_a_device_takes_of_a_slice_begins_where_jax_clamps_it(start):
    """XLA makes one slice of two, and leaves out what the first one's start is clamped to."""

    def step(state, x, start):
        return {"u": 0.9 * state["u"]}, lax.dynamic_slice_in_dim(x, start, 8) * state["u"]

    given = {"u": np.ones(16, np.float32)}, integers((16, 16), 0).astype(np.float32), np.int32(start)
    found = deepcompile.shard(step, state_argnums=0, donate=False)(*given)
    np.testing.assert_array_equal(found[1], jax.jit(step)(*given)[1])


@pytest.mark.parametrize("start", [4, 9, 40, -3])
def test_windows_of_one_example_a_device_begin_where_jax_clamps_them(start):
    """Eight windows of windows are one on each device, of which XLA makes slices."""

    def windows(rows, starts, size):
        return jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, size))(rows, starts)

    def step(state, rows, starts, inner):
        return {"u": 0.9 * state["u"]}, windows(windows(rows, starts, 8), inner, 4) * state["u"].sum()

    rows, starts, inner = integers((8, 16, 2), 0), np.full(8, start, np.int32), np.full(8, 1, np.int32)
    given = {"u": np.ones(16, np.float32)}, rows.astype(np.float32), starts, inner
    found = deepcompile.shard(step, state_argnums=0, batch_argnums=(1, 2, 3), donate=False)(*given)
    np.testing.assert_array_equal(found[1], jax.jit(step)(*given)[1])


def test_lookup_of_a_batch_of_tokens_and_its_gradient():
    table, tokens = integers((24, 8), 0), np.arange(16, dtype=np.int32).reshape(8, 2) % 5

    def loss(table, tokens):
        return jnp.sum(table[tokens] ** 2)

    check(jax.value_and_grad(loss), table, tokens, primitives=["gather", "scatter-add"])


def test_slices_of_a_batch_become_batching_dimensions():
    rows, starts = integers((8, 16), 0), np.arange(8, dtype=np.int32)

    def picked(rows, starts):
        return jax.vmap(lambda row, start: lax.dynamic_slice(row, (start,), (3,)))(rows, starts)

    check(picked, rows, starts, primitives=["gather"])
    ((eqn, rule),) = rules_of(picked, rows, starts, primitive="gather")
    assert eqn.params["dimension_numbers"].operand_batching_dims == (0,)
    assert splittable(rule) == ([{0}, {0}], [{0}])


def test_take_along_axis_and_its_gradient():
    scores, labels = integers((8, 4, 3), 0), np.ones((8, 4, 1), np.int32)
    check(
        jax.grad(lambda x, i: jnp.sum(jnp.take_along_axis(x, i, axis=-1))),
        scores,
        labels,
        primitives=["gather", "scatter-add"],
    )


def test_gather_of_random_keys():
    keys = jax.random.split(jax.random.key(0), 8)
    check(lambda keys, i: keys[i], keys, np.arange(16) % 8, primitives=["gather"])


def test_a_dimension_of_which_single_elements_are_chosen_is_split():
    table, tokens = np.zeros((16, 8), np.float32), np.zeros((8,), np.int32)
    ((_, rule),) = rules_of(lambda x, i: x[i], table, tokens, primitive="gather")
    assert splittable(rule) == ([{0, 1}, {0}], [{0, 1}])
    ((_, rule),) = rules_of(lambda x, i: x.at[i].max(1.0), table, tokens, primitive="scatter-max")
    assert splittable(rule) == ([{0, 1}, set(), {1}], [{0, 1}])


def test_a_dimension_of_which_windows_are_chosen_is_split_only_for_one_of_them():
    table, starts = np.zeros((16, 8), np.float32), np.zeros((8, 1), np.int32)

    def windows(x, i):
        numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))
        return lax.gather(x, i, numbers, (4, 8))

    ((_, rule),) = rules_of(windows, table, starts, primitive="gather")
    assert splittable(rule) == ([{1}, {0}], [{0, 2}])
    ((_, rule),) = rules_of(lambda x: lax.dynamic_slice(x, (3, 0), (8, 8)), table, primitive="dynamic_slice")
    assert splittable(rule) == ([{0, 1}, set(), set()], [{1}])


def test_updates_over_the_index_batch_make_partial_sums():
    table, tokens = np.zeros((16, 8), np.float32), np.zeros((8,), np.int32)
    ((_, rule),) = rules_of(lambda x, i: x.at[i].add(1.0), table, tokens, primitive="scatter-add")
    assert rule.factors[rule.operands[1][0][0]].kind is Kind.SUM
    assert rule.addends == {0}


def test_fill_values_that_would_add_up_are_not_linear():
    table, tokens = np.zeros((16, 8), np.float32), np.zeros((8,), np.int32)

    def linear(**how):
        ((_, rule),) = rules_of(lambda x, i: x.at[i].get(**how), table, tokens, primitive="gather")
        return bool(rule.linear)

    assert linear(mode="clip")
    assert linear(mode="promise_in_bounds")
    assert linear(mode="fill", fill_value=0)
    assert not linear(mode="fill", fill_value=1)
    assert not linear(mode="fill")


def test_sizes_that_do_not_divide_are_not_split():
    table, tokens = np.zeros((6, 12), np.float32), np.zeros((3,), np.int32)
    ((_, rule),) = rules_of(lambda x, i: x[i], table, tokens, primitive="gather")
    assert splittable(rule) == ([set(), set()], [set()])
