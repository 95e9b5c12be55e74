"""What a run of the suite found, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from experiments.gpu_suite.cases import Row
from jax_deepcompile.runtime.files import write_whole

FORMAT = 1
"""Of the JSON text."""


class Status(StrEnum):
    """How far a section got."""

    COMPLETE = "complete"
    PARTIAL = "partial"
    FAILED = "failed"


@dataclass(frozen=True)
class SectionResult:
    """One section.

    Attributes:
      name: of the section.
      rows: its results; a row with an ``error`` is a case that failed.
      error: what ended it before all was done, in words; empty if nothing did.
      seconds: it took.
    """

    name: str
    rows: tuple[Row, ...]
    error: str
    seconds: float

    @property
    def measured(self) -> tuple[Row, ...]:
        """The rows without an error."""
        return tuple(row for row in self.rows if "error" not in row)

    @property
    def status(self) -> Status:
        if not self.measured:
            return Status.FAILED
        return Status.PARTIAL if self.error or len(self.measured) < len(self.rows) else Status.COMPLETE


@dataclass(frozen=True)
class Results:
    """A run of the suite.

    Attributes:
      date: it was begun, such as ``2026-11-21``.
      device_kind: as JAX names it.
      versions: by name, of what was measured with.
      sizes: name of what was measured, by its name in ``SIZES``.
      sections: in order.
    """

    date: str
    device_kind: str
    versions: Mapping[str, str]
    sizes: str
    sections: tuple[SectionResult, ...] = ()

    def section(self, name: str) -> SectionResult:
        """The section of that name; an empty one if it did not run."""
        empty = SectionResult(name, (), "it did not run", 0.0)
        return next((section for section in self.sections if section.name == name), empty)

    def with_section(self, section: SectionResult) -> Results:
        """These with a section, in place of the one of its name."""
        sections = {each.name: each for each in self.sections} | {section.name: section}
        return dataclasses.replace(self, sections=tuple(sections.values()))

    def to_json(self) -> str:
        data = dataclasses.asdict(self)
        for section, entry in zip(self.sections, data["sections"], strict=True):
            entry["status"] = section.status
        return json.dumps({"format": FORMAT} | data, allow_nan=False, indent=1)

    def write(self, path: Path) -> None:
        write_whole(path, self.to_json() + "\n")
