"""What ``explain()`` returns: figures that one quotes, where time and memory go, what was decided; data that prints."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_deepcompile.costs.utilisation import Utilisation
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.partition.partition import Partitioned
from jax_deepcompile.planner.session import Planned
from jax_deepcompile.report.division import Division, division_of
from jax_deepcompile.report.headline import Headline, headline_of
from jax_deepcompile.report.peak import PeakMemory, peak_memory_of
from jax_deepcompile.report.planning import Decisions, decisions_of
from jax_deepcompile.report.seconds import Seconds, seconds_of


@dataclass(frozen=True, repr=False)
class Explanation:
    """What was decided for a step and why, as fields; printed, and last in a notebook's cell, it is their text.

    Attributes:
      headline: what one quotes.
      seconds: where the time goes.
      memory: what is in a device's memory at the peak.
      decisions: the plan, and what each decision bought.
      division: what every argument is, how state is divided, what is sent.
    """

    headline: Headline
    seconds: Seconds
    memory: PeakMemory
    decisions: Decisions
    division: Division

    def __str__(self) -> str:
        return "\n\n".join("\n".join(lines) for lines in self._sections())

    def __repr__(self) -> str:
        return str(self)

    def __contains__(self, text: str) -> bool:
        """Whether its text says so."""
        return text in str(self)

    def _repr_html_(self) -> str:
        """Its sections to fold, the first one open."""
        parts = []
        for number, (head, *rest) in enumerate(self._sections()):
            body = html.escape("\n".join(rest))
            is_open = " open" * (number == 0)
            parts.append(f"<details{is_open}><summary>{html.escape(head)}</summary><pre>{body}</pre></details>")
        return "".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON has them."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False, indent=1)

    def _sections(self) -> list[list[str]]:
        return [getattr(self, each.name).lines() for each in dataclasses.fields(self)]


def explain(
    program: Program,
    partitioned: Partitioned,
    sharded: Program,
    reasons: Mapping[str, str],
    mesh: AnyMesh,
    planned: Planned | None = None,
    launches: Mapping[str, int] | None = None,
    achieves: Utilisation | None = None,
) -> Explanation:
    """What there is to say of a step.

    Args:
      program: the global view.
      partitioned: what was decided for it.
      sharded: the local view.
      reasons: why each argument is what it is, by its name.
      mesh: the devices.
      planned: the local view as planned, if it is.
      launches: how often what is compiled launches each collective in a step, if it is.
      achieves: what a step is measured by.
    """
    return Explanation(
        headline_of(program, mesh, planned, achieves),
        seconds_of(planned, achieves),
        peak_memory_of(program, sharded, planned),
        decisions_of(planned),
        division_of(program, partitioned, sharded, reasons, planned, launches),
    )
