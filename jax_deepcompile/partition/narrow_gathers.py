"""What elementwise work makes larger is sent as what it was made of, and made again where it arrives.

Before, of weights that are stored as integers with a scale for each column::

    w = convert(q, bfloat16) * broadcast(s)
    W = all_gather(w)

After::

    W = convert(all_gather(q), bfloat16) * broadcast(all_gather(s))

Half the bytes are sent, what stays gathered takes half the memory, and XLA sees the numbers as they are stored beside
the product that they go into, by which it finds its kernels for eight-bit floats.

Guarantees: values are bitwise the same; fewer bytes are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from jax_deepcompile import _jax_compat
from jax_deepcompile.ir.placement import REPLICATE, MeshAxes, Placement
from jax_deepcompile.ir.primitives import WIDENING
from jax_deepcompile.partition.layout import Split, Step
from jax_deepcompile.partition.reshard import MoveKind, full_bytes, plan_moves
from jax_deepcompile.partition.rules.base import Dims, LocalEquation

_LEAST_BITS = 8
"""Of a number that is sent."""


@dataclass(frozen=True)
class Operand:
    """What an equation read.

    Attributes:
      block: in the ``placement`` that it was read in.
      sent_bytes: of what is sent for it to be whole, whole.
      made: how it was made, if of less.
    """

    block: Any
    placement: Placement
    sent_bytes: float
    made: NarrowBlock | None = None


@dataclass(frozen=True)
class NarrowBlock:
    """A block that is made of smaller ones.

    Attributes:
      step: the equation that makes it.
      operands: of that.
    """

    step: Step
    operands: tuple[Operand, ...]

    @property
    def sent_bytes(self) -> float:
        """Of what is sent in its place."""
        return sum(operand.sent_bytes for operand in self.operands)

    def at(self, target: Placement, mesh: MeshAxes, moved: Callable[[Any, Placement, Placement], Any]) -> Any:
        """The block at ``target``, made there.

        Args:
          moved: ``(block, source, target) -> block``.
        """
        assert isinstance(self.step.how, Split)
        rule = self.step.how.rule
        axes = {dims: target.axes_of(dim) for dim, dims in enumerate(rule.results[0])}
        operands = []
        for operand, dims in zip(self.operands, rule.operands, strict=True):
            there = _placed(dims, axes, mesh)
            if operand.made is not None and is_gathered(operand.placement, there, mesh):
                operands.append(operand.made.at(there, mesh, moved))
            else:
                operands.append(moved(operand.block, operand.placement, there))
        names = ((mesh.names[axis] for axis in axes.get((factor,), ())) for factor in range(len(rule.factors)))
        local = LocalEquation(self.step.eqn, rule, tuple(map(tuple, names)), mesh)
        with _jax_compat.provenance(self.step.eqn):
            return rule.emit(local, *operands)[0]


def narrow_block(step: Step, blocks: Sequence[Any], known: Mapping[Any, NarrowBlock]) -> NarrowBlock | None:
    """How the result of ``step``, which reads ``blocks``, is made of less; None if it is not.

    Args:
      known: the same of variables.
    """
    eqn, how = step.eqn, step.how
    if eqn.primitive.name not in WIDENING or not isinstance(how, Split) or step.results != step.kept:
        return None
    if any(len(factors) != 1 for dims in (*how.rule.operands, *how.rule.results) for factors in dims):
        return None
    operands = []
    for atom, block, fetch in zip(eqn.invars, blocks, step.fetches, strict=True):
        before = None if isinstance(atom, jex.Literal) or fetch.source != fetch.target else known.get(atom)
        sent = before.sent_bytes if before else full_bytes(atom.aval) if fetch.target.is_split else 0.0
        operands.append(Operand(block, fetch.target, sent, before))
        if fetch.target.is_partial or (before is None and fetch.target.is_split and not _can_be_sent(atom)):
            return None
    found = NarrowBlock(step, tuple(operands))
    return found if found.sent_bytes < full_bytes(eqn.outvars[0].aval) else None


def is_gathered(source: Placement, target: Placement, mesh: MeshAxes) -> bool:
    """Whether what is at ``source`` is gathered, and no more, to be at ``target``."""
    moves = plan_moves(source, target, mesh)
    return bool(moves) and all(move.kind is MoveKind.ALL_GATHER for move in moves)


def _placed(dims: Dims, axes: Mapping[tuple[int, ...], Sequence[int]], mesh: MeshAxes) -> Placement:
    split = {axis: dim for dim, factors in enumerate(dims) for axis in axes.get(factors, ())}
    return Placement(tuple(split.get(axis, REPLICATE) for axis in range(len(mesh.names))))


def _can_be_sent(atom: Any) -> bool:
    """Keys are not numbers, and not every backend sends smaller numbers than bytes."""
    dtype = atom.aval.dtype
    return isinstance(dtype, np.dtype) and jax.dtypes.itemsize_bits(dtype) >= _LEAST_BITS
