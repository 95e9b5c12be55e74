"""Planning one step: the plan given, the plan kept from an earlier run, or a new one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile.cache import PlanCache
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.devices import hardware_of, network_of
from jax_deepcompile.costs.entries import Axis, Machine
from jax_deepcompile.costs.fingerprint import fingerprint, program_text
from jax_deepcompile.costs.hardware import CPU_HOST, Hardware
from jax_deepcompile.costs.measured import MeasuredCostModel
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planning.apply import apply_plan
from jax_deepcompile.planning.keep_gathered import keep_gathered
from jax_deepcompile.planning.limits import MemoryLimit, limit_bytes
from jax_deepcompile.planning.pass_manager import Environment, Opening, Pass
from jax_deepcompile.planning.plan import Plan
from jax_deepcompile.planning.planner import DEFAULT_PASSES, ONE_DEVICE_PASSES, make_plan
from jax_deepcompile.planning.turns import find_turns


@dataclass(frozen=True)
class Wishes:
    """What the user asked of planning.

    Attributes:
      memory_limit: device memory a step may take; see ``planning.limits``.
      passes: what to try instead of the default passes; empty for none.
      profile: measured times to plan by.
      plan: to carry out as it is.
      cache_dir: where plans and executables are kept between runs.
    """

    memory_limit: MemoryLimit = None
    passes: tuple[Pass | Opening, ...] | None = None
    profile: Profile | None = None
    plan: Plan | None = None
    cache_dir: Path | None = None


@dataclass(frozen=True)
class Planned:
    """A program as it will run.

    Attributes:
      program: rewritten by the plan.
      plan: the decisions.
      limit_bytes: device memory it was planned for; None for no limit.
      origin: where the plan is from, in words.
      profile: what was measured and planned by; None if nothing was.
    """

    program: Program
    plan: Plan
    limit_bytes: int | None
    origin: str
    profile: Profile | None = None


def plan_program(program: Program, mesh: AnyMesh, platform: str, wishes: Wishes) -> Planned:
    """Plans the fully sharded ``program`` for ``mesh`` as the user wishes.

    Raises:
      MemoryExceededError: it does not fit, whatever is tried.
      MemoryLimitError, PlanError: a wish that makes no sense.
      PlanMismatchError: the processes of this run have different programs.
    """
    return replace(_planned(program, mesh, platform, wishes), profile=wishes.profile)


def _planned(program: Program, mesh: AnyMesh, platform: str, wishes: Wishes) -> Planned:
    if not isinstance(mesh, Mesh):
        return Planned(program, Plan(""), None, "not planned: an abstract mesh has no devices to plan for")
    environment = _environment(mesh, platform, wishes)
    if wishes.plan is not None:
        return Planned(apply_plan(program, mesh, wishes.plan), wishes.plan, environment.limit_bytes, "given")
    passes = _passes(program, environment, wishes)
    if not passes and wishes.memory_limit is None:
        return _without_trials(program, environment, wishes)
    mark = _fingerprint(program, mesh)
    cache = PlanCache(wishes.cache_dir) if wishes.cache_dir is not None else None
    if cache is not None:
        _keep_executables(cache, mesh)
        kept = cache.load(mark)
        if kept is not None and (planned := _carry_out(program, kept, environment)) is not None:
            return planned
    plan = _agreed(program, environment, mark, passes)
    if cache is not None:
        cache.store(plan)
    return Planned(apply_plan(program, mesh, plan), plan, environment.limit_bytes, "made for this run")


def _without_trials(program: Program, environment: Environment, wishes: Wishes) -> Planned:
    """Where no limit must hold and no schedule can be better than another."""
    if wishes.passes is not None:
        return Planned(program, Plan(""), None, "nothing was decided: no passes were asked for")
    if environment.mesh.size == 1:
        return Planned(program, Plan(""), None, "nothing to decide: there is one device")
    held_bytes = int(_HELD_FRACTION * environment.costs.hardware.memory_bytes / environment.mesh.size)
    plan = keep_gathered(program, held_bytes)
    why = "collectives here do not run beside compute; what loops gather again and again stays, up to"
    origin = f"nothing to hide: {why} {held_bytes / 2**20:.0f} MiB a device"
    return Planned(apply_plan(program, environment.mesh, plan), plan, None, origin)


_HELD_FRACTION = 0.25
"""Of the memory that virtual devices share with all else on their host: for what stays gathered, together."""


def _environment(mesh: Mesh, platform: str, wishes: Wishes) -> Environment:
    kind = _device_kind(mesh)
    hardware = hardware_of(kind)
    costs = _costs(mesh, hardware, wishes.profile)
    return Environment(mesh, platform, costs, limit_bytes(wishes.memory_limit, _memory_bytes(hardware)))


def _costs(mesh: Mesh, hardware: Hardware, profile: Profile | None) -> CostModel:
    network = network_of(mesh.devices.flat)
    if profile is None:
        return CostModel(hardware, network)
    found = {axis.name: axis.size for axis in profile.machine.axes}
    for what, expected, measured in (
        ("device kind", _device_kind(mesh), profile.machine.device_kind),
        ("mesh", str(dict(mesh.shape)), str({name: found[name] for name in mesh.axis_names if name in found})),
    ):
        if measured != expected:
            raise errors.ProfileMismatchError(what, expected, measured)
    return MeasuredCostModel(hardware, network, profile=profile)


def _passes(program: Program, environment: Environment, wishes: Wishes) -> tuple[Pass | Opening, ...]:
    if wishes.passes is not None:
        return tuple(wishes.passes)
    if environment.platform != "cuda":
        return ()
    if environment.mesh.size > 1:
        return DEFAULT_PASSES
    return ONE_DEVICE_PASSES if find_turns(program, environment.costs) else ()


def _keep_executables(cache: PlanCache, mesh: Mesh) -> None:
    """Switches on JAX's persistent compilation cache, unless the user did.

    Not for devices that are not here: what is compiled for them can be written, but not read back.
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None and mesh.devices.flat[0] in jax.devices():
        config.update("jax_compilation_cache_dir", str(cache.executables))


