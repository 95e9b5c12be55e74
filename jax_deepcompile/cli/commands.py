"""The subcommands of ``deepcompile`` that take a step of the user's: each returns the text to print."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile.cli.against import Difference, other_run, plan_in
from jax_deepcompile.cli.steps import HERE, Cluster, StepRequest, sharded_step
from jax_deepcompile.cli.traces import checked, write_trace
from jax_deepcompile.costs.simulate import simulate
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.costs.utilisation import Utilisation
from jax_deepcompile.lowering import cuda_compiler
from jax_deepcompile.lowering.compile import compile_options, peak_bytes
from jax_deepcompile.report.words import percent_text
from jax_deepcompile.runtime.progress import Progress
from jax_deepcompile.training.config import AtLeastOne

_GIB = 1 << 30


def trace(request: StepRequest, cluster: Cluster = HERE) -> str:
    """Says what a step is divided into, and prints it as each device runs it, before planning."""
    with Progress(f"trace {request.step}") as progress:
        step, args = sharded_step(request, cluster, progress)
        traced = step.trace(*args)
        summary, jaxpr = traced.division(), str(traced.sharded.jaxpr)
    if request.json:
        return _document({"division": dataclasses.asdict(summary), "jaxpr": jaxpr})
    return "\n".join([*summary.lines(), "", jaxpr])


def plan(request: StepRequest, cluster: Cluster = HERE, out: Path | None = None) -> str:
    """Plans a step, and prints or writes the plan.

    Args:
      out: file for the plan as JSON.
    """
    with Progress(f"plan {request.step}") as progress:
        step, args = sharded_step(request, cluster, progress)
        made = step.plan(*args)
    if out is not None:
        out.write_text(made.to_json())
    return made.to_json() if request.json else str(made)


def explain(
    request: StepRequest,
    cluster: Cluster = HERE,
    plan: Path | None = None,
    against: str | None = None,
    html: Path | None = None,
    trace: Path | None = None,
) -> str:
    """Says what is decided for a step, and why.

    Args:
      plan: file with a plan to carry out instead of making one.
      against: file with another plan, such as other.json, or another step: tells the difference by your lines.
      html: file for a page that shows it, and what it is told against.
      trace: file, such as trace.json, for the simulated step as Perfetto and Holistic Trace Analysis open it.
    """
    trace = checked(trace)
    options = {} if plan is None else {"plan": plan_in(plan)}
    with Progress(f"explain {request.step}") as progress:
        step, args = sharded_step(request, cluster, progress, **options)
        traced = step.trace(*args)
        beside = {} if against is None else {against: other_run(against, step, args, request, cluster, progress)}
        page = traced.page(beside) if beside or html is not None else None
        if page is not None and html is not None:
            page.write(html)
        progress.say("simulating it") if trace else None
        written, explained = write_trace(trace, traced), traced.explain()
    told = Difference.of(page.data["runs"]) if page is not None and beside else None
    if request.json:
        return _document(explained.to_dict() | ({} if told is None else {"against": dataclasses.asdict(told)}))
    return "\n".join([str(explained), *([] if told is None else ["", *told.lines()]), *written])


def profile(
    request: StepRequest, out: Path = Path("profile.json"), runs: AtLeastOne = 5, trace: Path | None = None
) -> str:
    """Measures a step on the devices of this process, on zeros where it is given shapes.

    Args:
      out: file for the profile as JSON.
      runs: measurements of everything.
      trace: file, such as trace.json, for one measured step of each device and the simulated one beside it, as Perfetto
        and Holistic Trace Analysis open them.

    Raises:
      DevicesNotAttachedError: the devices are not here.
    """
    trace = checked(trace)

    def zeros(leaf: Any) -> Any:
        return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    with Progress(f"profile {request.step}") as progress:
        step, args = sharded_step(request, HERE, progress)
        progress.say("running and measuring it")
        measured = step.profile(*jax.tree.map(zeros, args), runs=runs)
        taken = measured.profile
        out.write_text(taken.to_json())
        progress.say("simulating it")
        traces = write_trace(trace, step.trace(*measured.args), measured.timelines) if trace else []
    if request.json:
        return taken.to_json()
    entries = f"{len(taken.ops)} ops, {len(taken.collectives)} collectives, {len(taken.copies)} copies to {out}"
    step_s = f"step {1e3 * taken.step.seconds:.3f} ms\n" if taken.step is not None else ""
    return "\n".join([step_s + entries, *traces, *taken.fallbacks()])


def compare(request: StepRequest, cluster: Cluster = HERE, html: Path | None = None) -> str:
    """Simulates jax.jit's FSDP and this package's side by side.

    Args:
      html: file for a page that shows them one over the other.
    """
    with Progress(f"compare {request.step}") as progress:
        bare, args = sharded_step(request, cluster, progress, passes=())
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
        achieves, rows, runs, left = bare.trace(*args).utilisation, [], {}, []
        for name, compiled in systems.items():
            progress.say(f"compiling and simulating {name}")
            try:
                made = compiled()
            except errors.MemoryExceededError as error:
                left.append(f"{name}: {error}")
            else:
                played, peak = simulate(made, mesh), peak_bytes(made.memory_analysis())
                rows.append(_Compared.of(name, played, peak, rows[0].step_s if rows else played.step_s, achieves))
                runs[name] = played
        if html is not None and "planned" in runs:
            ours.trace(*args).page({name: run for name, run in runs.items() if name == "jit"}).write(html)
        elif html is not None:
            left.append(f"{html}: not written, as there is no planned step")
    if request.json:
        return _document({"systems": [dataclasses.asdict(row) for row in rows], "left_out": left})
    return "\n".join([_table(rows), *left])


@dataclass(frozen=True)
class _Compared:
    """What one system takes, simulated.

    Attributes:
      times_jit: how many times as fast it is as the first.
      examples_per_s: of each device; this and ``mfu`` are None where nothing is multiplied.
    """

    name: str
    step_s: float
    times_jit: float
    compute_s: float
    communication_s: float
    exposed_s: float
    sent_bytes: int
    peak_bytes: int
    examples_per_s: float | None
    mfu: float | None

    @classmethod
    def of(cls, name: str, run: Simulation, peak: int, jit_s: float, achieves: Utilisation | None) -> "_Compared":
        of_devices = (None, None)
        if achieves is not None:
            of_devices = achieves.examples / run.step_s, achieves.mfu(run.step_s)
        seconds = (run.compute_s, run.communication_s, run.exposed_communication_s)
        return cls(name, run.step_s, jit_s / run.step_s, *seconds, run.sent_bytes, peak, *of_devices)


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
        lines.append((row.name, f"{row.step_s:.4g}", f"{row.times_jit:.2f}", *rest))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def _document(data: dict[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, indent=1)
