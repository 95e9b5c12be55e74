"""Batch dimensions spelled out as indices become batching dimensions, and nothing else does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex

from jax_deepcompile import _jax_compat
from jax_deepcompile.frontend.canonicalize.explicit_indices import without_explicit_indices
from jax_deepcompile.ir.traversal import equations, inline_calls

pytestmark = pytest.mark.pure

B, S, V = 8, 4, 16
Batching = tuple[tuple[int, ...], tuple[int, ...], int]

ROW: Batching = ((0,), (0,), 1)
"""The batching dimensions of operand and indices, and how many components are left."""


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
    return [eqn for eqn in equations(closed) if eqn.primitive.name.startswith(("gather", "scatter"))]


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


def moved_about(a):
    rows = lax.broadcasted_iota(jnp.int32, (1, B, S), 1).transpose(2, 0, 1).reshape(S, B, 1).squeeze(2)
    return a["x"][rows.T, a["labels"]]


def gradient_of_a_scan(a):
    """The indices are saved by one loop and read by the other."""

    def loss(x):
        return lax.scan(lambda c, label: (c + jnp.sum(c * x[jnp.arange(B), label]), None), 1.0, a["sequence"])[0]

    return jax.grad(loss)(a["x"])


def while_body(a):
    rows = jnp.arange(B)
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1].at[rows, a["label"]].add(1)), (0, a["x"]))


def branches(a):
    x, rows, label = a["x"], jnp.arange(B), a["label"]
    return lax.cond(label[0] > 0, lambda: x[rows, label], lambda: -x[rows, label])


def checkpointed(a):
    loss = jax.checkpoint(lambda x, rows: jnp.sum(jnp.sin(x[rows, a["label"]])))
    return jax.grad(loss)(a["x"], jnp.arange(B))


POSITIVE = {
    "one label each": (lambda a: a["x"][jnp.arange(B), a["label"]], [ROW]),
    "gradient": (lambda a: jax.grad(lambda x: jnp.sum(x[jnp.arange(B), a["label"]] ** 2))(a["x"]), [ROW, ROW]),
    "last of each sequence": (lambda a: a["cube"][jnp.arange(B), a["label"] - 1], [ROW]),
    "several labels each": (
        lambda a: jax.grad(lambda x: jnp.sum(x[jnp.arange(B)[:, None], a["labels"]] ** 2))(a["x"]),
        [ROW, ROW],
    ),
    "behind a slice": (lambda a: a["cube"][jnp.arange(B), :, a["label"]], [ROW]),
    "two batch dimensions": (
        lambda a: a["cube"][jnp.arange(B)[:, None], jnp.arange(S)[None], a["labels"]],
        [((0, 1), (0, 1), 1)],
    ),
    "two batch dimensions crosswise": (
        lambda a: a["cube"][jnp.arange(B)[None], jnp.arange(S)[:, None], a["labels"].T],
        [((0, 1), (1, 0), 1)],
    ),
    "batch in the second dimension": (lambda a: a["x"].T[a["label"], jnp.arange(B)], [((1,), (0,), 1)]),
    "two components left": (lambda a: a["cube"][jnp.arange(B), a["label"], a["label"] + 1], [((0,), (0,), 2)]),
    "no component left": (lambda a: a["x"][jnp.arange(B)], [((0,), (0,), 0)]),
    "diagonal": (lambda a: a["square"][jnp.arange(B), jnp.arange(B)], [ROW]),
    "constant": (lambda a: a["x"][np.arange(B), a["label"]], [ROW]),
    "constant column": (lambda a: a["x"][jnp.asarray(np.arange(B)[:, None]), a["labels"]], [ROW]),
    "narrow type": (lambda a: a["x"][jnp.arange(B, dtype=jnp.int8), a["label"].astype(jnp.int8)], [ROW]),
    "moved about": (moved_about, [ROW]),
    "vmapped": (
        lambda a: jax.vmap(lambda x, label: x[jnp.arange(B), label])(a["stack"], a["sequence"]),
        [((0, 1), (0, 1), 1)],
    ),
    "vmapped operand": (lambda a: jax.vmap(lambda x: x[jnp.arange(B), a["label"]])(a["stack"]), [((1,), (0,), 1)]),
    "vmapped update": (
        lambda a: jax.vmap(lambda x, label: x.at[jnp.arange(B), label].add(1.5))(a["stack"], a["sequence"]),
        [((0, 1), (0, 1), 1)],
    ),
    "scan body": (
        lambda a: lax.scan(lambda c, label: (c + a["x"][jnp.arange(B), label].sum(), None), 0.0, a["sequence"]),
        [ROW],
    ),
    "gradient of a scan": (gradient_of_a_scan, [ROW, ROW]),
    "while body": (while_body, [ROW]),
    "branches": (branches, [ROW, ROW]),
    "checkpointed": (checkpointed, [ROW, ROW, ROW]),
}
"""Functions, and what must become of each gather and scatter in them."""


def type_too_narrow(a):
    """The iota starts again at -128."""
    rows = lax.broadcasted_iota(jnp.int8, (32 * B, 1), 0)
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    return lax.gather(jnp.tile(a["x"], (32, 1)), rows, numbers, (1, V), mode="clip")


def one_row_each_iteration(a):
    rows = lax.broadcasted_iota(jnp.int32, (B, B), 0)
    return lax.scan(lambda total, rows: (total + a["x"][rows, a["label"]].sum(), None), 0.0, rows)


NEGATIVE = {
    "shorter iota": lambda a: a["x"][jnp.arange(B - 2), a["label"][: B - 2]],
    "longer iota": lambda a: a["x"][jnp.arange(V), jnp.arange(V) // 2],
    "offset iota": lambda a: a["x"][jnp.arange(1, B + 1), a["label"]],
    "offset constant": lambda a: a["x"][np.arange(1, B + 1), a["label"]],
    "doubled": lambda a: a["x"][jnp.arange(B) * 2, a["label"]],
    "wrapped around": lambda a: a["x"][(jnp.arange(B) + 3) % B, a["label"]],
    "reversed iota": lambda a: a["x"][jnp.arange(B)[::-1], a["label"]],
    "shuffled constant": lambda a: a["x"][np.random.default_rng(0).permutation(B), a["label"]],
    "given rows": lambda a: a["x"][a["label"], a["label"]],
    "sometimes other rows": lambda a: a["x"][jnp.where(a["label"] < 0, a["label"], jnp.arange(B)), a["label"]],
    "repeated half": lambda a: a["x"][jnp.tile(jnp.arange(B // 2), 2), a["label"]],
    "joined halves": lambda a: a["x"][jnp.concatenate([jnp.arange(B // 2), jnp.arange(B // 2)]), a["label"]],
    "cut out of a table": lambda a: a["x"][jnp.arange(B * B).reshape(B, B)[1], a["label"]],
    "table read across": lambda a: a["square"][jnp.arange(B * B).reshape(B, B), a["label"]],
    "window that keeps its dimension": lambda a: jax.vmap(
        lambda row: lax.dynamic_slice(a["x"], (row, 0), (1, V)),
    )(jnp.arange(B)),
    "type too narrow": type_too_narrow,
    "carried rows": lambda a: lax.scan(
        lambda rows, label: (rows[::-1], a["x"][rows, label]), jnp.arange(B), a["sequence"]
    ),
    "one row each iteration": one_row_each_iteration,
    "already batched": lambda a: jnp.take_along_axis(a["x"], a["labels"], 1),
}


@pytest.mark.parametrize("name", POSITIVE)
def test_becomes_batching(name: str):
    function, expected = POSITIVE[name]
    before = flat(function, operands(0))
    after = without_explicit_indices(before)
    assert [batching(eqn) for eqn in indexed(after)] == expected
    assert_same_bits(before, after)
    assert without_explicit_indices(after) is after


@pytest.mark.parametrize("name", NEGATIVE)
def test_stays_as_it_is(name: str):
    closed = flat(NEGATIVE[name], operands(0))
    assert indexed(closed)
    assert without_explicit_indices(closed) is closed


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("method", ["get", "set", "add", "subtract", "multiply", "min", "max", "apply"])
def test_keeps_modes_and_flags(method: str, mode: str):
    def function(a):
        at = a["x"].at[jnp.arange(B), a["label"]]
        values = {"get": (), "apply": (jnp.sin,)}.get(method, (a["square"][0],))
        return getattr(at, method)(*values, mode=mode, indices_are_sorted=True, unique_indices=True)

    before = flat(function, operands(0))
    after = without_explicit_indices(before)
    old, new = indexed(before)[-1], indexed(after)[-1]
    assert batching(new) == ROW
    changes = {"indices_are_sorted": False, "dimension_numbers": new.params["dimension_numbers"]}
    assert new.params == {**old.params, **changes}
    assert new.source_info is old.source_info
    assert_same_bits(before, after)


GATHER = """\
{{ lambda ; a:f32[8,16] b:i32[8,1]. let
{made}    {result}:f32[8] = gather[
      dimension_numbers=GatherDimensionNumbers(offset_dims=(), {numbers})
      fill_value=None
      indices_are_sorted=False
      mode=GatherScatterMode.PROMISE_IN_BOUNDS
      slice_sizes=(1, 1)
      unique_indices=False
    ] a {indices}
  in ({result},) }}"""

BEFORE = GATHER.format(
    made="    c:i32[8,1] = iota[dimension=0 dtype=int32 shape=(8, 1) sharding=None]\n"
    "    d:i32[8,2] = concatenate[dimension=1] c b\n",
    numbers="collapsed_slice_dims=(0, 1), start_index_map=(0, 1), "
    "operand_batching_dims=(), start_indices_batching_dims=()",
    indices="d",
    result="e",
)
AFTER = GATHER.format(
    made="",
    numbers="collapsed_slice_dims=(1,), start_index_map=(1,), "
    "operand_batching_dims=(0,), start_indices_batching_dims=(0,)",
    indices="b",
    result="c",
)


def test_text_before_and_after():
    def function(x, label):
        rows = lax.broadcasted_iota(jnp.int32, (B, 1), 0)
        numbers = lax.GatherDimensionNumbers((), (0, 1), (0, 1))
        return lax.gather(x, lax.concatenate([rows, label], 1), numbers, (1, 1))

    closed = flat(function, jnp.zeros((B, V)), jnp.zeros((B, 1), jnp.int32))
    assert text(closed) == BEFORE
    assert text(without_explicit_indices(closed)) == AFTER


def test_slices_indices_it_did_not_see_made():
    """Only the first column is known, as the barrier hides the concatenation but not what passes it."""

    def function(a):
        indices = lax.concatenate([lax.broadcasted_iota(jnp.int32, (B, 1), 0), a["labels"][:, :1]], 1)
        numbers = lax.GatherDimensionNumbers((), (0, 1), (0, 1))
        return lax.gather(a["x"], lax.optimization_barrier(indices), numbers, (1, 1))

    before = flat(function, operands(0))
    after = without_explicit_indices(before)
    *_, cut, gather = _jax_compat.open_jaxpr(after).eqns
    assert cut.primitive.name == "slice"
    assert (cut.params["start_indices"], cut.params["limit_indices"]) == ((0, 1), (B, 2))
    assert cut.source_info is gather.source_info
    assert batching(gather) == ROW
    assert_same_bits(before, after)
