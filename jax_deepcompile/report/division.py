"""How a step is divided among the devices: its arguments and state, what is moved, what is computed whole."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax_deepcompile._jax_compat import open_jaxpr, user_line
from jax_deepcompile.analysis.work import work_of
from jax_deepcompile.errors import some_of
from jax_deepcompile.ir.primitives import COLLECTIVES, PRODUCTS, Collective, Scan
from jax_deepcompile.ir.program import AS_JITTED, Program, Role
from jax_deepcompile.ir.traversal import bodies, equations
from jax_deepcompile.ir.trip_counts import known_counts, trips_of
from jax_deepcompile.partition.layout import Split
from jax_deepcompile.partition.partition import Partitioned
from jax_deepcompile.partition.reshard import MoveKind, full_bytes, plan_moves
from jax_deepcompile.partition.rules.regions import unmet_annotations
from jax_deepcompile.partition.state import LeafChoice
from jax_deepcompile.planner.session import Planned
from jax_deepcompile.report.words import LINES, cut, line_text
from jax_deepcompile.summary import size_text

_NOTABLE = 0.01
"""The share of a device's matrix products that is worth a line."""


@dataclass(frozen=True)
class Argument:
    """An argument of the step.

    Attributes:
      name: as the user calls it.
      kind: state, read only, batch, replicated or static.
      donated: whether the step has its memory; None where it is not state.
      reason: why it was taken for that.
    """

    name: str
    kind: str
    donated: bool | None
    reason: str

    def line(self) -> str:
        given = {None: "", True: ", donated", False: ", not donated"}[self.donated]
        return f"  {self.name}: {self.kind}{given}" + f": {self.reason}" * bool(self.reason)


@dataclass(frozen=True)
class Unusual:
    """Leaves of the state that are not divided along one dimension, and why; ``path`` is one of ``count``."""

    path: str
    count: int
    bytes: int
    reason: str

    def line(self) -> str:
        more = f" and {self.count - 1} more like it, {size_text(self.bytes)} a device" if self.count > 1 else ""
        return f"  {self.path}{more}: {self.reason}"


@dataclass(frozen=True)
class State:
    """Leaves of the state, and their bytes on each device."""

    leaves: int
    sharded: int
    sharded_bytes: int
    replicated_bytes: int
    unusual: tuple[Unusual, ...]

    def lines(self) -> list[str]:
        head = (
            f"state: {self.sharded} of {self.leaves} leaves sharded, {size_text(self.sharded_bytes)} a device; "
            f"{self.leaves - self.sharded} replicated, {size_text(self.replicated_bytes)} a device"
        )
        return [head, *cut([each.line() for each in self.unusual])]


@dataclass(frozen=True)
class Microbatches:
    """How the batch is worked on in parts; ``sums`` are those over all parts."""

    count: int
    examples: int
    sums: int

    def line(self) -> str:
        of = f"{self.examples} example{'s' if self.examples > 1 else ''}"
        summed = (
            f"{self.sums} sums over the loop"
            if self.sums
            else "nothing is summed over the loop, so no gradient is accumulated"
        )
        return f"gradient accumulation: {self.count} microbatches of {of} a device; {summed}"


@dataclass(frozen=True)
class Moved:
    """Collectives of one kind over some axes, or operations that have the batch's values moved, in a step.

    Attributes:
      what: the collective, or the operation.
      times: how often; None where that is not counted.
      bytes: that each device gathers, or has reduced or exchanged.
      line: the user's ``file:line (function)`` of an operation.
    """

    what: str
    times: int | None
    bytes: float
    line: str = ""


@dataclass(frozen=True)
class Noted:
    """Something about a line of the user's.

    Attributes:
      what: the operation, or the annotation.
      line: the user's ``file:line (function)``.
      why: what there is to say of it.
      times: how often it was found.
    """

    what: str
    line: str
    why: str
    times: int

    def text(self) -> str:
        why, times = f": {self.why}" * bool(self.why), f" ({self.times} times)" * (self.times > 1)
        return f"  {_at(self.what, self.line)}{why}{times}"


