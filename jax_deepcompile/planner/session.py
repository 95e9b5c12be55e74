"""Planning one step: the plan given, the plan kept from an earlier run, or a new one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import keep_executables
from jax_deepcompile.costs.devices import allocator_bytes_of, machine_of
from jax_deepcompile.costs.entries import StepTime
from jax_deepcompile.costs.fingerprint import fingerprint, program_text
from jax_deepcompile.costs.hardware import CPU_HOST, Hardware, known_hardware
from jax_deepcompile.costs.measured import costs_of
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.apply import apply_plan
from jax_deepcompile.planner.cache import PlanCache
from jax_deepcompile.planner.candidate import Environment
from jax_deepcompile.planner.executables import executables_in
from jax_deepcompile.planner.limits import MemoryLimit, limit_bytes, require_room
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.planner import DEFAULT_PASSES, ONE_DEVICE_PASSES, argument_bytes, make_plan
from jax_deepcompile.planner.recomputation import find_turns
from jax_deepcompile.planner.search import AnyPass, carried_out
from jax_deepcompile.planner.shown import plan_rows, planned_rows
from jax_deepcompile.planner.strategies.keep_gathered import keep_gathered
from jax_deepcompile.planner.version import planner_digest
from jax_deepcompile.runtime.processes import processes_of
from jax_deepcompile.summary import Summarized, Summary


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
    passes: tuple[AnyPass, ...] | None = None
    profile: Profile | None = None
    plan: Plan | None = None
    cache_dir: Path | None = None


@dataclass(frozen=True, repr=False)
class Planned(Summarized):
    """A program as it will run.

    Attributes:
      program: rewritten by the plan.
      plan: the decisions.
      limit_bytes: device memory it was planned for; None for no limit.
      origin: where the plan is from, in words.
      profile: what was measured and planned by; None if nothing was.
      measured: this very step, run; None if it was not.
    """

    program: Program
    plan: Plan
    limit_bytes: int | None
    origin: str
    profile: Profile | None = None
    measured: StepTime | None = None

    def _summary(self) -> Summary:
        rows = (("mesh", self.program.mesh_text), *self.program.state_rows(), *plan_rows(self.plan))
        return Summary(f"Planned {self.program.name}", (*rows, *planned_rows(self)))


def plan_program(program: Program, mesh: AnyMesh, platform: str, wishes: Wishes) -> Planned:
    """Plans the fully sharded ``program`` for ``mesh`` as the user wishes.

    Raises:
      MemoryExceededError: it does not fit, whatever is tried.
      MemoryLimitError, PlanError: a wish that makes no sense.
      OtherProcessError: the processes of this run have different programs, or planning failed in the first.
    """
    if not isinstance(mesh, Mesh):
        return _planned(program, mesh, platform, wishes)
    profile, kind = wishes.profile, mesh.devices.flat[0].device_kind
    known = profile and profile.of_program(fingerprint(program_text(program), machine_of(mesh)))
    planned = _planned(program, mesh, platform, replace(wishes, profile=known))
    foreign = "; the kernels of the profile are another program's, and not used" * (known is not profile)
    unknown = f"; there is no table for {kind}, and that of an H100 is used" * (known_hardware(kind) is None)
    return replace(planned, profile=known, origin=planned.origin + foreign + unknown)


def _planned(program: Program, mesh: AnyMesh, platform: str, wishes: Wishes) -> Planned:
    if not isinstance(mesh, Mesh):
        return Planned(program, Plan(""), None, "not planned: an abstract mesh has no devices to plan for")
    environment = _environment(mesh, platform, wishes)
    require_room(program.name, argument_bytes(program), environment.limit_bytes)
    passes = _passes(program, environment, wishes)
    cache = PlanCache(wishes.cache_dir) if wishes.cache_dir is not None else None
    if cache is not None:
        _keep_executables(cache, mesh)
    if wishes.plan is not None:
        return _given(program, environment, wishes.plan, _fingerprint(program, environment, passes, wishes.profile))
    if not passes and wishes.memory_limit is None:
        return _without_trials(program, environment, wishes)
    mark = _fingerprint(program, environment, passes, wishes.profile)
    return _agreed(program, environment, mark, passes, cache)


def _given(program: Program, environment: Environment, plan: Plan, mark: str) -> Planned:
    """The user's plan as it is. One that was not made for this program and limit is compiled, to see that it fits."""
    if environment.limit_bytes is None or (plan.fingerprint == mark and plan.prediction is not None):
        program = apply_plan(program, environment.mesh, plan)
    else:
        trial = carried_out(program, plan, environment)
        program, plan = trial.program, trial.plan
    return Planned(program, plan, environment.limit_bytes, "given")


