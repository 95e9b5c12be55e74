"""Planning one step: the plan given, the plan kept from an earlier run, or a new one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import keep_executables
from jax_deepcompile.costs.devices import allocator_bytes_of, has_host_memory, host_bytes_of, machine_of, to_pin
from jax_deepcompile.costs.entries import StepTime
from jax_deepcompile.costs.fingerprint import fingerprint, program_text
from jax_deepcompile.costs.hardware import CPU_HOST, known_hardware
from jax_deepcompile.costs.measured import costs_of
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.ir.memory import HOST_KIND
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import Options, kernels_once, memory_options
from jax_deepcompile.planner.cache import PlanCache
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.executables import executables_in
from jax_deepcompile.planner.limits import MemoryLimit, host_limit_bytes, limit_bytes, require_room
from jax_deepcompile.planner.plan import Plan, Record, Rows
from jax_deepcompile.planner.recomputation import find_recomputation
from jax_deepcompile.planner.search import by_first_proposals, carried_out, search
from jax_deepcompile.planner.selection import Passes, Selection
from jax_deepcompile.planner.state_on_host import argument_bytes, host_leaves, unread_bytes
from jax_deepcompile.planner.strategies import ON_A_HOST, ONE_DEVICE, STRATEGIES
from jax_deepcompile.planner.strategies.products_after_loops import small_products
from jax_deepcompile.planner.strategy import Strategy
from jax_deepcompile.planner.version import planner_digest
from jax_deepcompile.runtime.processes import processes_of
from jax_deepcompile.summary import Summary
from jax_deepcompile.transforms.decision import Decision


@dataclass(frozen=True)
class PlanOptions:
    """The options of planning.

    Attributes:
      memory_limit, host_memory_limit: device memory, and memory of its host, that a step may take for each device; see
        ``planner.limits``.
      passes: which strategies propose, and what to leave out by name; see ``planner.selection``.
      profile: measured times to plan by.
      plan: to carry out as it is.
      cache_dir: where plans and executables are kept between runs.
      measure: whether the plans that simulate fastest will be run.
    """

    memory_limit: MemoryLimit = None
    host_memory_limit: MemoryLimit = None
    passes: Passes = None
    profile: Profile | None = None
    plan: Plan | None = None
    cache_dir: str | os.PathLike | None = None
    measure: bool = False


@dataclass(frozen=True, repr=False)
class Planned(Candidate):
    """A program as it will run; its rivals are to be measured beside it.

    A plan from elsewhere is not evaluated unless somebody asks, and then its way goes by kinds of decisions.

    Attributes:
      limit_bytes: device memory it was planned for; None for no limit.
      origin: where the plan is from, in words.
      profile: what was measured and planned by; None if nothing was.
      measured: this very step, run; None if it was not.
      is_foreign: whether the plan may be one that was made for another program, cluster or limit.
      before_s: of a foreign plan the step before any change, once that is simulated.
    """

    limit_bytes: int | None = None
    origin: str = ""
    profile: Profile | None = None
    measured: StepTime | None = None
    is_foreign: bool = False
    before_s: float | None = None

    def rows(self) -> Rows:
        """What is expected or measured."""
        measured = "" if self.measured is None else f"{self.measured.seconds:.4g} s"
        expected = self.plan.expected_rows(self.limit_bytes)
        return (("plan", self.origin), *expected, ("measured step", measured))

    def _summary(self) -> Summary:
        rows = (("mesh", self.program.mesh_text), *self.program.state_rows(), *self.plan.rows())
        return Summary(f"Planned {self.program.name}", (*rows, *self.rows()))


def plan_program(program: Program, mesh: AnyMesh, platform: str, options: PlanOptions) -> Planned:
    """Plans the fully sharded ``program`` for ``mesh`` by the user's ``options``.

    Raises:
      MemoryExceededError: it does not fit, whatever the plan.
      MemoryLimitError, PlanError, UnknownPassError: an option makes no sense.
      OtherProcessError: the processes of this run have different programs, or planning failed in the first.
    """
    if not isinstance(mesh, Mesh):
        return Planned(Plan(""), program, origin="not planned: an abstract mesh has no devices to plan for")
    kind = mesh.devices.flat[0].device_kind
    known = options.profile and options.profile.of_program(fingerprint(program_text(program), machine_of(mesh)))
    planned = _planned(program, mesh, platform, replace(options, profile=known))
    foreign = "; the kernels of the profile are another program's, and not used" * (known is not options.profile)
    unknown = f"; there is no table for {kind}, and that of an H100 is used" * (known_hardware(kind) is None)
    no_host = f"; nothing is in the host's memory: {kind} has none of kind {HOST_KIND}" * (not has_host_memory(mesh))
    expected = planned.plan.prediction
    pinned = "" if expected is None else to_pin(mesh, expected.host_bytes)
    pinned = f"; where it runs it needs {pinned} in the environment" * bool(pinned)
    return replace(planned, profile=known, origin=planned.origin + foreign + unknown + no_host + pinned)


MEASURE = "measure"
"""The strategy of records of plans that were run."""


def fastest_of(each: Sequence[Planned], seconds: Sequence[float], options: PlanOptions) -> Planned:
    """The program that ran fastest, with a record of all that ran; its plan is kept where plans are.

    Args:
      each: the simulated best first, then its rivals.
      seconds: of a step of each, measured.
    """
    best, simulated = min(range(len(each)), key=seconds.__getitem__), each[0].plan
    before = simulated.prediction
    assert before is not None, "what has rivals was simulated"
    ran = [
        Record(MEASURE, f"number {place + 1} as simulated", before, one.plan.prediction, place == best, said, taken_s)
        for place, (one, taken_s) in enumerate(zip(each, seconds, strict=True))
        for said in [f"measured {taken_s:.4g} s"]
    ]
    plan = each[best].plan.replace(records=(*simulated.records, *ran))
    if options.cache_dir is not None:
        PlanCache(Path(options.cache_dir), Selection.of(options.passes).kinds).store(plan)
    origin = f"{each[best].origin}, the fastest of {len(each)} that were run"
    return replace(each[best], plan=plan, origin=origin, rivals=(), way=())


@dataclass(frozen=True)
class _Task:
    """What is planned.

    Attributes:
      fingerprint: of all that a plan depends on.
    """

    program: Program
    environment: Environment
    strategies: tuple[Strategy, ...]
    kinds: tuple[type[Decision], ...]
    fingerprint: str
    cache: PlanCache | None

    def by(self, plan: Plan, origin: str) -> Planned:
        """The program as ``plan`` makes it."""
        program = plan.program(self.program, self.environment.mesh)
        return Planned(plan, program, limit_bytes=self.environment.limit_bytes, origin=origin)


def _planned(program: Program, mesh: Mesh, platform: str, options: PlanOptions) -> Planned:
    selection = Selection.of(options.passes)
    environment = environment_of(mesh, platform, options).replace(disabled=selection.disabled)
    leaves = host_leaves(program, environment.disabled).values()
    movable_bytes = min(sum(leaf.freed_bytes for leaf in leaves), environment.host_bytes)
    given_bytes = argument_bytes(program), movable_bytes
    require_room(program.name, *given_bytes, environment.limit_bytes, unread_bytes(program))
    strategies = selection.among(_suitable(program, environment) if selection.strategies is None else ())
    cache = PlanCache(Path(options.cache_dir), selection.kinds) if options.cache_dir is not None else None
    if cache is not None:
        _keep_executables(cache, mesh)
    is_searched = bool(strategies) and (options.measure or strategies != ON_A_HOST)
    if options.memory_limit is None and options.plan is None and not is_searched:
        return _without_search(program, environment, selection, strategies)
    digest = _fingerprint(program, environment, strategies, options.profile, options.measure)
    task = _Task(program, environment, strategies, selection.kinds, digest, cache)
    return _agreed(task) if options.plan is None else _given(task, options.plan)


def _given(task: _Task, plan: Plan) -> Planned:
    """The user's plan as it is. One that was not made for this program and limit is compiled, to see that it fits."""
    mesh = task.environment.mesh
    if any(each.on_host for each in plan.decisions) and isinstance(mesh, Mesh) and not has_host_memory(mesh):
        kind = mesh.devices.flat[0].device_kind
        raise errors.PlanError(plan.where, f"it has values in the host's memory, and {kind} has none of {HOST_KIND}")
    is_foreign, limit = plan.fingerprint != task.fingerprint, task.environment.limit_bytes
    if limit is None or not (is_foreign or plan.prediction is None):
        return replace(task.by(plan, "given"), is_foreign=is_foreign)
    candidate = carried_out(task.program, plan, task.environment)
    return Planned(**vars(candidate), limit_bytes=limit, origin="given", is_foreign=is_foreign)


