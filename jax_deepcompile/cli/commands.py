"""What the subcommands of ``deepcompile`` do with a step of the user's: each returns the text to print."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile.api import ShardedStep, shard
from jax_deepcompile.costs.devices import as_if_here
from jax_deepcompile.costs.simulate import simulate
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.lowering import targets
from jax_deepcompile.lowering.compile import compile_options, peak_bytes
from jax_deepcompile.planner.plan import Plan

_GIB = 1 << 30


@dataclass(frozen=True)
class StepRequest:
    """A step, and where it is to run.

    Attributes:
      spec: ``FILE.py:NAME`` or ``package.module:NAME`` of a function without arguments that returns ``(step, state,
        batch, ...)``, shapes or arrays.
      gpu: ``h100`` or ``h200`` for GPUs that are not here; None for the devices of this process.
      nodes, gpus_per_node, nics_per_node, nic_gbps: of that cluster; see ``targets.h100``.
      microbatches, memory_limit, cache_dir: see ``shard``.
    """

    spec: str
    gpu: str | None = None
    nodes: int = 1
    gpus_per_node: int = 8
    nics_per_node: int | None = None
    nic_gbps: float = 400.0
    microbatches: int = 1
    memory_limit: str | None = None
    cache_dir: Path | None = None

    @property
    def mesh(self) -> Mesh | None:
        """All devices along one axis; None for those of this process."""
        if self.gpu is None:
            return None
        make: Callable[..., targets.Target] = {"h100": targets.h100, "h200": targets.h200}[self.gpu]
        target = make(self.nodes, self.gpus_per_node, nics_per_node=self.nics_per_node, nic_gbps=self.nic_gbps)
        return target.make_mesh((target.size,), ("fsdp",))


def trace(request: StepRequest) -> str:
    """The step as one device runs it, before planning."""
    step, args = _sharded(request)
    return str(step.trace(*args).sharded.jaxpr)


def plan(request: StepRequest, out: Path | None) -> str:
    """The plan; its JSON is written to ``out``."""
    step, args = _sharded(request)
    made = step.plan(*args)
    if out is not None:
        out.write_text(made.to_json())
    return str(made)


def explain(request: StepRequest, given: Path | None) -> str:
    """What is decided for the step and why, or what comes of the plan in the file ``given``."""
    options = {} if given is None else {"plan": Plan.from_json(given.read_text(errors="replace"), str(given))}
    step, args = _sharded(request, **options)
    return step.trace(*args).explain()


def profile(request: StepRequest, out: Path, runs: int) -> str:
    """Measures the step on the devices of this process, on zeros where it is given shapes.

    Raises:
      DevicesNotAttachedError: the devices are not here.
    """
    step, args = _sharded(request)
    taken = step.profile(*jax.tree.map(_zeros, args), runs=runs).profile
    out.write_text(taken.to_json())
    measured = f"{len(taken.ops)} ops, {len(taken.collectives)} collectives, {len(taken.copies)} copies to {out}"
    step_s = f"step {1e3 * taken.step.seconds:.3f} ms\n" if taken.step is not None else ""
    return "\n".join([step_s + measured, *taken.fallbacks()])


def compare(request: StepRequest) -> str:
    """The step as ``jax.jit`` compiles it with the same shardings, and as this package does: one table."""
    bare, args = _sharded(request, passes=())
    ours, _ = _sharded(request)
    mesh = bare.mesh
    if not isinstance(mesh, Mesh):
        raise errors.StepSpecError(request.spec, "its mesh is abstract: there is no hardware to judge it on")
    platform = mesh.devices.flat[0].platform
    options: dict[str, Any] = compile_options("cuda" if platform == "gpu" else platform)
    systems = {
        "jit": lambda: bare.lower_gspmd(*args).compile(compiler_options=options or None),
        "fully sharded": lambda: bare.lower(*args).compile(),
        "planned": lambda: ours.lower(*args).compile(),
    }
    rows, left = [], []
    for name, compiled in systems.items():
        try:
            made = compiled()
        except errors.MemoryExceededError as error:
            left.append(f"{name}: {error}")
        else:
            rows.append((name, simulate(made, mesh), peak_bytes(made.memory_analysis())))
    return "\n".join([_table(rows), *left])


def _sharded(request: StepRequest, **options: Any) -> tuple[ShardedStep, tuple]:
    """The step and its arguments. A step that is sharded already keeps what the request does not say otherwise."""
    mesh = request.mesh
    with as_if_here(mesh):
        step, args = load_step(request.spec)
    if not isinstance(step, ShardedStep):
        step = shard(step)
    silent = StepRequest(request.spec)
    for name in ("microbatches", "memory_limit", "cache_dir"):
        if getattr(request, name) != getattr(silent, name):
            options[name] = getattr(request, name)
    return step.reshard(mesh, **options), args


def load_step(spec: str) -> tuple[Any, tuple]:
    """``(step, arguments)`` of a specification; see ``StepRequest``.

    Raises:
      StepSpecError: there is no such function, or it returns something else.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise errors.StepSpecError(spec, "it has no colon")
    made = _attribute(spec, _module(spec, where), name)()
    if not isinstance(made, tuple) or len(made) < 2 or not callable(made[0]):
        raise errors.StepSpecError(spec, f"it returned {type(made).__name__}, not (step, state, batch)")
    return made[0], made[1:]


def _module(spec: str, where: str) -> Any:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = Path(where).resolve()
        if not path.exists():
            raise errors.StepSpecError(spec, f"there is no file {where}")
        sys.path.insert(0, str(path.parent))
        found = importlib.util.spec_from_file_location(path.stem, path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[path.stem] = module
        found.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if where.split(".")[0] != (error.name or "").split(".")[0]:
            raise
        raise errors.StepSpecError(spec, f"there is no module {where}") from error
    return module


def _attribute(spec: str, module: Any, name: str) -> Callable[[], Any]:
    found = getattr(module, name, None)
    if not callable(found):
        raise errors.StepSpecError(spec, f"{module.__name__} has no function {name}")
    return found


def _zeros(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def _table(rows: Sequence[tuple[str, Simulation, int]]) -> str:
    head = ("", "step s", "x jit", "compute s", "communication s", "exposed s", "sent GiB", "peak GiB")
    first = rows[0][1].step_s
    cells = [
        (
            name,
            f"{run.step_s:.4g}",
            f"{first / run.step_s:.2f}",
            f"{run.compute_s:.4g}",
            f"{run.communication_s:.4g}",
            f"{run.exposed_communication_s:.4g}",
            f"{run.sent_bytes / _GIB:.4g}",
            f"{peak / _GIB:.4g}",
        )
        for name, run, peak in rows
    ]
    widths = [max(len(row[column]) for row in (head, *cells)) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *cells)
    )
