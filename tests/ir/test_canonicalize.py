"""Batch dimensions spelled out as indices become batching dimensions, and nothing else does."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex

from jax_deepcompile import _jax_compat
from jax_deepcompile.ir.canonicalize import canonicalize
from jax_deepcompile.ir.traversal import equations, inline_calls

pytestmark = pytest.mark.pure

B, S, V = 8, 4, 16
Batching = tuple[tuple[int, ...], tuple[int, ...], int]

POSITIVE: dict = {}
NEGATIVE: dict = {}


def positive(*expected: Batching):
    """What each gather and scatter must get: batching dimensions of operand and indices, and components left."""

    def add(function):
        POSITIVE[function.__name__] = (function, list(expected))
        return function

    return add


def negative(function):
    NEGATIVE[function.__name__] = function
    return function


ROW: Batching = ((0,), (0,), 1)


def operands(seed: int) -> dict[str, np.ndarray]:
    """Some labels are negative or out of bounds."""
    random = np.random.default_rng(seed)
    return {
        "x": random.standard_normal((B, V), np.float32),
        "cube": random.standard_normal((B, S, V), np.float32),
        "square": random.standard_normal((B, B), np.float32),
        "stack": random.standard_normal((3, B, V), np.float32),
        "label": random.integers(-V - 4, V + 4, B, np.int32),
        "labels": random.integers(-V - 4, V + 4, (B, S), np.int32),
        "sequence": random.integers(0, V, (3, B), np.int32),
    }


def flat(function, *args) -> jex.ClosedJaxpr:
    return inline_calls(jax.make_jaxpr(function)(*args))


def indexed(closed) -> list[jex.JaxprEqn]:
    names = ("gather", "scatter")
    return [eqn for eqn in equations(closed) if eqn.primitive.name.startswith(names)]


def batching(eqn: jex.JaxprEqn) -> Batching:
    *_, operand_dims, index_dims = eqn.params["dimension_numbers"]
    return operand_dims, index_dims, eqn.invars[1].aval.shape[-1]


def text(closed) -> str:
    """Without dead equations and trailing blanks."""
    live = str(_jax_compat.dce(_jax_compat.open_jaxpr(closed)))
    return "\n".join(line.rstrip() for line in live.splitlines())


def assert_same_bits(before, after, seeds=range(3)) -> None:
    jex.check_jaxpr(_jax_compat.open_jaxpr(after))
    old, new = (jax.jit(jex.jaxpr_as_fun(closed)) for closed in (before, after))
    for seed in seeds:
        leaves = jax.tree.leaves(operands(seed))
        for left, right in zip(new(*leaves), old(*leaves), strict=True):
            np.testing.assert_array_equal(left, right)


@positive(ROW)
def one_label_each(a):
    return a["x"][jnp.arange(B), a["label"]]


@positive(ROW, ROW)
def gradient(a):
    return jax.grad(lambda x: jnp.sum(x[jnp.arange(B), a["label"]] ** 2))(a["x"])


@positive(ROW)
def last_of_each_sequence(a):
    return a["cube"][jnp.arange(B), a["label"] - 1]


@positive(ROW, ROW)
def several_labels_each(a):
    return jax.grad(lambda x: jnp.sum(x[jnp.arange(B)[:, None], a["labels"]] ** 2))(a["x"])


@positive(ROW)
def behind_a_slice(a):
    return a["cube"][jnp.arange(B), :, a["label"]]


@positive(((0, 1), (0, 1), 1))
def two_batch_dimensions(a):
    return a["cube"][jnp.arange(B)[:, None], jnp.arange(S)[None], a["labels"]]


@positive(((0, 1), (1, 0), 1))
def two_batch_dimensions_crosswise(a):
    return a["cube"][jnp.arange(B)[None], jnp.arange(S)[:, None], a["labels"].T]


@positive(((1,), (0,), 1))
def batch_in_the_second_dimension(a):
    return a["x"].T[a["label"], jnp.arange(B)]


@positive(((0,), (0,), 2))
def two_components_left(a):
    return a["cube"][jnp.arange(B), a["label"], a["label"] + 1]


@positive(((0,), (0,), 0))
def no_component_left(a):
    return a["x"][jnp.arange(B)]


@positive(ROW)
def diagonal(a):
    return a["square"][jnp.arange(B), jnp.arange(B)]


@positive(ROW)
def constant(a):
    return a["x"][np.arange(B), a["label"]]


@positive(ROW)
def constant_column(a):
    return a["x"][jnp.asarray(np.arange(B)[:, None]), a["labels"]]


@positive(ROW)
def narrow_type(a):
    return a["x"][jnp.arange(B, dtype=jnp.int8), a["label"].astype(jnp.int8)]


@positive(ROW)
def moved_about(a):
    rows = lax.broadcasted_iota(jnp.int32, (1, B, S), 1).transpose(2, 0, 1).reshape(S, B, 1).squeeze(2)
    return a["x"][rows.T, a["labels"]]


@positive(((0, 1), (0, 1), 1))
def vmapped(a):
    return jax.vmap(lambda x, label: x[jnp.arange(B), label])(a["stack"], a["sequence"])


@positive(((1,), (0,), 1))
def vmapped_operand(a):
    return jax.vmap(lambda x: x[jnp.arange(B), a["label"]])(a["stack"])


@positive(((0, 1), (0, 1), 1))
def vmapped_update(a):
    return jax.vmap(lambda x, label: x.at[jnp.arange(B), label].add(1.5))(a["stack"], a["sequence"])


@positive(ROW)
def scan_body(a):
    return lax.scan(lambda total, label: (total + a["x"][jnp.arange(B), label].sum(), None), 0.0, a["sequence"])


@positive(ROW, ROW)
def gradient_of_a_scan(a):
    """The indices are saved by one loop and read by the other."""

    def loss(x):
        return lax.scan(lambda c, label: (c + jnp.sum(c * x[jnp.arange(B), label]), None), 1.0, a["sequence"])[0]

    return jax.grad(loss)(a["x"])


@positive(ROW)
def while_body(a):
    rows = jnp.arange(B)
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1].at[rows, a["label"]].add(1)), (0, a["x"]))


@positive(ROW, ROW)
def branches(a):
    x, rows, label = a["x"], jnp.arange(B), a["label"]
    return lax.cond(label[0] > 0, lambda: x[rows, label], lambda: -x[rows, label])


@positive(ROW, ROW, ROW)
def checkpointed(a):
    rows = jnp.arange(B)
    loss = jax.checkpoint(lambda x, rows: jnp.sum(jnp.sin(x[rows, a["label"]])))
    return jax.grad(loss)(a["x"], rows)


@negative
def shorter_iota(a):
    return a["x"][jnp.arange(B - 2), a["label"][: B - 2]]


@negative
def longer_iota(a):
    return a["x"][jnp.arange(V), jnp.arange(V) // 2]


@negative
def offset_iota(a):
    return a["x"][jnp.arange(1, B + 1), a["label"]]


@negative
def offset_constant(a):
    return a["x"][np.arange(1, B + 1), a["label"]]


@negative
def doubled(a):
    return a["x"][jnp.arange(B) * 2, a["label"]]


@negative
def wrapped_around(a):
    return a["x"][(jnp.arange(B) + 3) % B, a["label"]]


@negative
def reversed_iota(a):
    return a["x"][jnp.arange(B)[::-1], a["label"]]


@negative
def shuffled_constant(a):
    return a["x"][np.random.default_rng(0).permutation(B), a["label"]]


@negative
def given_rows(a):
    return a["x"][a["label"], a["label"]]


@negative
def sometimes_other_rows(a):
    return a["x"][jnp.where(a["label"] < 0, a["label"], jnp.arange(B)), a["label"]]


@negative
def iota_along_another_dimension(a):
    return a["square"][jnp.arange(B)[:, None] * 0 + a["label"][None], a["label"][:, None]]


@negative
def window_that_keeps_its_dimension(a):
    return jax.vmap(lambda row: lax.dynamic_slice(a["x"], (row, 0), (1, V)))(jnp.arange(B))


@negative
def type_too_narrow(a):
    long = jnp.tile(a["x"], (32, 1))
    return long.at[lax.iota(jnp.int8, 32 * B), a["label"][0].astype(jnp.int8)].get(mode="clip")


@negative
def joined_pieces(a):
    rows = jnp.concatenate([jnp.arange(B // 2), jnp.arange(B // 2)])
    return a["x"][rows, a["label"]]


@negative
def carried_rows(a):
    def body(rows, label):
        return rows[::-1], a["x"][rows, label]

    return lax.scan(body, jnp.arange(B), a["sequence"])


@negative
def one_row_each_iteration(a):
    rows = lax.broadcasted_iota(jnp.int32, (B, B), 0)
    return lax.scan(lambda total, rows: (total + a["x"][rows, a["label"]].sum(), None), 0.0, rows)


@negative
def already_batched(a):
    return jnp.take_along_axis(a["x"], a["labels"], 1)


@pytest.mark.parametrize("name", POSITIVE)
def test_becomes_batching(name: str):
    function, expected = POSITIVE[name]
    before = flat(function, operands(0))
    after = canonicalize(before)
    assert [batching(eqn) for eqn in indexed(after)] == expected
    assert_same_bits(before, after)
    assert canonicalize(after) is after


@pytest.mark.parametrize("name", NEGATIVE)
def test_stays_as_it_is(name: str):
    closed = flat(NEGATIVE[name], operands(0))
    assert indexed(closed)
    assert canonicalize(closed) is closed


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("method", ["get", "set", "add", "subtract", "multiply", "min", "max", "apply"])
def test_keeps_modes_and_flags(method: str, mode: str):
    def function(a):
        at = a["x"].at[jnp.arange(B), a["label"]]
        values = {"get": (), "apply": (jnp.sin,)}.get(method, (a["square"][0],))
        return getattr(at, method)(*values, mode=mode, indices_are_sorted=True, unique_indices=True)

    before = flat(function, operands(0))
    after = canonicalize(before)
    old, new = indexed(before)[-1], indexed(after)[-1]
    assert batching(new) == ROW
    changes = {"indices_are_sorted": False, "dimension_numbers": new.params["dimension_numbers"]}
    assert new.params == {**old.params, **changes}
    assert new.source_info is old.source_info
    assert_same_bits(before, after)


GATHER = """\
{{ lambda ; a:f32[8,16] b:i32[8]. let
{rows}    {bool}:bool[8] = lt b 0:i32[]
    {added}:i32[8] = add b 16:i32[]
    {label}:i32[8] = select_n {bool} b {added}
{indices}    {out}:f32[8] = gather[
      dimension_numbers=GatherDimensionNumbers(offset_dims=(), {numbers})
      fill_value=None
      indices_are_sorted=False
      mode=GatherScatterMode.PROMISE_IN_BOUNDS
      slice_sizes=(1, 1)
      unique_indices=False
    ] a {index}
  in ({out},) }}"""