def _without_search(
    program: Program, environment: Environment, selection: Selection, strategies: tuple[Strategy, ...]
) -> Planned:
    """Where no limit must hold and nothing is compiled to choose: what the cost model alone decides."""
    undecided = partial(Planned, Plan(""), program, limit_bytes=environment.limit_bytes)
    if selection.strategies is not None:
        return undecided(origin="nothing was decided: no passes were asked for")
    if environment.mesh.size == 1:
        return undecided(origin="nothing to decide: there is one device")
    if not strategies:
        return undecided(origin="nothing was decided: all passes are left out")
    plan = by_first_proposals(program, environment, strategies, Plan(""))
    why = "nothing to hide: collectives here do not run beside compute; the cost model says how many are worth it"
    return Planned(plan, plan.program(program, environment.mesh), origin=why)


def environment_of(mesh: Mesh, platform: str, options: PlanOptions) -> Environment:
    """What a step is planned for, by the user's options."""
    costs = costs_of(mesh, options.profile)
    allocator_bytes = allocator_bytes_of(mesh)
    is_known = known_hardware(mesh.devices.flat[0].device_kind) and costs.hardware is not CPU_HOST
    own_bytes = costs.hardware.memory_bytes if is_known else None  # virtual CPU devices share the host's
    device_bytes = limit_bytes(options.memory_limit, own_bytes, allocator_bytes)
    has_host = platform == "cuda" and has_host_memory(mesh)
    host_bytes = host_limit_bytes(options.host_memory_limit, host_bytes_of(mesh)) if has_host else 0
    return Environment(mesh, platform, costs, device_bytes, host_bytes)


