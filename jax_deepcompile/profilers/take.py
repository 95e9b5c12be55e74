"""Takes a whole profile of a compiled step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jax_deepcompile.costs.devices import machine_of
from jax_deepcompile.costs.entries import OpTime, StepTime
from jax_deepcompile.costs.fingerprint import fingerprint, program_text
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.costs.simulation import Event, Simulation
from jax_deepcompile.hlo import reader as hlo
from jax_deepcompile.ir.placement import AnyMesh, attached
from jax_deepcompile.ir.program import Program
from jax_deepcompile.profilers.attribution import executed_ops
from jax_deepcompile.profilers.collective import measure_collectives
from jax_deepcompile.profilers.copies import measure_copies
from jax_deepcompile.profilers.measured_run import measured_run
from jax_deepcompile.profilers.memory import Executable, measure_memory
from jax_deepcompile.profilers.op_time import measure_ops, unmeasured
from jax_deepcompile.profilers.probes import NOT_ATTACHED, ProbeLimits
from jax_deepcompile.profilers.runs import StepRuns
from jax_deepcompile.profilers.timelines import timelines_of
from jax_deepcompile.profilers.timing import measured, median_seconds
from jax_deepcompile.runtime.processes import processes_of
from jax_deepcompile.summary import Summarized, Summary


@dataclass(frozen=True, repr=False)
class Taken(Summarized):
    """A profile, and what the next call of the step takes.

    Attributes:
      profile: what was measured.
      args: the arguments, with the state that the measured runs returned where the step donates it.
      timelines: what each device of this process ran when in the last run that was traced, by its number in the mesh;
        empty where nothing was traced.
    """

    profile: Profile
    args: tuple
    timelines: Mapping[int, tuple[Event, ...]] = field(default_factory=dict)

    def measured_run(self, simulated: Simulation) -> Simulation | None:
        """What the first device of this process ran, told as ``simulated`` is, of the same step, compiled.

        None if nothing was traced. On one page with others, simulated or measured::

            simulated = deepcompile.simulate(traced.lower().compile(), step.mesh)
            traced.page({"measured": taken.measured_run(simulated)}).write("step.html")
        """
        return measured_run(self.timelines[min(self.timelines)], simulated) if self.timelines else None

    def _summary(self) -> Summary:
        rows = self.profile._summary().rows
        return Summary("Taken: a .profile, and .args for the next call", (*rows, ("args", f"{len(self.args)}")))


def take_profile(
    step: Callable,
    args: tuple,
    compiled: Executable,
    program: Program,
    mesh: AnyMesh,
    *,
    base: Program | None = None,
    limit_bytes: int | None = None,
    known: Profile | None = None,
    runs: int = 5,
    compiler_options: Mapping[str, object] | None = None,
    singly: Callable | None = None,
) -> Taken:
    """Measures a step, on the user's own state and batch, and the machine it runs on.

    The step runs ``1 + 2 * runs`` times, with ``singly`` once more, so the state moves on by as many steps; no second
    one is ever held. What cannot be measured is left to the analytical model, and its entry says why.

    Args:
      step: the sharded step, called with ``args``.
      args: state, batch and what else it takes; donated state is used up, the result has its successor. Not looked at
        where the mesh's devices are not attached.
      compiled: the step compiled for these arguments.
      program: its local view.
      mesh: that it runs on.
      base: its local view before it was planned; None if nobody knows.
      limit_bytes: memory of each device that the probes of collectives and copies may take; by default what the step
        takes for temporaries, which lies free between its runs.
      known: an earlier profile. If it is of this program it is the result, and nothing runs; if it is of another one
        on this machine its collectives and copies are.
      runs: measurements of everything; the median counts.
      compiler_options: XLA's, that ``compiled`` was compiled with.
      singly: the step again, which launches every kernel by itself: what is traced, for traces do not tell kernels of
        one CUDA graph apart; by default ``step``.

    Returns:
      The profile, the same in every process, and the arguments of the next call.
    """
    known = of_first_process(known, mesh)
    machine = machine_of(mesh)
    digest = fingerprint(program_text(program), machine, compiler_options)
    if known is not None and known.fingerprint == digest:
        return Taken(known, args)
    ops, step_time, args, timelines = _run(step, singly, args, compiled, program, mesh, runs)
    memory = measure_memory(compiled, mesh)
    planned_from = "" if base is None else fingerprint(program_text(base), machine)
    profile = Profile(digest, machine, ops=ops, step=step_time, memory=memory, program=planned_from)
    if known is not None and known.machine == machine:
        profile = profile.merge(known)
    else:
        free_bytes = memory.temp_bytes if memory else 0
        limits = ProbeLimits(free_bytes if limit_bytes is None else limit_bytes, runs=runs)
        probed = Profile(
            digest, machine, collectives=measure_collectives(mesh, limits), copies=measure_copies(mesh, limits)
        )
        profile = profile.merge(probed)
    return Taken(of_first_process(profile, mesh) or profile, args, timelines)


def of_first_process(profile: Profile | None, mesh: AnyMesh) -> Profile | None:
    """The profile of the first process of ``mesh``, in every process.

    What each measures differs a little, and programs planned from different times would wait for each other forever.
    """
    processes = processes_of(mesh)
    if processes.is_alone:
        return profile
    said = processes.first_says(profile.to_json() if profile and processes.is_first else "")
    return Profile.from_json(said, "what the first process said") if said else None


def _run(
    step: Callable,
    singly: Callable | None,
    args: tuple,
    compiled: Executable,
    program: Program,
    mesh: AnyMesh,
    runs: int,
) -> tuple[tuple[OpTime, ...], StepTime | None, tuple, Mapping[int, tuple[Event, ...]]]:
    """Times of the ops and of whole runs, the arguments of the next call, and what ran when."""
    module = hlo.read(compiled.as_text() or "")
    ops = executed_ops(module, program)
    if not attached(mesh):
        return unmeasured(ops, NOT_ATTACHED), None, args, {}
    step_runs = StepRuns(step, args, program)
    step_time = StepTime(median_seconds(step_runs, runs), measured(runs))
    if singly is not None:
        step_runs = StepRuns(singly, step_runs.args, program)
        step_runs()
    times, trace = measure_ops(step_runs, ops, module.name, runs)
    return times, step_time, step_runs.args, timelines_of(trace, module, mesh)