def _without_trials(program: Program, environment: Environment, wishes: Wishes) -> Planned:
    """Where no limit must hold and no schedule can be better than another."""
    if wishes.passes is not None:
        return Planned(program, Plan(""), environment.limit_bytes, "nothing was decided: no passes were asked for")
    if environment.mesh.size == 1:
        return Planned(program, Plan(""), environment.limit_bytes, "nothing to decide: there is one device")
    held_bytes = int(_HELD_FRACTION * environment.costs.hardware.memory_bytes / environment.mesh.size)
    plan = keep_gathered(program, held_bytes)
    why = "collectives here do not run beside compute; what loops gather again and again stays, up to"
    origin = f"nothing to hide: {why} {held_bytes / 2**20:.0f} MiB a device"
    return Planned(apply_plan(program, environment.mesh, plan), plan, None, origin)


_HELD_FRACTION = 0.25
"""Of the memory that virtual devices share with all else on their host: for what stays gathered, together."""


def _environment(mesh: Mesh, platform: str, wishes: Wishes) -> Environment:
    costs = costs_of(mesh, wishes.profile)
    allocator_bytes = allocator_bytes_of(mesh)
    own_bytes = _memory_bytes(costs.hardware) if known_hardware(mesh.devices.flat[0].device_kind) else None
    return Environment(mesh, platform, costs, limit_bytes(wishes.memory_limit, own_bytes, allocator_bytes))


def _passes(program: Program, environment: Environment, wishes: Wishes) -> tuple[AnyPass, ...]:
    if wishes.passes is not None:
        return tuple(wishes.passes)
    if environment.platform != "cuda":
        return ()
    if environment.mesh.size > 1:
        return DEFAULT_PASSES
    return ONE_DEVICE_PASSES if find_turns(program, environment.costs) else ()


def _keep_executables(cache: PlanCache, mesh: Mesh) -> None:
    """Keeps what JAX compiles, unless the user has it kept elsewhere.

    Not for devices that are not here: what is compiled for them can be written, but not read back.
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None and mesh.devices.flat[0] in jax.devices():
        executables = executables_in(cache.executables)
        if executables is not None:
            keep_executables(executables)


_KEPT, _MADE = "kept from an earlier run", "made for this run"


def _kept_or_made(
    program: Program, environment: Environment, mark: str, passes: tuple[AnyPass, ...], cache: PlanCache | None
) -> Planned:
    kept = None if cache is None else cache.load(mark)
    if cache is not None and kept is not None:
        try:
            return _kept(program, environment, kept)
        except (errors.PlanError, errors.InvariantError) as error:
            cache.refuse(kept, error.why if isinstance(error, errors.PlanError) else str(error))
    made = make_plan(program, environment, mark, passes)
    if cache is not None:
        cache.store(made.plan)
    return Planned(made.program, made.plan, environment.limit_bytes, _MADE)


def _kept(program: Program, environment: Environment, plan: Plan) -> Planned:
    """A cached plan, carried out.

    Raises:
      PlanError: it cannot be, or may not fit.
    """
    limit, prediction = environment.limit_bytes, plan.prediction
    if limit is not None and (prediction is None or prediction.peak_bytes > limit):
        raise errors.PlanError("the plan", "it does not say that it fits the memory limit")
    return Planned(apply_plan(program, environment.mesh, plan), plan, limit, _KEPT)


def _agreed(
    program: Program, environment: Environment, mark: str, passes: tuple[AnyPass, ...], cache: PlanCache | None
) -> Planned:
    """The program as planned; in a run of several processes by the first one's plan.

    What goes wrong in one goes wrong in all: nobody waits for a plan that does not come.
    """
    processes = processes_of(environment.mesh)
    if processes.is_alone:
        return _kept_or_made(program, environment, mark, passes, cache)
    with processes.together():
        processes.agree(f"plan {program.name} (fingerprint {mark})")
        if processes.is_first:
            planned = _kept_or_made(program, environment, mark, passes, cache)
            processes.first_says(json.dumps([planned.plan.to_json(), planned.origin]))
            return planned
        text, origin = json.loads(processes.first_says(""))
        plan = Plan.from_json(text, "the plan of the first process")
        return Planned(apply_plan(program, environment.mesh, plan), plan, environment.limit_bytes, origin)


def _fingerprint(
    program: Program, environment: Environment, passes: tuple[AnyPass, ...], profile: Profile | None
) -> str:
    """The digest of all that a plan depends on."""
    wishes = {
        "hardware": environment.costs.hardware,
        "limit_bytes": environment.limit_bytes,
        "passes": passes,
        "planner": planner_digest(),
        "profile": "" if profile is None else hashlib.sha256(profile.to_json().encode()).hexdigest(),
    }
    return fingerprint(program_text(program), machine_of(environment.mesh), wishes)


def _memory_bytes(hardware: Hardware) -> int | None:
    """A device's own memory; virtual CPU devices share the host's and have none."""
    return None if hardware is CPU_HOST else hardware.memory_bytes
