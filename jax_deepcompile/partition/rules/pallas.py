"""Pallas kernels: dimensions of the grid whose steps know nothing of each other split freely.

Such a dimension moves every output, and each input that it moves at all, by one block a step along one dimension, and
the kernel does not ask at which step it is. A device then runs a smaller grid over smaller arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import pallas as pl

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.ir.traversal import equations
from jax_deepcompile.partition.rules.base import LocalEquation, OpRule, RuleBuilder, replicated_rule
from jax_deepcompile.partition.rules.registry import rule

_POSITION_PRIMITIVES = ("program_id", "num_programs")
_OPAQUE_PRIMITIVES = ("axis_index", "pallas_call", "core_map", "run_scoped", "prng_seed", "prng_random_bits")
"""Through these a kernel may learn where it is, or keep something from one step to the next."""


@dataclass(frozen=True)
class _Moved:
    """An array dimension that a grid dimension moves over, ``block`` elements a step."""

    dim: int
    block: int


@rule("pallas_call")
def pallas_call(eqn: Equation) -> OpRule:
    """``index operands..., inputs... -> outputs...``, each dimension moved over being ``grid dimension, block``."""
    mapping = eqn.params["grid_mapping"]
    moves = _moves(eqn)
    if not moves:
        return replicated_rule(eqn, reported="no dimension of the Pallas kernel's grid is independent of the others")
    builder = RuleBuilder()
    grid = {axis: builder.factor(mapping.grid[axis]) for axis in moves}

    def dims(var, position: int) -> list[tuple[int, ...]]:
        result = [builder.whole(size) for size in var.aval.shape]
        for axis, factor in grid.items():
            moved = moves[axis][position]
            if moved is not None:
                result[moved.dim] = (factor, *(builder.whole(moved.block) if moved.block > 1 else ()))
        return result

    index, inputs = eqn.invars[: mapping.num_index_operands], eqn.invars[mapping.num_index_operands :]
    operands = [dims(var, position) for position, var in enumerate(inputs)]
    results = [dims(var, len(inputs) + position) for position, var in enumerate(eqn.outvars)]

    def emit(local: LocalEquation, *blocks: jax.Array) -> Sequence[jax.Array]:
        return local.bind(*blocks, **_local_params(local, grid, blocks[len(index) :]))

    return builder.build([*(builder.whole_dims(var.aval.shape) for var in index), *operands], results, emit=emit)


def _moves(eqn: Equation) -> dict[int, list[_Moved | None]]:
    """For each dimension of the grid that may be split, what it moves over in every input and output."""
    mapping = eqn.params["grid_mapping"]
    if not _is_plain(eqn) or any(
        inner.primitive.name in _OPAQUE_PRIMITIVES for inner in equations(eqn.params["jaxpr"])
    ):
        return {}
    asked = _asked_positions(eqn)
    moves = {}
    for axis, steps in enumerate(mapping.grid):
        moved = [_moved(block, axis, steps) for block in mapping.block_mappings]
        outputs = moved[mapping.num_inputs :]
        if axis not in asked and "mixed" not in moved and None not in outputs and _aliases_agree(eqn, moved):
            moves[axis] = moved
    return moves


def _is_plain(eqn: Equation) -> bool:
    """Whether the call has a static grid and nothing but arrays in and out, which all steps may not share."""
    mapping = eqn.params["grid_mapping"]
    return (
        eqn.params["mesh"] is None
        and not eqn.effects
        and all(isinstance(steps, int) for steps in mapping.grid)
        and not mapping.scratch_avals
        and mapping.local_grid_env is None
        and len(eqn.invars) == mapping.num_index_operands + mapping.num_inputs
        and not any(block.transforms for block in mapping.block_mappings)
    )


def _asked_positions(eqn: Equation) -> set[int]:
    """Dimensions of the grid whose step or size the kernel asks for; it does not count those that ``vmap`` added."""
    mapping = eqn.params["grid_mapping"]
    own = [axis for axis in range(len(mapping.grid)) if axis not in mapping.vmapped_dims]
    asking = (inner for inner in equations(eqn.params["jaxpr"]) if inner.primitive.name in _POSITION_PRIMITIVES)
    return {own[inner.params["axis"]] for inner in asking}


def _moved(block: Any, axis: int, steps: int) -> _Moved | str | None:
    """What step ``axis`` of the grid moves over in one array: one dimension, nothing, or something ``"mixed"``."""
    index_map = open_jaxpr(block.index_map_jaxpr)
    step = index_map.invars[axis]
    if any(step in equation.invars for equation in index_map.eqns):
        return "mixed"
    moved = [dim for dim, index in enumerate(index_map.outvars) if index is step]
    if not moved:
        return None
    if len(moved) > 1 or len(index_map.outvars) != len(block.block_shape):
        return "mixed"
    size = _block_size(block.block_shape[moved[0]])
    whole = block.array_aval.shape[moved[0]] == size * steps
    return _Moved(moved[0], size) if whole else "mixed"


def _block_size(block: Any) -> int:
    """Elements that one step of an index moves by; zero if an index does not count blocks."""
    if isinstance(block, pl.Blocked):
        return block.block_size
    return 1 if block is None or isinstance(block, pl.Squeezed) else block if isinstance(block, int) else 0


def _aliases_agree(eqn: Equation, moved: Sequence[_Moved | str | None]) -> bool:
    """Whether what an output takes the place of is moved over as the output is."""
    mapping = eqn.params["grid_mapping"]
    inputs = [(operand - mapping.num_index_operands, output) for operand, output in eqn.params["input_output_aliases"]]
    return all(position >= 0 and moved[position] == moved[mapping.num_inputs + output] for position, output in inputs)


def _local_params(local: LocalEquation, grid: dict[int, int], inputs: Sequence[jax.Array]) -> dict[str, Any]:
    """The parameters of the call on one device: the steps it runs and the blocks of the arrays it has."""
    mapping = local.params["grid_mapping"]
    outputs = [local.result_shape(index) for index in range(len(local.eqn.outvars))]
    shapes = [*(block.shape for block in inputs), *outputs]
    steps = tuple(local.factor_size(grid[axis]) if axis in grid else size for axis, size in enumerate(mapping.grid))
    blocks = tuple(
        block.replace(array_aval=block.array_aval.update(shape=shape))
        for block, shape in zip(mapping.block_mappings, shapes, strict=True)
    )
    avals = [aval.update(shape=shape) for aval, shape in zip(local.params["out_avals"], outputs, strict=True)]
    return {"grid_mapping": mapping.replace(grid=steps, block_mappings=blocks), "out_avals": tuple(avals)}
