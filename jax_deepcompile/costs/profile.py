"""What was measured of a step and of the machine it runs on: a frozen table, kept as JSON and merged with others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from jax_deepcompile import errors
from jax_deepcompile.costs import frozen_json
from jax_deepcompile.costs.entries import (
    CollectiveFit,
    CollectiveKind,
    CopyFit,
    Direction,
    Machine,
    MemoryFigures,
    Method,
    OpTime,
    Source,
    StepTime,
)
from jax_deepcompile.summary import Branch, Summarized, Summary, size_text

FORMAT = 3
"""Of the JSON text; a change of any field makes it another."""

Entry = TypeVar("Entry", OpTime, CollectiveFit, CopyFit)


@dataclass(frozen=True, repr=False)
class Profile(Summarized):
    """Everything measured of one step on one machine.

    Attributes:
      fingerprint: of the program the ops, the step time and the memory belong to; see ``fingerprint``.
      machine: what collectives and copies belong to.
      ops: device time of HLO ops.
      collectives, copies: fits over bytes.
      step: whole runs; None if it was not run.
      memory: None if it was not compiled.
      program: fingerprint of the program before it was planned, whose kernels the ops are however it is planned; empty
        if nobody knows.
    """

    fingerprint: str
    machine: Machine
    ops: tuple[OpTime, ...] = ()
    collectives: tuple[CollectiveFit, ...] = ()
    copies: tuple[CopyFit, ...] = ()
    step: StepTime | None = None
    memory: MemoryFigures | None = None
    program: str = ""

    def _summary(self) -> Summary:
        rows = (
            ("machine", str(self.machine)),
            ("step", f"{self.step.seconds:.4g} s, {self.step.source}" if self.step else "not run"),
            ("memory", f"{size_text(self.memory.device_bytes)} a device" if self.memory else "not compiled"),
            ("entries", f"{len(self.ops)} ops, {len(self.collectives)} collectives, {len(self.copies)} copies"),
            ("not measured", "\n".join(self.fallbacks())),
        )
        return Summary("Profile", rows, tuple(each for each in self._trees() if each.parts))

    def _trees(self) -> Iterator[Branch]:
        """What each kernel, collective and copy takes; kernels that take most of the step first."""
        ops = sorted(self.ops, key=lambda op: -(op.seconds or 0.0) * op.executions)
        kernels = (Branch(op.name, (op.said(), f"{op.executions} a step", op.where)) for op in ops)
        yield Branch("ops", (f"{len(ops)}",), tuple(kernels))
        over = (Branch(f"{each.kind} over {', '.join(each.axes)}", (each.said(),)) for each in self.collectives)
        yield Branch("collectives", (f"{len(self.collectives)}",), tuple(over))
        copies = (Branch(each.direction, (each.said(),)) for each in self.copies)
        yield Branch("copies", (f"{len(self.copies)}",), tuple(copies))

    def __post_init__(self) -> None:
        for entries in (self.ops, self.collectives, self.copies):
            keys = [entry.key for entry in entries]
            if len(set(keys)) < len(keys):
                raise ValueError(f"two entries for {next(key for key in keys if keys.count(key) > 1)}")

    def collective_s(self, kind: CollectiveKind, axes: Sequence[str], size_bytes: float) -> float | None:
        """Seconds of one collective over ``axes``, in mesh order; None if that was not measured."""
        entry = self._collectives.get((kind, tuple(axes)))
        return entry.fit.seconds(size_bytes) if entry and entry.fit else None

    def copy_s(self, direction: Direction, size_bytes: float) -> float | None:
        """Seconds of a copy of ``size_bytes`` on each device; None if that was not measured."""
        entry = self._copies.get(direction)
        return entry.fit.seconds(size_bytes) if entry and entry.fit else None

    def both_ways(self, direction: Direction) -> float | None:
        """How many times longer a copy takes while others go the other way; None if that was not measured."""
        entry = self._copies.get(direction)
        return entry.both_ways if entry else None

    def op_s(self, name: str) -> float | None:
        """Seconds of one execution of the HLO op ``name``; None if that was not measured."""
        entry = self._ops.get(name)
        return entry.seconds if entry else None

    @cached_property
    def _ops(self) -> Mapping[str, OpTime]:
        return {entry.key: entry for entry in self.ops}

    @cached_property
    def _collectives(self) -> Mapping[tuple[str, tuple[str, ...]], CollectiveFit]:
        return {entry.key: entry for entry in self.collectives}

    @cached_property
    def _copies(self) -> Mapping[str, CopyFit]:
        return {entry.key: entry for entry in self.copies}

    def of_program(self, program: str) -> Profile:
        """What is true of ``program``, a fingerprint: of another one only what belongs to the machine."""
        return self if self.program in ("", program) else replace(self, ops=(), step=None, memory=None)

    def sources(self) -> Iterator[tuple[str, Source]]:
        """Every entry in words, and how it was obtained."""
        for op in self.ops:
            yield f"op {op.name}", op.source
        for collective in self.collectives:
            yield f"{collective.kind} over {', '.join(collective.axes)}", collective.source
        for copy in self.copies:
            yield f"copy {copy.direction}", copy.source
        if self.step:
            yield "step", self.step.source
        if self.memory:
            yield "memory", self.memory.source
            yield "allocator peak", self.memory.allocator_source

    def fallbacks(self) -> tuple[str, ...]:
        """A line for each reason for which entries are left to the analytical model, and which these are."""
        by_reason: dict[str, list[str]] = {}
        for name, source in self.sources():
            if source.method is Method.ANALYTICAL:
                by_reason.setdefault(source.note, []).append(name)
        return tuple(f"{errors.some_of(names, 3)}: {reason}" for reason, names in by_reason.items())

    def merge(self, later: Profile) -> Profile:
        """This profile with what ``later`` knows better.

        Collectives and copies belong to the machine, the rest to the program on it. Of two entries for the same thing
        the later is taken, unless only the earlier was measured. Of another program only the machine's are taken.

        Raises:
          ProfileMismatchError: ``later`` is of another machine.
        """
        if later.machine != self.machine:
            raise errors.ProfileMismatchError("machine", str(self.machine), str(later.machine))
        merged = replace(
            self,
            collectives=_merge(self.collectives, later.collectives),
            copies=_merge(self.copies, later.copies),
        )
        if later.fingerprint != self.fingerprint:
            return merged
        return replace(
            merged,
            ops=_merge(self.ops, later.ops),
            step=_better(self.step, later.step),
            memory=_better_memory(self.memory, later.memory),
        )

    def to_json(self) -> str:
        return frozen_json.dump(_Document(FORMAT, self))

    @classmethod
    def from_json(cls, text: str, name: str = "the text given") -> Profile:
        """The profile that ``to_json``, or ``deepcompile profile --json``, made ``text`` from.

        Raises:
          ProfileFormatError: it is not one; ``name`` is what the error calls it.
        """
        try:
            data = frozen_json.document_in(frozen_json.parse(text), "profile")
            _require_format(data)
            return frozen_json.read(_Document, data).profile
        except (ValueError, TypeError) as error:
            raise errors.ProfileFormatError(name, str(error)) from error

    def write(self, path: Path) -> None:
        path.write_text(self.to_json())

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Raises ``ProfileFormatError`` for a file that ``write`` did not make."""
        return cls.from_json(path.read_text(errors="replace"), str(path))


