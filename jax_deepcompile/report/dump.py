"""Programs before and after each stage of compilation and each kind of decision, written to files to read."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.report.printer import changed_counts, readable
from jax_deepcompile.transforms import carry_out, in_order

VARIABLE = "DEEPCOMPILE_DUMP"
"""The environment variable that names a folder for the dumps of every step that is compiled."""


@dataclass(frozen=True)
class Rewritten:
    """What one stage did.

    Attributes:
      before: the program that it was given; None for the first.
      said: what was decided, a line each.
    """

    name: str
    before: Program | None
    after: Program
    seconds: float
    said: tuple[str, ...] = ()

    def summary(self) -> str:
        changed = "" if self.before is None else f"; {changed_counts(self.before, self.after)}"
        return "\n".join([f"{self.name}: {self.seconds:.3f} s{changed}", *(f"  {line}" for line in self.said)])


def decisions_of(plan: Plan, base: Program, mesh: AnyMesh) -> Iterator[Rewritten]:
    """What each kind of decision of ``plan`` does to ``base``, in order."""
    before = base
    for kind in in_order(map(type, plan.decisions)):
        began_s = perf_counter()
        after = carry_out(before, mesh, plan.of(kind))
        said = tuple(each.describe() for each in plan.of(kind))
        yield Rewritten(kind.kind, before, after, perf_counter() - began_s, said)
        before = after


def own_folder(folder: Path, name: str) -> Path:
    """A folder in ``folder`` that is not there yet, for one compilation of the step ``name``."""
    stem = re.sub(r"\W+", "_", name)
    taken = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return folder / next(each for each in map(f"{stem}_{{}}".format, itertools.count()) if each not in taken)


def write(folder: Path, stages: Sequence[Rewritten], costs: CostModel | None = None) -> None:
    """Writes each stage's programs, and ``summary.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, stage in enumerate(stages):
        stem = f"{number:02}_{stage.name.replace(' ', '_')}"
        if stage.before is not None:
            (folder / f"{stem}.before.txt").write_text(readable(stage.before, costs))
        (folder / f"{stem}.after.txt").write_text(f"{stage.summary()}\n\n{readable(stage.after, costs)}")
    (folder / "summary.txt").write_text("".join(f"{stage.summary()}\n" for stage in stages))
