"""Has pytest measure every case on the GPU of this machine, and writes what they found after each.

All run in one process, which pytest-xdist starts anew where a case ends it. Those that need processes of their own come
first, while that one has none of the GPU's memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from experiments.gpu_suite.cases import Row
from experiments.gpu_suite.facts import machine_facts
from experiments.gpu_suite.processes import WorkersFailedError, rows_of
from experiments.gpu_suite.results import Results
from experiments.gpu_suite.summary import summary
from jax_deepcompile.runtime.files import write_whole

CASES = Path(__file__).with_name("test_cases.py")

FACTS_S = 60.0
"""For finding out what the machine is: JAX loads CUDA."""


class Recorder:
    """A plugin of pytest's.

    Attributes:
      out: file for the results as JSON; a summary in Markdown is written beside it.
      results: so far.
      missed: by section, cases that time was over for.
      worker: id of the process that runs the cases.
    """

    def __init__(self, out: Path, results: Results) -> None:
        self.out, self.results, self.missed = out, results, Counter[str]()

    def pytest_xdist_newgateway(self, gateway: Any) -> None:
        self.worker: int = gateway._rinfo().pid

    def pytest_keyboard_interrupt(self) -> None:
        """The process that runs the cases is stopped, too, and ends those that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker, signal.SIGINT)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of a case that is over, or of a process that it ended."""
        if report.passed and report.when != "call":
            return
        name, _, case = report.nodeid.partition("[")[2].removesuffix("]").partition(": ")
        found = report.user_properties if report.when == "call" else ()
        rows = [json.loads(str(row), parse_constant=str) for _, row in found]
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            rows.append({"case": case, "error": str(getattr(crash, "message", report.longrepr))[:2000]})
        self.missed[name] += report.skipped
        section = self.results.section(name)
        section = dataclasses.replace(
            section,
            rows=(*section.rows, *rows),
            error=f"out of time: {self.missed[name]} cases were not reached" if self.missed[name] else "",
            seconds=section.seconds + report.duration,
        )
        self.results = self.results.with_section(section)
        self.results.write(self.out)
        write_whole(self.out.with_suffix(".md"), summary(self.results))


def run(out: Path, sizes: str = "full") -> int:
    """Measures the GPU of this machine for at most eight minutes.

    Args:
      out: as a ``Recorder``'s.
      sizes: as ``measure`` takes them.

    Returns:
      The exit code: 0, or 1 if no section measured anything, or 2 if there is no GPU.
    """
    facts, problem = find_facts()
    if facts.get("platform") != "gpu":
        found = problem or f"JAX found {facts['device_kind']} devices only"
        print(f"deepcompile bench --suite: no GPU is attached to this machine: {found}", file=sys.stderr)
        return 2
    results = measure(out, sizes, facts)
    return 0 if any(section.measured for section in results.sections) else 1


def measure(out: Path, sizes: str, facts: Row, cases: Path = CASES) -> Results:
    """What the cases found.

    Args:
      out: as a ``Recorder``'s.
      sizes: a name in ``SIZES``.
      facts: as ``machine_facts`` says.
      cases: the tests of pytest's that they are.
    """
    today = datetime.date.today().isoformat()
    recorder = Recorder(out, Results(today, facts["device_kind"], facts["versions"], sizes))
    once = ("-n1", "--max-worker-restart=1000", "--tb=line", "-Wdefault", "-pno:cacheprovider")
    pytest.main([str(cases), *once, f"--sizes={sizes}", f"--begun-s={time.monotonic()}"], plugins=[recorder])
    return recorder.results


def find_facts() -> tuple[Row, str]:
    """What the machine is, or nothing and why that is not known; this process itself takes no GPU's memory."""
    try:
        (facts,) = rows_of(machine_facts, [()], FACTS_S)
    except WorkersFailedError as error:
        return {}, str(error).splitlines()[-1]
    return facts, ""