@dataclass(frozen=True)
class _Document:
    format: int
    profile: Profile


def _require_format(data: Any) -> None:
    """Another format has other keys, and the number says more than their differences."""
    found = data.get("format") if isinstance(data, dict) else None
    if isinstance(found, int) and found != FORMAT:
        raise ValueError(f"it has format {found}, and this version reads format {FORMAT}")


def _merge(earlier: tuple[Entry, ...], later: tuple[Entry, ...]) -> tuple[Entry, ...]:
    merged = {entry.key: entry for entry in earlier}
    for entry in later:
        merged[entry.key] = _better(merged.get(entry.key), entry)
    return tuple(merged.values())


def _better(earlier, later):
    """The later entry, unless only the earlier one was measured."""
    if earlier is None or later is None:
        return later or earlier
    lost = later.source.method is Method.ANALYTICAL and earlier.source.method is not Method.ANALYTICAL
    return earlier if lost else later


def _better_memory(earlier: MemoryFigures | None, later: MemoryFigures | None) -> MemoryFigures | None:
    """The better figures, with a curve and an allocator's peak from the other where they lack them."""
    best = _better(earlier, later)
    other = earlier if best is later else later
    if best is None or other is None:
        return best
    if best.allocator_peak_bytes is None:
        best = replace(best, allocator_peak_bytes=other.allocator_peak_bytes, allocator_source=other.allocator_source)
    return replace(best, live_bytes=best.live_bytes or other.live_bytes)
