"""Runs of a step on the user's own state, one after the other, without ever holding it twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jax_deepcompile.ir.program import Program


class StepRuns:
    """Calls a step again and again.

    A step that donates its state leaves none behind but the one it returns, which goes into the next call; one that
    does not, or that updates objects in place, gets the same arguments each time, and what it returns is dropped.

    Attributes:
      args: what the next call takes; the caller's own arguments are used up where the step donates.
    """

    def __init__(self, step: Callable, args: tuple, program: Program) -> None:
        self.args = args
        self._step = step
        self._program = program

    def __call__(self) -> None:
        """Runs one step and waits for it."""
        out = jax.block_until_ready(self._step(*self.args))
        leaves, tree = jax.tree.flatten(self.args)
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            results: list[Any] = jax.tree.leaves(out)
            for source, result in self._program.state_outputs:
                leaves[source] = results[result]
            self.args = jax.tree.unflatten(tree, leaves)
