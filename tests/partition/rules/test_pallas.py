"""Rule of Pallas kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_deepcompile.partition.rules import pallas
from jax_deepcompile.partition.rules.families import REGISTRY
from tests.partition.rules.harness import check, integers, rules_of
from tests.partition.rules.ways import splittable

pytestmark = pytest.mark.cpu_mesh


def _call(kernel, grid, in_specs, out_spec, out_shape, **params):
    shape = jax.ShapeDtypeStruct(out_shape, np.float32)
    specs = {"grid": grid, "in_specs": in_specs, "out_specs": out_spec}
    return pl.pallas_call(kernel, out_shape=shape, interpret=True, **specs, **params)


def _multiply(x, y, out):
    out[...] = x[...] @ y[...]


def _product(kernel=_multiply):
    """``x[batch, 16, 8] @ y[8, 16]`` by a grid of sequences, rows and columns."""
    return _call(
        kernel,
        (8, 4, 2),
        [pl.BlockSpec((None, 4, 8), lambda b, i, j: (b, i, 0)), pl.BlockSpec((8, 8), lambda b, i, j: (0, j))],
        pl.BlockSpec((None, 4, 8), lambda b, i, j: (b, i, j)),
        (8, 16, 16),
    )


OPERANDS = (integers((8, 16, 8), 0), integers((8, 16), 1))


def _rule(function, *operands):
    ((_, rule),) = rules_of(function, *operands, primitive="pallas_call")
    return rule


def _reported(function, *operands):
    (eqn,) = jax.make_jaxpr(function)(*operands).eqns
    return REGISTRY.find(eqn).reported


def test_every_dimension_of_an_independent_grid():
    check(_product(), *OPERANDS, primitives=["pallas_call"])
    assert splittable(_rule(_product(), *OPERANDS)) == ([{0}, set()], [{0}])


def test_dimensions_that_vmap_adds():
    x = integers((4, 8, 16, 8), 0)
    check(jax.vmap(_product(), (0, None)), x, OPERANDS[1], primitives=["pallas_call"])


def test_a_step_that_the_kernel_asks_for_is_not_split():
    def kernel(x, y, out):
        out[...] = x[...] @ y[...] + pl.program_id(0)

    check(_product(kernel), *OPERANDS, primitives=["pallas_call"])
    assert splittable(_rule(_product(kernel), *OPERANDS)) == ([set(), set()], [set()])
    batched = jax.vmap(_product(kernel), (0, None))
    x = np.stack([OPERANDS[0]] * 8)
    assert splittable(_rule(batched, x, OPERANDS[1])) == ([{0}, set()], [{0}])


def test_an_accumulating_dimension_is_not_split():
    def kernel(x, out):
        @pl.when(pl.program_id(1) == 0)
        def _():
            out[...] = jnp.zeros_like(out)

        out[...] += x[...]

    total = _call(
        kernel,
        (8, 8),
        [pl.BlockSpec((1, 2), lambda i, k: (i, k))],
        pl.BlockSpec((1, 2), lambda i, k: (i, 0)),
        (8, 2),
    )
    check(total, integers((8, 16), 0), primitives=["pallas_call"])
    assert splittable(_rule(total, np.zeros((8, 16), np.float32))) == ([{0}], [{0}])


def _copy(x, out):
    out[...] = x[...]


@pytest.mark.parametrize(
    "index_map",
    [lambda i: (7 - i, 0), lambda i: (i // 2, 0), lambda i: (i, i), lambda i: (0, 0)],
    ids=["reversed", "repeated", "twice", "constant"],
)
def test_outputs_that_move_otherwise_are_computed_whole(index_map):
    moved = _call(_copy, (8,), [pl.BlockSpec((1, 1), lambda i: (i, 0))], pl.BlockSpec((1, 1), index_map), (8, 8))
    assert "independent" in _reported(moved, np.zeros((8, 8), np.float32))


def test_grids_that_do_not_cover_their_arrays_are_computed_whole():
    part = _call(_copy, (8,), [pl.BlockSpec((2, 4), lambda i: (i, 0))], pl.BlockSpec((2, 4), lambda i: (i, 0)), (15, 4))
    assert "independent" in _reported(part, np.zeros((15, 4), np.float32))


def test_an_output_that_takes_an_operand_s_place():
    spec = pl.BlockSpec((2, 4), lambda i: (i, 0))
    doubled = _call(_copy, (8,), [spec], spec, (16, 4), input_output_aliases={0: 0})
    check(doubled, integers((16, 4), 0), primitives=["pallas_call"])


def test_prefetched_indices():
    def looked_up(table, x):
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(8, 8),
            in_specs=[pl.BlockSpec((2, 1), lambda i, j, table: (table[i], j))],
            out_specs=pl.BlockSpec((2, 1), lambda i, j, table: (i, j)),
        )
        shape = jax.ShapeDtypeStruct((16, 8), np.float32)
        return pl.pallas_call(lambda table, x, out: _copy(x, out), grid_spec=grid, out_shape=shape, interpret=True)(
            table, x
        )

    operands = np.arange(8, dtype=np.int32)[::-1] % 3, integers((6, 8), 0)
    check(looked_up, *operands, primitives=["pallas_call"])
    assert splittable(_rule(looked_up, *operands)) == ([set(), {1}], [{1}])


def test_blocks_are_found_in_this_jax():
    assert [pallas._block_size(size) for size in (None, 3, pl.Blocked(4), pl.Squeezed(), pl.Element(5))] == [
        1,
        3,
        4,
        1,
        0,
    ]
