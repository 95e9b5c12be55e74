"""What commands show of a step, beside text: the files of ``--html`` and ``--trace``, and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile.cli.outputs import require_writable
from jax_deepcompile.report.chrome_trace import SUFFIXES
from jax_deepcompile.report.page.page import Page
from jax_deepcompile.report.simulated import SimulatedStep, Timelines, simulate
from jax_deepcompile.runtime.progress import Progress
from jax_deepcompile.stages import TracedStep, explain_compilation


def simulated(traced: TracedStep) -> SimulatedStep:
    """The step as compiled.

    Raises:
      ArgumentError: its mesh is abstract.
      MemoryExceededError: it does not fit.
    """
    if not isinstance(traced.mesh, Mesh):
        raise errors.ArgumentError("simulate", "mesh", traced.mesh, "devices: an abstract mesh has none to simulate")
    return simulate(traced.lower().compile(), traced.mesh, traced.compilation.planned.profile)


@dataclass(frozen=True)
class Files:
    """Files that show the step as it is compiled and simulated.

    Attributes:
      html: a page that shows it, and what it is compared with.
      trace: such as trace.json, as Perfetto and Holistic Trace Analysis open it; a measured step, if there is one, of
        each device, beside the simulated one.
    """

    html: Path | None = None
    trace: Path | None = None

    def __bool__(self) -> bool:
        return self != NO_FILES

    def check(self, out: Path | None) -> None:
        """Looks, before what takes its time, at all that is to be written, ``out`` beside it.

        Raises:
          CannotWriteError: a file cannot be written, has a wrong name, or is another one as well.
        """
        said: dict[Path, str] = {}
        for option, file in (("--html", self.html), ("--trace", self.trace), ("--out", out)):
            require_writable(option, file)
            if file is not None:
                other = said.setdefault(file.resolve(), option)
                if other != option:
                    raise errors.CannotWriteError(f"{option} {file}", f"{other} is the same file", "Name another one")
        if self.trace is not None and not self.trace.name.endswith(SUFFIXES):
            expected = f"what opens traces takes files that end in {' or '.join(SUFFIXES)}"
            raise errors.CannotWriteError(f"--trace {self.trace}", expected, f"Say {self.trace.with_suffix('.json')}")

    def write(
        self, traced: TracedStep, progress: Progress, page: Page | None = None, measured: Timelines | None = None
    ) -> dict[str, str]:
        """Writes what is to be written; what it is, by file.

        Args:
          page: of ``traced``, if it is made already.
          measured: what the devices did.

        Raises:
          ArgumentError: the step's mesh is abstract.
          MemoryExceededError: it does not fit.
        """
        written: dict[str, str] = {}
        if self.html is not None:
            progress.say("drawing its page")
            (page or traced.page()).write(self.html)
            written[str(self.html)] = "page"
        if self.trace is not None:
            progress.say("simulating it")
            what = f"trace of the {'measured and the ' * bool(measured)}simulated step"
            for file in simulated(traced).write_trace(self.trace, measured):
                written[str(file)] = what
        return written


NO_FILES = Files()


def explained(traced: TracedStep, written: Mapping[str, str], **own: Any) -> dict[str, Any]:
    """What a command about ``traced`` answers as JSON: all of ``explain``, what is its ``own``, and files ``written``.

    Of a step that does not fit what is known without a plan.
    """
    try:
        explanation = traced.explain(assume=True)
    except errors.MemoryExceededError:
        explanation = explain_compilation(traced.compilation)
    return explanation.to_dict() | own | {"files": [*written]}


def told(written: dict[str, str]) -> list[str]:
    """A line for all files that are the same."""
    lines = []
    for what in dict.fromkeys(written.values()):
        first, *others = (file for file, made in written.items() if made == what)
        lines.append(f"{what}: {first}" + f" and {len(others)} more, one a device" * bool(others))
    return lines
