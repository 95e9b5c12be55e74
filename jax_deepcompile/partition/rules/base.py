"""The language rules are written in.

A rule describes an equation by its *factors*, the independent loops of its arithmetic, as an einsum letter does. Every
dimension of every operand and result is a product of factors, major first; splitting a factor over a mesh axis splits
all dimensions it leads. Matrix multiplication ``x[b, k] @ w[k, n]`` has factors ``b`` and ``n``, which may be split
freely, and ``k``, which may be split if the result is then summed. From this the propagation derives every legal
placement.
(The same idea under the same name: Shardy's sharding rules, https://openxla.org/shardy/sharding_representation.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import jax

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.partition.reshard import axis_position


class Kind(StrEnum):
    """What happens to the results when a factor is split."""

    MAP = "map"
    """They are split with it."""
    SUM = "sum"
    """They become partial sums."""
    MAX = "max"
    """They are combined by maximum at once."""
    MIN = "min"
    """They are combined by minimum at once."""
    WHOLE = "whole"
    """The factor cannot be split."""


@dataclass(frozen=True)
class Factor:
    """One independent loop of an equation: its trip count and what splitting it does."""

    size: int
    kind: Kind


Dims = tuple[tuple[int, ...], ...]
"""For each dimension of a value the indices of its factors, major first."""


@dataclass(frozen=True)
class LocalEquation:
    """An equation about to be computed on one device's blocks.

    Attributes:
      eqn: the equation in the global view.
      rule: its rule.
      splits: for each factor the mesh axes it is split over, major first.
      mesh: the mesh axes.
    """

    eqn: Equation
    rule: OpRule
    splits: tuple[tuple[str, ...], ...]
    mesh: MeshAxes

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    def factor_size(self, factor: int) -> int:
        """Trip count of ``factor`` on one device."""
        return self.rule.factors[factor].size // self.mesh.size_of(self.splits[factor])

    def dim_size(self, factors: Sequence[int]) -> int:
        """Local size of a dimension made of ``factors``."""
        return math.prod(self.factor_size(factor) for factor in factors)

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        return tuple(self.dim_size(factors) for factors in self.rule.results[index])

    def start(self, factors: Sequence[int]) -> jax.Array | int:
        """Global index at which this device's block of a dimension made of ``factors`` starts."""
        axes = [name for factor in factors for name in self.splits[factor]]
        return axis_position(axes, self.mesh) * self.dim_size(factors) if axes else 0

    def bind(self, *operands: jax.Array, **changed_params: Any) -> Sequence[jax.Array]:
        """Computes the same primitive on ``operands``, some parameters changed."""
        params = self.eqn.primitive.get_bind_params({**self.params, **changed_params})
        out = self.eqn.primitive.bind(*operands, **params)
        return out if self.eqn.primitive.multiple_results else [out]


Emit = Callable[..., Sequence[jax.Array]]
"""``emit(local: LocalEquation, *operand_blocks) -> result_blocks``."""


def bind_unchanged(local: LocalEquation, *operands: jax.Array) -> Sequence[jax.Array]:
    return local.bind(*operands)