@dataclass(frozen=True)
class Division:
    """How a step is divided.

    Attributes:
      equations: of the step as it was written.
      like_examples: what is replicated though it is shaped like a batch.
      microbatches: None where the batch is not worked on in parts.
      launches: how often what is compiled launches each kind of collective; None before it is.
      collectives: of the program ``is_planned`` or still to be, before XLA joins any.
      uncounted: loops with collectives whose length depends on values: one iteration of each is counted.
      moved: where what the batch had split is gathered or exchanged, most bytes first.
      whole: what every device computes whole.
      has_batch: whether any argument is one.
      annotations: the user's sharding constraints that are not followed.
    """

    equations: int
    arguments: tuple[Argument, ...]
    state: State
    like_examples: tuple[str, ...]
    microbatches: Microbatches | None
    launches: tuple[tuple[str, int], ...] | None
    collectives: tuple[Moved, ...]
    uncounted: tuple[str, ...]
    is_planned: bool
    moved: tuple[Moved, ...]
    whole: tuple[Noted, ...]
    has_batch: bool
    annotations: tuple[Noted, ...]

    def lines(self) -> list[str]:
        lines = [f"how it is divided, {self.equations} equations:", *(each.line() for each in self.arguments)]
        lines += ["", *self.state.lines(), *self._like_examples()]
        lines += ["", self.microbatches.line()] if self.microbatches is not None else []
        lines += ["", *self._collectives()]
        moved = [f"  {_at(each.what, each.line)}: {size_text(each.bytes)} a step" for each in self.moved]
        lines += ["", "activations moved between devices:" + " none" * (not moved), *cut(moved)]
        whole = [each.text() for each in self.whole]
        nothing = " nothing that could be split" + "; no argument is a batch" * (not self.has_batch)
        lines += ["", "computed whole on every device:" + nothing * (not whole), *cut(whole, names=True)]
        if self.annotations:
            lines += ["", "sharding annotations not followed, as divisions are derived here:"]
            lines += cut([each.text() for each in self.annotations])
        return lines

    def _like_examples(self) -> list[str]:
        paths = self.like_examples
        if not paths:
            return []
        remedy = "to divide examples among the devices name their arguments' positions in shard(..., batch_argnums=...)"
        return [f"replicated, though shaped like a batch: {some_of(paths, LINES)}; {remedy}"]

    def _collectives(self) -> list[str]:
        compiled = []
        if self.launches is not None:
            launched = ", ".join(f"{number} {kind}" for kind, number in self.launches) or "none"
            compiled = [f"collectives a step, as compiled: {launched}"]
        stage = "as planned, before XLA joins any" if self.is_planned else "before planning and compilation"
        lines = [f"  {each.what}: {each.times} a step, {size_text(each.bytes)}" for each in self.collectives]
        once = "  one iteration is counted of loops whose length depends on values: "
        lines += [once + some_of(self.uncounted, LINES)] if self.uncounted else []
        return [*compiled, f"collectives, {stage}:", *(lines or ["  none"])]


def division_of(
    program: Program,
    partitioned: Partitioned,
    sharded: Program,
    reasons: Mapping[str, str],
    planned: Planned | None = None,
    launches: Mapping[str, int] | None = None,
) -> Division:
    """What was decided for a step.

    Args:
      program: the global view.
      partitioned: what was decided for it.
      sharded: the local view.
      reasons: why each argument is what it is, by its name.
      planned: the local view as planned, if it is.
      launches: how often what is compiled launches each collective in a step, if it is; else what planning compiled
        counts as compiled: it is what runs.
    """
    expected = None if planned is None else planned.plan.prediction
    if launches is None and expected is not None and expected.launches:
        launches = dict(expected.launches)
    local = sharded if planned is None else planned.program
    return Division(
        len(partitioned.layout.steps),
        _arguments(program, sharded, reasons),
        _state(partitioned),
        _like_examples(partitioned),
        _microbatches(partitioned),
        None if launches is None else tuple(sorted(launches.items())),
        _collectives(local),
        tuple(dict.fromkeys(_uncounted(local.jaxpr))),
        planned is not None,
        _moved_activations(partitioned),
        (*_replicated(partitioned), *_whole_products(partitioned)),
        any(port.role is Role.BATCH for port in partitioned.program.inputs),
        _annotations(partitioned),
    )


