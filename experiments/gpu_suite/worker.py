"""What the suite's processes run: ``python -m experiments.gpu_suite.worker {facts,section,rank}``.

Results go to a file, one JSON value a line, each as soon as it is there: a process that is ended leaves what it had.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from experiments.gpu_suite import lines
from experiments.gpu_suite.cases import Deadline, Row, error_text
from experiments.gpu_suite.sizes import Sizes, named


def section_module(name: str) -> Any:
    """The module of a section: ``parts(sizes)`` and ``rows(sizes, part, deadline)``."""
    return importlib.import_module(f"experiments.gpu_suite.{name}")


def run_part(section: str, part: str, sizes: Sizes, deadline: Deadline, out: Path) -> None:
    """Writes the rows of one part of a section to ``out``, and its error if it ends in one."""
    try:
        for row in section_module(section).rows(sizes, part, deadline):
            lines.append(out, {"row": row})
    except Exception as error:
        lines.append(out, {"error": error_text(error)})


def machine_facts() -> Row:
    """``platform device_kind devices`` and ``versions``, as far as they can be known."""
    import jax

    device = jax.devices()[0]
    packages = {
        name: _version(name) for name in ("jax", "jaxlib", "flax", "optax", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
    }
    versions = {
        "python": platform.python_version(),
        **packages,
        "platform": str(device.client.platform_version).replace("\n", " "),
        "driver": _driver(),
    }
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "versions": {name: found for name, found in versions.items() if found},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _driver() -> str:
    """Of the first GPU, with its clocks and power limit; empty where nvidia-smi is not there to ask."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = "--query-gpu=driver_version,power.limit,clocks.max.sm,clocks.max.mem"
    asked = subprocess.run(
        [tool, query, "--format=csv,noheader"], capture_output=True, text=True, check=False, timeout=30
    )
    return asked.stdout.strip().partition("\n")[0] if asked.returncode == 0 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file for the results")
    tasks = parser.add_subparsers(dest="task", required=True)
    tasks.add_parser("facts", help="what this machine is")
    section = tasks.add_parser("section", help="one part of a section")
    section.add_argument("name")
    section.add_argument("--part", default="")
    section.add_argument("--seconds", type=float, required=True)
    rank = tasks.add_parser("rank", help="one of the processes of the section two_processes")
    rank.add_argument("index", type=int)
    rank.add_argument("--port", type=int, required=True)
    for parser_of_task in (section, rank):
        parser_of_task.add_argument("--sizes", default="full")
    arguments = parser.parse_args()
    if arguments.task == "facts":
        lines.append(arguments.out, machine_facts())
    elif arguments.task == "section":
        deadline = Deadline.after(arguments.seconds)
        run_part(arguments.name, arguments.part, named(arguments.sizes), deadline, arguments.out)
    else:
        from experiments.gpu_suite import rank as pair

        pair.run(arguments.index, arguments.port, named(arguments.sizes).pair, arguments.out)


if __name__ == "__main__":
    main()
