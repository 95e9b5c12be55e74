"""Runs the sections one after another, each in processes of its own, and writes what they found after each.

A process of its own gives each section all of the GPU's memory, keeps a crash from the others, and can be ended.
"""

from __future__ import annotations

import datetime
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.gpu_suite.cases import Deadline, Row, error_text, until
from experiments.gpu_suite.facts import machine_facts
from experiments.gpu_suite.processes import run_together
from experiments.gpu_suite.results import Results, SectionResult
from experiments.gpu_suite.sizes import Budgets, Sizes, full
from experiments.gpu_suite.summary import summary
from jax_deepcompile.runtime.files import write_whole

FACTS_S = 60.0
"""For finding out what the machine is: JAX loads CUDA."""

RunPart = Callable[[str, str, Sizes, float], tuple[list[Row], str]]
"""``(section, part, sizes, seconds) -> (rows, problem)``: what one part of a section found, and how it failed."""


def run(out: Path) -> int:
    """Measures the GPU of this machine for at most eight minutes.

    Args:
      out: file for the results as JSON; a summary in Markdown is written beside it.

    Returns:
      The exit code: 0, or 1 if no section measured anything, or 2 if there is no GPU.
    """
    sizes = full()
    deadline = Deadline.after(sizes.budgets.total_s)
    facts, problem = find_facts()
    if facts.get("platform") != "gpu":
        found = problem or f"JAX found {facts['device_kind']} devices only"
        print(f"deepcompile bench --suite gpu: no GPU is attached to this machine: {found}", file=sys.stderr)
        return 2
    results = run_sizes(out, sizes, deadline, facts, in_own_process)
    return 0 if any(section.measured for section in results.sections) else 1


def run_sizes(out: Path, sizes: Sizes, deadline: Deadline, facts: Row, run_part: RunPart) -> Results:
    """Runs all sections and writes what they found to ``out`` after each.

    Args:
      out: as for ``run``.
      sizes: what to measure.
      deadline: of the whole; each section gets its share of the time until then.
      facts: as ``machine_facts`` says.
      run_part: how to run one part of a section.
    """
    results = Results(datetime.date.today().isoformat(), facts["device_kind"], facts["versions"], sizes.name)
    for index, (name, _) in enumerate(sizes.budgets.sections_s):
        seconds = section_seconds(sizes.budgets, index, deadline.left_s)
        print(f"{name}: up to {seconds:.0f} s", flush=True)
        section = run_section(name, sizes, seconds, run_part)
        print(f"{name}: {section.status} after {section.seconds:.0f} s, {len(section.rows)} rows", flush=True)
        results = results.with_section(section)
        results.write(out)
        write_whole(out.with_suffix(".md"), summary(results))
    return results


def section_seconds(budgets: Budgets, index: int, left_s: float) -> float:
    """For the section at ``index``: all that is left but what those after it are to have.

    Where less is left than all are to have, each gets its share of it.
    """
    later_s = sum(seconds for _, seconds in budgets.sections_s[index + 1 :])
    return max(left_s - later_s, left_s * budgets.sections_s[index][1] / (budgets.sections_s[index][1] + later_s))


def run_section(name: str, sizes: Sizes, seconds: float, run_part: RunPart) -> SectionResult:
    """All parts of a section, within ``seconds``; those that come after that are not run, which its error says."""
    begun, deadline, rows, problems = time.monotonic(), Deadline.after(seconds), [], []
    try:
        for part in until(deadline, section_module(name).parts(sizes)):
            found, problem = run_part(name, part, sizes, deadline.left_s)
            rows += found
            problems.append(problem and f"{part or name}: {problem}")
    except Exception as error:
        problems.append(error_text(error))
    return SectionResult(name, tuple(rows), "; ".join(filter(None, problems)), time.monotonic() - begun)


def in_own_process(section: str, part: str, sizes: Sizes, seconds: float) -> tuple[list[Row], str]:
    """The part in a worker process, which is ended some grace after its time is over."""
    arguments = (section, part, sizes, Deadline.after(seconds))
    return run_together(part_rows, [arguments], seconds + sizes.budgets.grace_s)


def part_rows(section: str, part: str, sizes: Sizes, deadline: Deadline) -> Iterator[Row]:
    """The rows of one part of a section, as soon as each is there."""
    return section_module(section).rows(sizes, part, deadline)


def section_module(name: str) -> Any:
    """The module of a section: ``parts(sizes)`` and ``rows(sizes, part, deadline)``."""
    return importlib.import_module(f"experiments.gpu_suite.{name}")


def find_facts() -> tuple[Row, str]:
    """What the machine is, or nothing and why that is not known; this process itself takes no GPU's memory."""
    found, problem = run_together(machine_facts, [()], FACTS_S)
    return (found[0], "") if found else ({}, problem.splitlines()[-1] if problem else "JAX said nothing")
