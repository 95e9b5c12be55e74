"""Several programs of one step, run in turns on one copy of its state."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import peak_bytes
from jax_deepcompile.profilers.runs import StepRuns
from jax_deepcompile.profilers.timing import timed
from jax_deepcompile.runtime.memory import free_bytes


def copy_donated(
    function: str, args: tuple, donated: Collection[int], compiled: Sequence[jax.stages.Compiled], mesh: Mesh
) -> tuple:
    """``args`` with the leaves at ``donated`` copied.

    Args:
      function: the name of the step, for the error.
      compiled: what is to run on them, one after the other.

    Raises:
      NoRoomToMeasureError: there is no memory for the copy and the largest of ``compiled`` beside ``args``.
    """
    leaves, tree = jax.tree.flatten(args)
    places = [place for place in donated if isinstance(leaves[place], jax.Array)]
    copy_bytes = sum(leaves[place].addressable_shards[0].data.nbytes for place in places)
    memories: list[Any] = [each.memory_analysis() for each in compiled]
    needed_bytes = copy_bytes + max(peak_bytes(memory) - memory.argument_size_in_bytes for memory in memories)
    free = free_bytes(mesh)
    if free is not None and needed_bytes > free:
        raise errors.NoRoomToMeasureError(function, needed_bytes, copy_bytes, free)
    for place in places:
        leaves[place] = jnp.copy(leaves[place])
    return jax.tree.unflatten(tree, leaves)


def measure_in_turns(
    steps: Sequence[Callable], args: tuple, program: Program, runs: int = 5
) -> tuple[list[float], tuple]:
    """The median of ``runs`` steps of each of ``steps``, after one that does not count; and what the next one takes.

    Args:
      steps: programs of one step, which go on with one another's results.
      args: used up where they are donated.
      program: one of them, in the local view.
    """
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(runs + 1):
        for step, taken in zip(steps, seconds, strict=True):
            run = StepRuns(step, args, program)
            taken.append(timed(run)[0])
            args = run.args
    return [statistics.median(taken[1:]) for taken in seconds], args
