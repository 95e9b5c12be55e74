"""Planning one step: the plan given, the plan kept from an earlier run, or a new one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile.cache import PlanCache
from jax_deepcompile.costs.devices import allocator_bytes_of, has_table, machine_of
from jax_deepcompile.costs.entries import StepTime
from jax_deepcompile.costs.fingerprint import fingerprint, program_text
from jax_deepcompile.costs.hardware import CPU_HOST, Hardware
from jax_deepcompile.costs.measured import costs_of
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planning.apply import apply_plan
from jax_deepcompile.planning.keep_gathered import keep_gathered
from jax_deepcompile.planning.limits import MemoryLimit, limit_bytes, require_room
from jax_deepcompile.planning.pass_manager import AnyPass, carried_out
from jax_deepcompile.planning.plan import Plan
from jax_deepcompile.planning.planner import DEFAULT_PASSES, ONE_DEVICE_PASSES, argument_bytes, make_plan
from jax_deepcompile.planning.trials import Environment
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
    passes: tuple[AnyPass, ...] | None = None
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
      measured: this very step, run; None if it was not.
    """

    program: Program
    plan: Plan
    limit_bytes: int | None
    origin: str
    profile: Profile | None = None
    measured: StepTime | None = None


def plan_program(program: Program, mesh: AnyMesh, platform: str, wishes: Wishes) -> Planned:
    """Plans the fully sharded ``program`` for ``mesh`` as the user wishes.

    Raises:
      MemoryExceededError: it does not fit, whatever is tried.
      MemoryLimitError, PlanError: a wish that makes no sense.
      PlanMismatchError: the processes of this run have different programs.
    """
    if not isinstance(mesh, Mesh):
        return _planned(program, mesh, platform, wishes)
    profile, kind = wishes.profile, mesh.devices.flat[0].device_kind
    known = profile and profile.of_program(fingerprint(program_text(program), machine_of(mesh)))
    planned = _planned(program, mesh, platform, replace(wishes, profile=known))
    foreign = "; the kernels of the profile are another program's, and not used" * (known is not profile)
    unknown = f"; there is no table for {kind}, and that of an H100 is used" * (not has_table(kind))
    return replace(planned, profile=known, origin=planned.origin + foreign + unknown)


def require_agreement(name: str, planned: Planned, mesh: AnyMesh) -> None:
    """Makes sure that all processes of this run are about to run the same program.

    Raises:
      PlanMismatchError: their collectives would wait for each other forever.
    """
    if jax.process_count() > 1:
        text, options = program_text(planned.program), planned.plan.compiler_options()
        _require_equal(name, fingerprint(text, machine_of(mesh), options))


def _require_equal(name: str, mark: str) -> None:
    marks = _gathered(mark)
    if len(set(marks)) > 1:
        raise errors.PlanMismatchError(name, dict(enumerate(marks)))


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
    own_bytes = _memory_bytes(costs.hardware) if has_table(mesh.devices.flat[0].device_kind) else None
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
    """Switches on JAX's persistent compilation cache, unless the user did.

    Not for devices that are not here: what is compiled for them can be written, but not read back.
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None and mesh.devices.flat[0] in jax.devices():
        config.update("jax_compilation_cache_dir", str(cache.executables))
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


_KEPT, _MADE = "kept from an earlier run", "made for this run"


def _kept_or_made(
    program: Program, environment: Environment, mark: str, passes: tuple[AnyPass, ...], cache: PlanCache | None
) -> Planned:
    kept = None if cache is None else cache.load(mark)
    if cache is not None and kept is not None:
        try:
            return _kept(program, environment, kept)
        except errors.PlanError as error:
            cache.refuse(kept, str(error))
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

    What goes wrong there goes wrong everywhere: nobody waits for a plan that does not come.
    """
    if jax.process_count() == 1:
        return _kept_or_made(program, environment, mark, passes, cache)
    _require_equal(program.name, mark)
    if jax.process_index() != 0:
        text, origin, failure = json.loads(_broadcast(""))
        if failure:
            raise errors.PlanningFailedError(program.name, failure)
        plan = Plan.from_json(text, "the plan of process 0")
        return Planned(apply_plan(program, environment.mesh, plan), plan, environment.limit_bytes, origin)
    try:
        planned = _kept_or_made(program, environment, mark, passes, cache)
    except Exception as error:
        _broadcast(json.dumps(["", "", f"{type(error).__name__}: {error}"]))
        raise
    _broadcast(json.dumps([planned.plan.to_json(), planned.origin, ""]))
    return planned


def _gathered(mark: str) -> list[str]:
    """The mark of every process."""
    rows = _outside_of_traces(lambda: multihost_utils.process_allgather(_as_bytes(mark)))
    return [bytes(row.astype(np.uint8)).decode() for row in rows]


def _broadcast(text: str) -> str:
    """What the first process broadcasts."""
    length = int(_outside_of_traces(lambda: multihost_utils.broadcast_one_to_all(np.int32(len(text.encode())))))
    padded = np.zeros(length, np.uint8)
    own = _as_bytes(text)
    padded[: len(own)] = own
    return bytes(_outside_of_traces(lambda: multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8)).decode()


def _outside_of_traces(communicate: Callable[[], Any]) -> np.ndarray:
    """What ``communicate`` returns, in a thread of its own: here JAX may be tracing a function around the step."""
    with ThreadPoolExecutor(1) as outside:
        return np.asarray(outside.submit(communicate).result())


def _as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def _fingerprint(
    program: Program, environment: Environment, passes: tuple[AnyPass, ...], profile: Profile | None
) -> str:
    """The digest of all that a plan depends on."""
    wishes = {
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "hardware": environment.costs.hardware,
        "jax_deepcompile": _own_version(),
        "limit_bytes": environment.limit_bytes,
        "passes": passes,
        "profile": "" if profile is None else hashlib.sha256(profile.to_json().encode()).hexdigest(),
    }
    return fingerprint(program_text(program), machine_of(environment.mesh), wishes)


def _own_version() -> str:
    try:
        return version("jax_deepcompile")
    except PackageNotFoundError:
        return "from its sources"


def _memory_bytes(hardware: Hardware) -> int | None:
    """A device's own memory; virtual CPU devices share the host's and have none."""
    return None if hardware is CPU_HOST else hardware.memory_bytes