@dataclass(frozen=True)
class OpRule:
    """How one equation may be split.

    Attributes:
      factors: its factors.
      operands: the dims of each operand.
      results: the dims of each result.
      linear: sets of operands in which the equation is jointly linear: if all of a set are partial sums and the other
        operands whole, the results are partial sums.
      addends: operands that are added to a reduction over SUM factors; splitting one makes them partial sums too.
      rounded: sets like those of ``linear`` of an equation that rounds what it is given. Sums over devices are finished
        first; those over a loop round each part, as accumulated gradients do.
      rearranges: whether the result is nothing but the elements of the one operand in another order.
      looked_up: factors along which single elements of the first operand are chosen, as rows of a table are. If they
        are split each device serves those it has: rows are moved rather than the table, where that is less.
      updated: factors along which single elements of the first operand are updated, as the gradients of such rows
        are. If they are split each device updates those it has.
      cut: factors along which elements of the first operand are taken that lie together. If they are split each device
        gives those it has: of activations, where that is less.
      emit: computes the equation on one device's blocks.
      reported: why the equation is computed whole where it could not be split, for ``explain()``; empty if by nature.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    linear: tuple[frozenset[int], ...] = ()
    addends: frozenset[int] = frozenset()
    rounded: tuple[frozenset[int], ...] = ()
    rearranges: bool = False
    looked_up: frozenset[int] = frozenset()
    updated: frozenset[int] = frozenset()
    cut: frozenset[int] = frozenset()
    emit: Emit = field(default=bind_unchanged, compare=False)
    reported: str = field(default="", compare=False)

    @property
    def by_number(self) -> frozenset[int]:
        """Factors whose elements are told by where they are."""
        return self.looked_up | self.updated | self.cut


@dataclass
class RuleBuilder:
    """Collects the factors of a rule while it is being written."""

    factors: list[Factor] = field(default_factory=list)

    def factor(self, size: int, kind: Kind = Kind.MAP) -> int:
        """The index of a new factor of ``size`` elements."""
        self.factors.append(Factor(size, kind))
        return len(self.factors) - 1

    def map(self, size: int) -> tuple[int, ...]:
        """A dimension of ``size`` elements; splitting it splits results with it."""
        return (self.factor(size),)

    def sum(self, size: int) -> tuple[int, ...]:
        """A dimension of ``size`` elements that is summed over; splitting it leaves partial sums."""
        return (self.factor(size, Kind.SUM),)

    def whole(self, size: int) -> tuple[int, ...]:
        """A dimension of ``size`` elements that cannot be split."""
        return (self.factor(size, Kind.WHOLE),)

    def dims(self, shape: Sequence[int], whole: Container[int] = ()) -> Dims:
        """A factor for every dimension; those of the dimensions ``whole`` cannot be split."""
        return tuple(self.whole(size) if dim in whole else self.map(size) for dim, size in enumerate(shape))

    def whole_dims(self, shape: Sequence[int]) -> Dims:
        """Dimensions of which none can be split."""
        return tuple(map(self.whole, shape))

    def shared(self, one: Sequence[int], other: Sequence[int], alike: Sequence[bool] = ()) -> tuple[Dims, Dims]:
        """Dims of two values of one rank: a factor for both where they are ``alike``, else whole, each by itself.

        By default they are where they are as long.
        """
        alike = alike or [left == right for left, right in zip(one, other, strict=True)]
        each = zip(one, other, alike, strict=True)
        pairs = [(self.map(left),) * 2 if both else (self.whole(left), self.whole(right)) for left, right, both in each]
        return tuple(left for left, _ in pairs), tuple(right for _, right in pairs)

    def build(
        self,
        operands: Sequence[Sequence[tuple[int, ...]]],
        results: Sequence[Sequence[tuple[int, ...]]],
        *,
        linear: Sequence[Sequence[int]] = (),
        addends: Sequence[int] = (),
        rounded: Sequence[Sequence[int]] = (),
        rearranges: bool = False,
        looked_up: Sequence[int] = (),
        updated: Sequence[int] = (),
        cut: Sequence[int] = (),
        emit: Emit = bind_unchanged,
        reported: str = "",
    ) -> OpRule:
        """The rule: for each operand and result its dimensions, as the other methods make them; see ``OpRule``."""
        return OpRule(
            tuple(self.factors),
            tuple(tuple(dims) for dims in operands),
            tuple(tuple(dims) for dims in results),
            tuple(frozenset(group) for group in linear),
            frozenset(addends),
            tuple(frozenset(group) for group in rounded),
            rearranges,
            frozenset(looked_up),
            frozenset(updated),
            frozenset(cut),
            emit,
            reported,
        )


Rule = Callable[[Equation], OpRule]


def replicated_rule(eqn: Equation, reported: str = "") -> OpRule:
    """Every operand and result whole on every device: right for any deterministic primitive."""
    builder = RuleBuilder()
    operands = [builder.whole_dims(var.aval.shape) for var in eqn.invars]
    results = [builder.whole_dims(var.aval.shape) for var in eqn.outvars]
    return builder.build(operands, results, reported=reported)
