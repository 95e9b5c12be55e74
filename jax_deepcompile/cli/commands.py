"""The subcommands of ``deepcompile`` that take a step of the user's: each returns the text to print."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile.cli.against import Difference, other_step
from jax_deepcompile.cli.files import NO_FILES, Files, explained, simulated, told
from jax_deepcompile.cli.options import HERE, Cluster
from jax_deepcompile.cli.steps import StepRequest, sharded_step
from jax_deepcompile.costs.simulate import simulate
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.costs.utilisation import Utilisation
from jax_deepcompile.lowering import cuda_compiler
from jax_deepcompile.lowering.compile import compile_options, peak_bytes
from jax_deepcompile.report.headline import simulated_text
from jax_deepcompile.report.words import percent_text, seconds_text
from jax_deepcompile.runtime.progress import Progress
from jax_deepcompile.training.config import AtLeastOne

_GIB = 1 << 30

_FULLY_SHARDED: dict[str, Any] = {"passes": (), "plan": None, "measure": False}
"""Without anything planned."""


def trace(request: StepRequest, cluster: Cluster = HERE, files: Files = NO_FILES) -> str:
    """Says what a step is divided into, and prints it as each device runs it, before planning."""
    files.check(request.out)
    with Progress(f"trace {request.step}") as progress:
        step, args = sharded_step(request, cluster, progress, **_FULLY_SHARDED)
        traced = step.trace(*args)
        summary, jaxpr = traced.division(), str(traced.sharded.jaxpr)
        written = files.write(traced, progress)
        text = "\n".join([*summary.lines(), "", jaxpr, *told(written)])
        return request.answer(lambda: explained(traced, written, jaxpr=jaxpr), text)


def plan(request: StepRequest, cluster: Cluster = HERE, files: Files = NO_FILES) -> str:
    """Plans a step, and prints the plan; --out is the file that --plan takes."""
    files.check(request.out)
    with Progress(f"plan {request.step}") as progress:
        step, args = sharded_step(request, cluster, progress)
        traced = step.trace(*args)
        made, written = traced.plan(), files.write(traced, progress)
        text = "\n".join([str(made), *told(written)])
        return request.answer(lambda: explained(traced, written, plan=json.loads(made.to_json())), text)


def explain(request: StepRequest, cluster: Cluster = HERE, files: Files = NO_FILES, against: str | None = None) -> str:
    """Says what is decided for a step, and why.

    Args:
      against: file with another plan, such as other.json, or another step: tells the difference by your lines.
    """
    files.check(request.out)
    with Progress(f"explain {request.step}") as progress:
        step, args = sharded_step(request, cluster, progress)
        traced = step.trace(*args)
        beside = {} if against is None else {against: other_step(against, step, args, request, cluster, progress)}
        page = traced.page(beside) if beside or files.html is not None else None
        written, said = files.write(traced, progress, page), str(traced.explain(assume=True))
    difference = Difference.of(page.data["runs"]) if page is not None and beside else None
    own = {} if difference is None else {"against": dataclasses.asdict(difference)}
    against_it = [] if difference is None else ["", *difference.lines()]
    return request.answer(lambda: explained(traced, written, **own), "\n".join([said, *against_it, *told(written)]))


def profile(request: StepRequest, cluster: Cluster = HERE, files: Files = NO_FILES, runs: AtLeastOne = 5) -> str:
    """Measures a step on the devices of this process, on zeros where it is given shapes.

    What was measured is written into profile.json, or what --out names, which is the file that --profile takes. It is
    told, and drawn, beside what the same program takes simulated by it.

    Args:
      runs: measurements of everything.

    Raises:
      DevicesNotAttachedError: the devices are not here.
    """
    request = dataclasses.replace(request, out=request.out or Path("profile.json"))
    files.check(request.out)

    def zeros(leaf: Any) -> Any:
        return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    with Progress(f"profile {request.step}") as progress:
        step, args = sharded_step(request, cluster, progress)
        progress.say("running and measuring it")
        measured = step.profile(*jax.tree.map(zeros, args), runs=runs)
        taken = measured.profile
        traced = step.reshard(plan=step.plan(*args), profile=taken).trace(*measured.args)
        traced.compilation.runs.measured = taken.step
        run = measured.measured_run(simulated(traced)) if files.html else None
        page = traced.page({"one measured run": run}) if run is not None else None
        written = files.write(traced, progress, page, measured.timelines) if files else {}
    entries = f"{len(taken.ops)} ops, {len(taken.collectives)} collectives, {len(taken.copies)} copies to {request.out}"
    headline = traced.explain(assume=True).headline
    step_s = f"step {headline.step_text()}\n" if taken.step is not None else ""
    text = "\n".join([step_s + entries, *told(written), *taken.fallbacks()])
    return request.answer(lambda: explained(traced, written, profile=json.loads(taken.to_json())), text)


def compare(request: StepRequest, cluster: Cluster = HERE, files: Files = NO_FILES) -> str:
    """Simulates jax.jit's FSDP and this package's side by side; files show the planned step, a page over jax.jit's."""
    files.check(request.out)
    with Progress(f"compare {request.step}") as progress:
        bare, args = sharded_step(request, cluster, progress, **_FULLY_SHARDED)
        ours = sharded_step(request, cluster, progress)[0]
        mesh = bare.mesh
        if not isinstance(mesh, Mesh):
            raise errors.StepSpecError(request.step, "its mesh is abstract: there is no hardware to simulate it on")
        platform = mesh.devices.flat[0].platform
        options: dict[str, Any] = compile_options("cuda" if platform == "gpu" else platform)
        systems = {
            "jit": lambda: bare.lower_gspmd(*args).compile(compiler_options=options or None),
            "fully sharded": lambda: bare.lower(*args).compile(),
            "planned": lambda: ours.lower(*args).compile(),
        }
        achieves, costs = bare.trace(*args).utilisation, request.sharding.of_shard().get("profile")
        rows: list[_Compared] = []
        runs: dict[str, Simulation] = {}
        left, written = list[str](), dict[str, str]()
        for name, compiled in systems.items():
            progress.say(f"compiling and simulating {name}")
            try:
                made = compiled()
            except errors.MemoryExceededError as error:
                left.append(f"{name}: {error}")
            except Exception as error:  # of whatever type JAX has for what its partitioner cannot divide
                if name != "jit":
                    raise
                left.append(f"jit: does not compile: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            else:
                runs[name] = simulate(made, mesh, costs)
                rows.append(_Compared.of(name, runs, peak_bytes(made.memory_analysis()), achieves))
        traced = ours.trace(*args)
        if files and "planned" in runs:
            page = traced.page({name: run for name, run in runs.items() if name == "jit"}) if files.html else None
            written = files.write(traced, progress, page)
        elif files:
            left.append("no files are written, as there is no planned step")
        own = {"systems": [dataclasses.asdict(row) for row in rows], "left_out": left}
        text = "\n".join([simulated_text(mesh, costs), _table(rows), *left, *told(written)])
        return request.answer(lambda: _beside_jit(explained(traced, written, **own), rows), text)


def _beside_jit(document: dict[str, Any], rows: Sequence["_Compared"]) -> dict[str, Any]:
    """``document`` of a step whose headline says what it is beside ``jax.jit``, where both were simulated."""
    by_name = {row.name: row for row in rows}
    if by_name.keys() >= {"jit", "planned"}:
        step_s = seconds_text(by_name["jit"].step_s)
        said = f"{step_s}, simulated; this step is {by_name['planned'].times_jit:.2f}x as fast"
        document["headline"]["against_jit"] = said
    return document


@dataclass(frozen=True)
class _Compared:
    """What one system takes, simulated.

    Attributes:
      times_jit: how many times as fast as ``jax.jit``; None if that does not compile.
      examples_per_s: of each device; this and ``mfu`` are None where nothing is multiplied.
    """

    name: str
    step_s: float
    times_jit: float | None
    compute_s: float
    communication_s: float
    exposed_s: float
    sent_bytes: int
    peak_bytes: int
    examples_per_s: float | None
    mfu: float | None

    @classmethod
    def of(cls, name: str, runs: Mapping[str, Simulation], peak: int, achieves: Utilisation | None) -> "_Compared":
        """Of the one called ``name`` of ``runs``."""
        run, of_devices = runs[name], (None, None)
        times_jit = runs["jit"].step_s / run.step_s if "jit" in runs else None
        if achieves is not None:
            of_devices = achieves.examples / run.step_s, achieves.mfu(run.step_s)
        seconds = (run.compute_s, run.communication_s, run.exposed_communication_s)
        return cls(name, run.step_s, times_jit, *seconds, run.sent_bytes, peak, *of_devices)


def install_compiler() -> str:
    """Brings XLA's compiler for GPUs that are not here, once for each version of jax.

    Some 180 MB by pip, into a folder of its own, so that other JAX programs do not find it.
    """
    return cuda_compiler.install()


def _table(rows: Sequence[_Compared]) -> str:
    head = ("", "step s", "x jit", "compute s", "communication s", "exposed s", "sent GiB", "peak GiB")
    if rows and rows[0].mfu is not None:
        head += ("examples/s/device", "MFU")
    lines: list[Sequence[str]] = [head]
    for row in rows:
        sizes = row.sent_bytes / _GIB, row.peak_bytes / _GIB
        rest = [f"{value:.4g}" for value in (row.compute_s, row.communication_s, row.exposed_s, *sizes)]
        if row.examples_per_s is not None and row.mfu is not None:
            rest += [f"{row.examples_per_s:.4g}", percent_text(row.mfu)]
        lines.append((row.name, f"{row.step_s:.4g}", "-" if row.times_jit is None else f"{row.times_jit:.2f}", *rest))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