def arguments(program: Program) -> str:
    """What every argument is, in a line."""
    alike: dict[str, list[str]] = {"state": [], "read only": [], "batch": [], "replicated": []}
    for name, kind in _kinds(program).items():
        alike[kind].append(name)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in alike.items() if names)


def _arguments(program: Program, sharded: Program, reasons: Mapping[str, str]) -> tuple[Argument, ...]:
    donated = {_argument(sharded.inputs[source].path) for source, _ in sharded.state_outputs}
    kinds = _kinds(program)
    kinds |= {name: "static" for name, reason in reasons.items() if reason == AS_JITTED}
    return tuple(
        Argument(name, kind, name in donated if kind == "state" else None, reasons.get(name, ""))
        for name, kind in kinds.items()
    )


def _kinds(program: Program) -> dict[str, str]:
    """For the name of every argument what it is; of a batch scalars are replicated."""
    kinds: dict[str, str] = {}
    returned = {source for source, _ in program.state_outputs}
    for index, port in enumerate(program.inputs):
        kept = "state" if index in returned else "read only"
        kind = kept if port.role.is_state else "batch" if port.role is Role.BATCH else "replicated"
        name = _argument(port.path)
        kinds[name] = kind if kinds.get(name, "replicated") == "replicated" else kinds[name]
    return kinds


def _argument(path: str) -> str:
    return re.split(r"[.\[]", path)[0]


def _state(partitioned: Partitioned) -> State:
    leaves = partitioned.leaves
    alike: dict[str, list[LeafChoice]] = defaultdict(list)
    for leaf in leaves:
        if leaf.reason and not leaf.reason.startswith("dimension"):
            alike[leaf.reason].append(leaf)
    unusual = [
        Unusual(group[0].path, len(group), sum(leaf.bytes_per_device for leaf in group), reason)
        for reason, group in alike.items()
    ]
    return State(
        len(leaves),
        sum(not leaf.placement.is_replicated for leaf in leaves),
        sum(leaf.bytes_per_device for leaf in leaves if not leaf.placement.is_replicated),
        sum(leaf.bytes_per_device for leaf in leaves if leaf.placement.is_replicated),
        tuple(sorted(unusual, key=lambda each: -each.bytes)),
    )


def _like_examples(partitioned: Partitioned) -> tuple[str, ...]:
    """Replicated inputs as long as the batch; without a batch, those that could be divided."""
    program = partitioned.program
    examples = {port.shape[0] for port in program.inputs if port.role is Role.BATCH}
    return tuple(
        f"{port.path} {port.dtype}[{','.join(map(str, port.shape))}]"
        for port in (program.inputs if program.mesh.size > 1 else ())
        if port.role is Role.OTHER
        and port.shape
        and (port.shape[0] in examples if examples else port.shape[0] and port.shape[0] % program.mesh.size == 0)
    )


def _microbatches(partitioned: Partitioned) -> Microbatches | None:
    mesh, layout = partitioned.layout.mesh, partitioned.layout
    if not mesh.virtual:
        return None
    length = mesh.size_of(mesh.virtual)
    batch = next(port for port in partitioned.program.inputs if port.role is Role.BATCH)
    examples = batch.where.local_shape(batch.shape, partitioned.program.mesh)[0] // length
    steps = [step for step, _ in layout.walk()]
    fetches = [*(fetch for step in steps for fetch in step.fetches), *layout.outputs]
    changes = [(fetch.source, fetch.target) for fetch in fetches]
    changes += [pair for step in steps for pair in zip(step.results, step.kept, strict=True)]
    moves = [move for source, target in changes for move in plan_moves(source, target, mesh)]
    sums = sum(move.kind is MoveKind.ALL_REDUCE and not set(mesh.virtual).isdisjoint(move.axes) for move in moves)
    return Microbatches(length, examples, sums)


def _collectives(program: Program) -> tuple[Moved, ...]:
    """Of the local view."""
    count: Counter[str] = Counter()
    size: dict[str, float] = defaultdict(float)
    for eqn, trips in _executions(program.jaxpr, 1):
        if eqn.primitive.name in COLLECTIVES:
            name = Collective(eqn).kind.removeprefix("collective-").replace("-", "_")
            key = f"{name} over {', '.join(Collective(eqn).axes)}"
            atoms = eqn.outvars if name == "all_gather" else eqn.invars
            count[key] += trips
            size[key] += trips * sum(full_bytes(atom.aval) for atom in atoms)
    return tuple(Moved(key, count[key], size[key]) for key in sorted(count))


