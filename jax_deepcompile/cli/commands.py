"""The subcommands of ``deepcompile`` that take a step of the user's: each returns the text to print."""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile.api import shard
from jax_deepcompile.cli.traces import checked, write_trace
from jax_deepcompile.costs.devices import as_if_here
from jax_deepcompile.costs.simulate import simulate
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.costs.utilisation import Utilisation
from jax_deepcompile.lowering import cuda_compiler, targets
from jax_deepcompile.lowering.compile import compile_options, peak_bytes
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.runtime.modules import named_by
from jax_deepcompile.runtime.quiet import silenced
from jax_deepcompile.step import ShardedStep
from jax_deepcompile.training.values import bounded

_GIB = 1 << 30
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_DEFAULT_VIRTUAL_DEVICES = 8


Positive = Annotated[int, bounded(int, 1)]


@dataclass(frozen=True)
class Cluster:
    """GPUs that are not here; by default the devices of this process are used.

    Attributes:
      gpu: kind of GPU.
      nodes: machines.
      gpus_per_node: in each; eight, of gh200 four, where it is not said.
      nics_per_node: network cards in each; one a GPU where it is not said.
      nic_gbps: speed of each card.
    """

    gpu: Literal["h100", "h200", "gh200", "b200"] | None = None
    nodes: Positive = 1
    gpus_per_node: Annotated[int | None, bounded(int, 1, or_none=True)] = None
    nics_per_node: Annotated[int | None, bounded(int, 1, or_none=True)] = None
    nic_gbps: float = 400.0

    @property
    def mesh(self) -> Mesh | None:
        """All devices along one axis; None for those of this process."""
        if self.gpu is None:
            return None
        make: Callable[..., targets.Target] = getattr(targets, self.gpu)
        in_each = {} if self.gpus_per_node is None else {"gpus_per_node": self.gpus_per_node}
        target = make(self.nodes, **in_each, nics_per_node=self.nics_per_node, nic_gbps=self.nic_gbps)
        with silenced():
            return target.make_mesh((target.size,), ("fsdp",))


HERE = Cluster()


@dataclass(frozen=True)
class StepRequest:
    """A step, and how it is to run.

    Attributes:
      step: FILE.py:NAME or package.module:NAME of a function that returns (step, state, batch), shapes will do; or of a
        config of `deepcompile train`.
      microbatches: parts of each batch.
      memory_limit: of each device, such as 72GiB or 0.9.
      host_memory_limit: of the host's memory for each device, such as 100GiB; 0 is none.
      cache_dir: where plans are kept between runs.
      devices: virtual CPU devices where there is no accelerator; 8 where it is not said.
      json: print one JSON document instead of text.
    """

    step: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STEP")]
    microbatches: Positive = 1
    memory_limit: str | None = None
    host_memory_limit: str | None = None
    cache_dir: Path | None = None
    devices: Annotated[int | None, bounded(int, 1, or_none=True)] = None
    json: tyro.conf.FlagCreatePairsOff[bool] = False


def trace(request: StepRequest, cluster: Cluster = HERE) -> str:
    """Says what a step is divided into, and prints it as each device runs it, before planning."""
    step, args = sharded_step(request, cluster)
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
    step, args = sharded_step(request, cluster)
    made = step.plan(*args)
    if out is not None:
        out.write_text(made.to_json())
    return made.to_json() if request.json else str(made)


def explain(
    request: StepRequest,
    cluster: Cluster = HERE,
    plan: Path | None = None,
    html: Path | None = None,
    trace: Path | None = None,
) -> str:
    """Says what is decided for a step, and why.

    Args:
      plan: file with a plan to carry out instead of making one.
      html: file for a page that shows it.
      trace: file, such as trace.json, for the simulated step as Perfetto and Holistic Trace Analysis open it.
    """
    trace = checked(trace)
    options = {} if plan is None else {"plan": Plan.from_json(plan.read_text(errors="replace"), str(plan))}
    step, args = sharded_step(request, cluster, **options)
    traced = step.trace(*args)
    if html is not None:
        traced.page().write(html)
    written, explained = write_trace(trace, traced), traced.explain()
    return explained.to_json() if request.json else "\n".join([str(explained), *written])


def profile(
    request: StepRequest, out: Path = Path("profile.json"), runs: Positive = 5, trace: Path | None = None
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

    step, args = sharded_step(request, HERE)
    measured = step.profile(*jax.tree.map(zeros, args), runs=runs)
    taken = measured.profile
    out.write_text(taken.to_json())
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
    bare, args = sharded_step(request, cluster, passes=())
    ours, _ = sharded_step(request, cluster)
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


def use_virtual_devices(count: int | None) -> None:
    """Makes the CPU backend ``count`` devices, if JAX has not started and an accelerator is not what it finds.

    Without a count, a number the user has put in ``XLA_FLAGS`` stays, and else there will be eight.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    if count is None and any(flag.startswith(_DEVICE_COUNT_FLAG) for flag in flags):
        return
    kept = [flag for flag in flags if not flag.startswith(_DEVICE_COUNT_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{_DEVICE_COUNT_FLAG}={count or _DEFAULT_VIRTUAL_DEVICES}"])


def sharded_step(request: StepRequest, cluster: Cluster, **options: Any) -> tuple[ShardedStep, tuple]:
    """The step and its arguments. A step that is sharded already keeps what the request does not say otherwise."""
    use_virtual_devices(request.devices)
    mesh = cluster.mesh
    with as_if_here(mesh):
        step, args = load_step(request.step)
    if not isinstance(step, ShardedStep):
        step = shard(step)
    silent = StepRequest(request.step)
    for name in ("microbatches", "memory_limit", "host_memory_limit", "cache_dir"):
        if getattr(request, name) != getattr(silent, name):
            options[name] = getattr(request, name)
    return step.reshard(mesh, **options), args


def load_step(spec: str) -> tuple[Any, tuple]:
    """``(step, arguments)`` of a specification; see ``StepRequest``.

    Raises:
      StepSpecError: there is no such function, or it returns something else.
    """
    try:
        named = named_by(spec)
    except errors.SpecError as error:
        raise errors.StepSpecError(spec, error.problem) from error
    if type(named).__module__ == "jax_deepcompile.training.config":  # then what it needs is installed and loaded
        from jax_deepcompile.training.train import abstract_step

        step, *args = abstract_step(named)
        return step, tuple(args)
    if not callable(named):
        raise errors.StepSpecError(spec, f"it is {type(named).__name__}, not a function")
    made = named()
    if not isinstance(made, tuple) or len(made) < 2 or not callable(made[0]):
        raise errors.StepSpecError(spec, f"it returned {type(made).__name__}, not (step, state, batch)")
    return made[0], made[1:]


def _table(rows: Sequence[_Compared]) -> str:
    head = ("", "step s", "x jit", "compute s", "communication s", "exposed s", "sent GiB", "peak GiB")
    if rows and rows[0].mfu is not None:
        head += ("examples/s/device", "MFU %")
    lines: list[Sequence[str]] = [head]
    for row in rows:
        sizes = row.sent_bytes / _GIB, row.peak_bytes / _GIB
        rest = [f"{value:.4g}" for value in (row.compute_s, row.communication_s, row.exposed_s, *sizes)]
        if row.examples_per_s is not None and row.mfu is not None:
            rest += [f"{row.examples_per_s:.4g}", f"{100 * row.mfu:.1f}"]
        lines.append((row.name, f"{row.step_s:.4g}", f"{row.times_jit:.2f}", *rest))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def _document(data: dict[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, indent=1)