def _suitable(program: Program, environment: Environment) -> tuple[Strategy, ...]:
    if environment.mesh.size > 1:
        return STRATEGIES if environment.platform == "cuda" else ON_A_HOST
    if environment.platform != "cuda":
        return ()
    copied_by_layer = any(leaf.reads for leaf in host_leaves(program).values())
    is_worth_it = copied_by_layer or find_recomputation(program, environment.costs) or small_products(program)
    return ONE_DEVICE if is_worth_it else ()


def _keep_executables(cache: PlanCache, mesh: Mesh) -> None:
    """Keeps what JAX compiles, unless the user has it kept elsewhere.

    Not for devices that are not here: what is compiled for them can be written, but not read back.
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None and mesh.devices.flat[0] in jax.devices():
        executables = executables_in(cache.executables)
        if executables is not None:
            keep_executables(executables)


def _found_or_made(task: _Task) -> Planned:
    """By the cached plan, if there is one that can be carried out and fits; else by a new one, which is cached."""
    cache, limit = task.cache, task.environment.limit_bytes
    found = None if cache is None else cache.load(task.fingerprint)
    if cache is not None and found is not None:
        try:
            if limit is not None and (found.prediction is None or found.prediction.peak_bytes > limit):
                raise errors.PlanError("the plan", "it does not say that it fits the memory limit")
            return task.by(found, "kept from an earlier run")
        except (errors.PlanError, errors.InvariantError) as error:
            cache.refuse(found, error.why if isinstance(error, errors.PlanError) else str(error))
    made = make_plan(task.program, task.environment, task.fingerprint, task.strategies)
    if cache is not None:
        cache.store(made.plan)
    return Planned(**vars(made), limit_bytes=limit, origin="made for this run")


def _agreed(task: _Task) -> Planned:
    """The program as planned; in a run of several processes by the first one's plan.

    What goes wrong in one goes wrong in all: nobody waits for a plan that does not come.
    """
    processes = processes_of(task.environment.mesh)
    if processes.is_alone:
        return _found_or_made(task)
    with processes.together():
        processes.agree(f"plan {task.program.name} (fingerprint {task.fingerprint})")
        if processes.is_first:
            planned = _found_or_made(task)
            plans = [each.to_json() for each in (planned.plan, *planned.rivals)]
            processes.first_says(json.dumps([plans, planned.origin]))
            return planned
        texts, origin = json.loads(processes.first_says(""))
        plan, *rivals = (Plan.from_json(text, "the plan of the first process", task.kinds) for text in texts)
        return replace(task.by(plan, origin), rivals=tuple(rivals))


def _fingerprint(
    program: Program,
    environment: Environment,
    strategies: tuple[Strategy, ...],
    profile: Profile | None,
    measure: bool = False,
) -> str:
    """The digest of all that a plan depends on."""
    deciding = {
        "hardware": environment.costs.hardware,
        "limit_bytes": environment.limit_bytes,
        "host_bytes": environment.host_bytes,
        "strategies": strategies,
        "disabled": sorted(environment.disabled),
        "planner": planner_digest(),
        "measure": measure,
        "profile": "" if profile is None else hashlib.sha256(profile.to_json().encode()).hexdigest(),
    }
    return fingerprint(program_text(program), machine_of(environment.mesh), deciding)


def make_plan(
    program: Program, environment: Environment, fingerprint: str, strategies: tuple[Strategy, ...] = STRATEGIES
) -> Candidate:
    """The best plan for ``program`` on ``environment``, by simulated step time under its memory limit.

    Args:
      fingerprint: of the program on the environment; stands in the plan.

    Raises:
      MemoryExceededError: the program does not fit, whatever the plan.
    """
    return search(
        program, environment, strategies, Plan(fingerprint).replace(options=first_options(program, environment))
    )


def first_options(program: Program, environment: Environment) -> Options:
    """What XLA is told before anything is decided."""
    if environment.platform != "cuda":
        return {}
    if environment.limit_bytes is None:
        return kernels_once()
    held = argument_bytes(program)
    return kernels_once() | memory_options(environment.limit_bytes, held, environment.costs.hardware.memory_bytes)
