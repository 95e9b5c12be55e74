"""The decisions of the partitioner as plain data: what every equation computes where, and what moves before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.extend import core as jex

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.ir.placement import MeshAxes, Placement
from jax_deepcompile.ir.trip_counts import known_counts, trips_of
from jax_deepcompile.partition.rules.base import Kind, OpRule
from jax_deepcompile.summary import Summarized, Summary, axes_text


@dataclass(frozen=True)
class Fetch:
    """How an equation gets one operand.

    Attributes:
      source: the placement of the copy it starts from.
      target: the placement it needs.
      fresh: make a new copy although an equal one was made before: that one has been released since. The new one is
        tied to the present by an optimization barrier, or the compiler would merge the two and keep the first alive.
      batch: the value depends on the batch: an activation, a gradient, a metric.
    """

    source: Placement
    target: Placement
    fresh: bool = False
    batch: bool = False

    @property
    def moves_activation(self) -> bool:
        """Whether a value that the batch has split is gathered or exchanged, rather than cut further or summed."""
        pairs = zip(self.source.axes, self.target.axes, strict=True)
        return self.batch and any(before >= 0 and before != after for before, after in pairs)


@dataclass(frozen=True)
class Split:
    """An equation computed by its rule: for each factor the mesh axes that split it, major first."""

    rule: OpRule
    splits: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Nested:
    """An equation computed by a region rule, from the layouts of the jaxprs it holds."""

    rule: RegionRule
    layouts: tuple[Layout, ...] = ()


@dataclass(frozen=True)
class Step:
    """One equation, decided.

    Attributes:
      results: the placement of each result as computed.
      kept: and as it is kept: what had to be computed whole is cut again, which costs no communication.
    """

    eqn: Equation
    how: Split | Nested
    fetches: tuple[Fetch, ...]
    results: tuple[Placement, ...]
    kept: tuple[Placement, ...]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of the jaxprs the equation holds."""
        return self.how.layouts if isinstance(self.how, Nested) else ()


@dataclass(frozen=True, repr=False)
class Layout(Summarized):
    """A jaxpr in the global view, decided.

    Attributes:
      outputs: how each output is fetched at the end.
      wanted: for each input the placements its uses ask for, in order of first use.
      regathered: inputs that are gathered for more than one use region, or by a nested loop.
      batch_outputs: for each output whether it depends on the batch.
    """

    jaxpr: Any
    inputs: tuple[Placement, ...]
    outputs: tuple[Fetch, ...]
    steps: tuple[Step, ...]
    mesh: MeshAxes
    wanted: tuple[tuple[Placement, ...], ...]
    regathered: tuple[bool, ...]
    batch_outputs: tuple[bool, ...]

    def _summary(self) -> Summary:
        mesh = axes_text(self.mesh.names, self.mesh.sizes)
        return Summary("Layout", (("mesh", mesh), ("equations", f"{len(self.steps)}, decided one by one in .steps")))

    @property
    def output_placements(self) -> tuple[Placement, ...]:
        return tuple(fetch.target for fetch in self.outputs)

    def walk(self) -> Iterator[tuple[Step, int]]:
        """All steps, those of nested jaxprs included, with how often each runs (loops of unknown length count once)."""
        return ((step, times) for layout, times in self.nested_layouts() for step in layout.steps)

    @property
    def moves_activations(self) -> bool:
        """Whether anything inside gathers or exchanges what the batch has split."""
        return any(fetch.moves_activation for step, _ in self.walk() for fetch in step.fetches)

    def nested_layouts(self, trips: int = 1) -> Iterator[tuple[Layout, int]]:
        """This layout and all that its steps hold, with how often each runs."""
        yield self, trips
        known = known_counts(self.jaxpr)
        for step in self.steps:
            if isinstance(step.how, Nested):
                repeats = trips_of(step.eqn, known) if step.eqn.primitive.name == "while" else None
                inner = trips * step.how.rule.trip_count(step.eqn) * (1 if repeats is None else repeats)
                for layout in step.layouts:
                    yield from layout.nested_layouts(inner)


Run = Callable[..., list[jax.Array]]
"""``run(layout, inputs, consts)`` computes a layout on local blocks; ``consts`` are the constants of its jaxpr."""

Demands = Sequence[Sequence[Placement]]
"""For each value the placements wanted of it."""


@dataclass(frozen=True)
class Request:
    """What is asked of one equation that holds jaxprs; no demands on a result ask for nothing in particular."""

    operands: tuple[Placement, ...]
    batch: tuple[bool, ...]
    demands: tuple[tuple[Placement, ...], ...]
    mesh: MeshAxes


def sums_over_features(split: Split, batch: Sequence[bool]) -> bool:
    """Whether a split dimension is summed that both an operand of the batch has and one that does not depend on it."""
    rule = split.rule
    for factor, names in enumerate(split.splits):
        if names and rule.factors[factor].kind is Kind.SUM:
            dims_of = zip(batch, rule.operands, strict=True)
            if len({depends for depends, dims in dims_of if any(factor in factors for factors in dims)}) == 2:
                return True
    return False


def finds_extrema_over(split: Split, mesh: MeshAxes) -> bool:
    """Whether a maximum or minimum of all parts along a virtual axis of ``mesh`` is found."""
    kinds = zip(split.rule.factors, split.splits, strict=True)
    return any(factor.kind in (Kind.MAX, Kind.MIN) and set(names) & set(mesh.virtual) for factor, names in kinds)


@dataclass(frozen=True)
class Decision:
    """How an equation is computed: the data to do it, and the placements it needs and yields.

    Attributes:
      kept: the placements its results are cut to at once; as they are, if empty.
      batch: for each result whether it depends on the batch, where the layouts inside know; empty if they do not.
    """

    how: Split | Nested
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    kept: tuple[Placement, ...] = ()
    batch: tuple[bool, ...] = ()


class Propagate(Protocol):
    """Decides a nested jaxpr from the placements of its inputs and the demands on its outputs."""

    @property
    def mesh(self) -> MeshAxes: ...

    def within(self, mesh: MeshAxes) -> Propagate: ...

    def __call__(
        self,
        jaxpr: jex.Jaxpr,
        inputs: Sequence[Placement],
        batch: Sequence[bool],
        demands: Sequence[Sequence[Placement]],
        held: Sequence[bool] = (),
    ) -> Layout: ...


HintThrough = Callable[[jex.Jaxpr, "Demands"], list[tuple[Placement, ...]]]
"""What demands on the outputs of a jaxpr ask of its inputs."""


class RegionRule(Protocol):
    """How an equation that holds jaxprs, or treats each operand by itself, is decided and computed."""

    def trip_count(self, eqn: Equation) -> int:
        """How often its jaxprs run."""
        return 1

    def batch(self, eqn: Equation, operands: Sequence[bool]) -> list[bool]:
        """Which results depend on the batch, given which operands do."""
        return [any(operands)] * len(eqn.outvars)

    def hints(self, eqn: Equation, results: Demands, through: HintThrough) -> Sequence[Sequence[Placement]]:
        """What demands on the results ask of each operand, before anything is decided; nothing by default."""
        return [()] * len(eqn.invars)

    def decide(self, eqn: Equation, request: Request, propagate: Propagate) -> Decision: ...

    def emit(self, step: Step, operands: Sequence[jax.Array], run: Run, mesh: MeshAxes) -> Sequence[Any]: ...