def _executions(jaxpr: Any, trips: int) -> Iterator[tuple[Any, int]]:
    """Every equation with how often a step runs it; loops of unknown length count once."""
    known = known_counts(jaxpr)
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn, trips
        repeats = Scan(eqn).length if eqn.primitive.name == "scan" else _while_trips(eqn, known)
        for body in bodies(eqn):
            yield from _executions(body, trips * (1 if repeats is None else repeats))


def _while_trips(eqn: Any, known: Mapping) -> int | None:
    """Of a ``while`` its trips, None if they depend on values; 1 of all else."""
    return trips_of(eqn, known) if eqn.primitive.name == "while" else 1


def _uncounted(jaxpr: Any) -> Iterator[str]:
    """The loops that have collectives, and whose length depends on values."""
    known = known_counts(jaxpr)
    for eqn in open_jaxpr(jaxpr).eqns:
        inside = (each.primitive.name for body in bodies(eqn) for each in equations(body))
        if _while_trips(eqn, known) is None and not COLLECTIVES.keys().isdisjoint(inside):
            yield _at(*_place(eqn))
        for body in bodies(eqn):
            yield from _uncounted(body)


def _moved_activations(partitioned: Partitioned) -> tuple[Moved, ...]:
    where: dict[tuple[str, str], float] = defaultdict(float)
    for step, trips in partitioned.layout.walk():
        for atom, fetch in zip(step.eqn.invars, step.fetches, strict=True):
            if fetch.moves_activation:
                where[_place(step.eqn)] += trips * full_bytes(atom.aval)
    largest_first = sorted(where.items(), key=lambda item: -item[1])
    return tuple(Moved(what, None, size, line) for (what, line), size in largest_first)


def _replicated(partitioned: Partitioned) -> tuple[Noted, ...]:
    """Equations that every device computes whole: for want of a way to split them, or because that moves less."""
    where: Counter[tuple[str, str, str]] = Counter()
    for step, _ in partitioned.layout.walk():
        if isinstance(step.how, Split) and step.how.rule.reported and not any(step.how.splits):
            where[*_place(step.eqn), step.how.rule.reported] += 1
    return tuple(Noted(*noted, times) for noted, times in where.items())


def _whole_products(partitioned: Partitioned) -> tuple[Noted, ...]:
    """Matrix products outside of loops that are not split, though they are a notable part of those; largest first."""
    mesh = partitioned.layout.mesh
    whole: dict[tuple[str, str], float] = defaultdict(float)
    total = 0.0
    for step in partitioned.layout.steps if partitioned.program.mesh.size > 1 else ():
        if step.eqn.primitive.name not in PRODUCTS or not isinstance(step.how, Split):
            continue
        axes = [name for names in step.how.splits for name in names if name not in mesh.virtual]
        flops = work_of(step.eqn).flops / mesh.size_of(axes)
        total += flops
        if not axes:
            whole[_place(step.eqn)] += flops
    shares = sorted(((flops / total, *at) for at, flops in whole.items() if flops > _NOTABLE * total), reverse=True)
    said = "of products outside of loops; split, it would move more"
    return tuple(Noted(what, line, f"{share:.0%} {said}", 1) for share, what, line in shares)


def _annotations(partitioned: Partitioned) -> tuple[Noted, ...]:
    """The user's sharding constraints that are not how values are divided here."""
    where: Counter[tuple[str, str]] = Counter()
    for layout, _ in partitioned.layout.nested_layouts() if partitioned.layout.mesh.size > 1 else ():
        for eqn, constraint in unmet_annotations(layout):
            where[str(constraint), user_line(eqn)] += 1
    return tuple(Noted(what, line, "", times) for (what, line), times in where.items())


def _place(eqn: Any) -> tuple[str, str]:
    return eqn.primitive.name, user_line(eqn)


def _at(what: str, line: str) -> str:
    return f"{what} at {line_text(line)}"