def _carry_out(program: Program, plan: Plan, environment: Environment) -> Planned | None:
    """A cached plan applied, if it fits what is asked now."""
    limit, prediction = environment.limit_bytes, plan.prediction
    if limit is not None and (prediction is None or prediction.peak_bytes > limit):
        return None
    try:
        return Planned(apply_plan(program, environment.mesh, plan), plan, limit, "kept from an earlier run")
    except errors.PlanError:
        return None


def _agreed(program: Program, environment: Environment, mark: str, passes: tuple[Pass | Opening, ...]) -> Plan:
    """The plan; in a run of several processes the first one's."""
    if jax.process_count() == 1:
        return make_plan(program, environment, mark, passes).plan
    marks = _gathered(mark)
    if len(set(marks)) > 1:
        raise errors.PlanMismatchError(program.name, dict(enumerate(marks)))
    plan = make_plan(program, environment, mark, passes).plan if jax.process_index() == 0 else None
    return Plan.from_json(_broadcast(plan.to_json() if plan is not None else ""), "the plan of process 0")


def _gathered(mark: str) -> list[str]:
    rows = np.asarray(multihost_utils.process_allgather(_as_bytes(mark)))
    return [bytes(row.astype(np.uint8)).decode() for row in rows]


def _broadcast(text: str) -> str:
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text.encode()))))
    padded = np.zeros(length, np.uint8)
    own = _as_bytes(text)
    padded[: len(own)] = own
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8)).decode()


def _as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def _fingerprint(program: Program, mesh: AnyMesh) -> str:
    axes = tuple(Axis(name, size) for name, size in zip(program.mesh.names, program.mesh.sizes, strict=True))
    versions = (("jax", jax.__version__), ("jaxlib", jaxlib.version.__version__))
    return fingerprint(program_text(program), Machine(_device_kind(mesh), axes, versions))


def _memory_bytes(hardware: Hardware) -> int | None:
    """A device's own memory; virtual CPU devices share the host's and have none."""
    return None if hardware is CPU_HOST else hardware.memory_bytes


def _device_kind(mesh: Any) -> str:
    return mesh.devices.flat[0].device_kind if isinstance(mesh, Mesh) else "abstract"
