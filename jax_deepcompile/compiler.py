"""The compiler, a list: what becomes of a step for calls of one form, each stage from what the one before made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import calls_on_gpus_only, compiles_on_gpus_only, user_line
from jax_deepcompile.analysis.names import with_loop_names
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.devices import as_if_here, is_described, latency_bytes_of, machine_of
from jax_deepcompile.costs.entries import StepTime
from jax_deepcompile.costs.fingerprint import fingerprint, program_text
from jax_deepcompile.costs.measured import costs_of
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.frontend.arguments import on_host, takes_arrays_only
from jax_deepcompile.frontend.call import PureCall, leaf_type
from jax_deepcompile.frontend.canonicalize import canonicalize
from jax_deepcompile.frontend.meshes import MeshUse
from jax_deepcompile.frontend.roles import Roles
from jax_deepcompile.frontend.signature import Signature
from jax_deepcompile.frontend.trace import Function, Traced, trace_function, trace_init, trace_step
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.hlo.trip_counts import launches
from jax_deepcompile.ir.placement import attached
from jax_deepcompile.ir.program import Port, Program
from jax_deepcompile.ir.traversal import located_equations
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.lowering.emit import emit, sharding_of, shardings_of
from jax_deepcompile.options import StepOptions
from jax_deepcompile.partition.partition import Partitioned, partition_init, partition_step
from jax_deepcompile.partition.rules.families import REGISTRY
from jax_deepcompile.planner.examination import examined
from jax_deepcompile.planner.limits import require_fit
from jax_deepcompile.planner.session import Planned, fastest_of, plan_program
from jax_deepcompile.profilers.hosts import host_profile
from jax_deepcompile.profilers.rivals import copy_donated, measure_in_turns
from jax_deepcompile.profilers.take import take_profile
from jax_deepcompile.report import dump
from jax_deepcompile.report.dump import Rewritten
from jax_deepcompile.runtime.processes import Alone, processes_of
from jax_deepcompile.transforms.microbatch import accumulate
from jax_deepcompile.transforms.stop_alone import stop_alone


class OtherTypes(Exception):
    """What was compiled for arguments of some types was called with others."""


@dataclass(frozen=True)
class Context:
    """What all calls of a step have in common, of which the user said what arguments are, and all else."""

    name: str
    use: MeshUse
    roles: Roles
    options: StepOptions


@dataclass
class Runs:
    """What running a compiled step has shown so far."""

    is_compiled: bool = False
    """All processes have compiled it, and it keeps the memory limit."""
    measured: StepTime | None = None
    compiled: jax.stages.Compiled | None = None
    fastest: Planned | None = None
    """Of the plans that were run to choose one."""
    profile: Profile | None = None
    """Of what runs, if that was chosen by running it: later than what it was planned by."""

    @cached_property
    def _launches(self) -> Mapping[str, int]:
        text = self.compiled and self.compiled.as_text()
        return launches(read(text)) if text else {}

    @property
    def launches(self) -> Mapping[str, int] | None:
        """How often what runs launches each kind of collective; None before it is compiled."""
        return None if self.compiled is None else self._launches


@dataclass(frozen=True, eq=False)
class Compilation:
    """A step compiled for all calls of one form. Every stage runs once, when what it makes is first asked for.

    Attributes:
      call: one of the calls, without values.
      stages: what each stage did so far, in order.
      tried: numbers of microbatches that were planned to choose this one, and what each takes.
    """

    context: Context
    call: PureCall
    runs: Runs = field(default_factory=Runs)
    stages: list[Rewritten] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)

    @cached_property
    def signature(self) -> Signature:
        """What each argument is."""
        context, call = self.context, self.call
        return context.roles.signature(context.name, call, lambda known: _function(context, call, known).returned)

    @cached_property
    def traced(self) -> Traced:
        """The step on whole arrays, as the user wrote it."""
        return self._stage("trace", trace, self.call, self.signature, self.context)

    @cached_property
    def program(self) -> Program:
        """The same as partitioning rules expect it."""
        return self._stage("canonicalize", canonicalize, self.traced.program, REGISTRY.knows)

    @cached_property
    def partitioned(self) -> Partitioned:
        """How each value is divided, and the step on one device's blocks."""
        return self._stage("partition", partition, self.program, self.context)

    @cached_property
    def sharded(self) -> Program:
        """The latter with loops that end on each device alone, microbatches one after the other, and donated state."""
        local = self._stage("stop alone", stop_alone, self.partitioned.program, self.context.use.mesh)
        accumulated = self._stage("accumulate", accumulate, local, self.context.use.mesh)
        named = self._stage("name loops", with_loop_names, accumulated)
        return self._stage("donate", donate, named, self.traced)

    @property
    def planned(self) -> Planned:
        """The same rewritten by a plan's decisions."""
        return self.runs.fastest or self._simulated

    @cached_property
    def _simulated(self) -> Planned:
        """By the plan that simulates fastest."""
        planned = self._stage("plan", plan, self.sharded, self.context)
        if folder := os.environ.get(dump.VARIABLE):
            dump.write(dump.own_folder(Path(folder), self.context.name), self._seen(planned), self._costs)
        return planned

    def dump(self, folder: Path) -> None:
        """Writes the programs before and after every stage, and every kind of decision, to read."""
        dump.write(folder, self._seen(self.planned), self._costs)

    def _seen(self, planned: Planned) -> list[Rewritten]:
        decided = dump.decisions_of(planned.plan, self.sharded, self.context.use.mesh)
        return [*(each for each in self.stages if each.name != "plan"), *decided]

    @property
    def _costs(self) -> CostModel | None:
        mesh = self.context.use.mesh
        return costs_of(mesh, self.context.options.profile) if isinstance(mesh, Mesh) else None

    def _stage(self, name: str, function: Callable[..., Made], *inputs: Any) -> Made:
        """Runs ``stage``, and keeps what it did."""
        began_s = perf_counter()
        made = stage(name, function, *inputs)
        before = next((each for each in inputs if isinstance(each, Program)), None)
        self.stages.append(Rewritten(name, before, program_of(made), perf_counter() - began_s))
        return made

    @cached_property
    def jitted(self) -> Any:
        """``jax.jit`` of ``(*args, kwargs) -> out``; it raises OtherTypes for arguments of other types."""
        return jit(self.planned, self.traced, self.placed, self.call, self.context)

    @cached_property
    def shardings(self) -> Shardings:
        """How arguments and results are divided."""
        return Shardings.of(self.sharded, self.traced, self.context.use)

    @cached_property
    def placed(self) -> Shardings:
        """Where ``jitted`` has its arguments and results: divided so, some of them on the host."""
        return self._placed(self.planned)

    def _placed(self, planned: Planned) -> Shardings:
        return Shardings.of(planned.program, self.traced, self.context.use)

    def placed_shapes(self, shapes: tuple) -> tuple:
        """``shapes``, of the arguments of a call, on the host where ``jitted`` has them there."""
        return on_host(shapes, self.placed.inputs)

    @property
    def planned_already(self) -> Planned | None:
        """``planned``, if anybody asked for it before, with what was measured since."""
        planned = self.runs.fastest or vars(self).get("_simulated")
        among = f"; the fastest of microbatches: {', '.join(self.tried)}" * (len(self.tried) > 1)
        is_to_run = self.context.options.measure and planned and planned.rivals
        among += "; the first call of the step runs it and the next best, and takes the fastest" * bool(is_to_run)
        return planned and replace(planned, measured=self.runs.measured, origin=planned.origin + among)

    def examine(self, in_steps: bool = False, assume: bool = False) -> None:
        """Has compiler and simulator look at a plan from elsewhere, as they did at one that was made in this process.

        Not in a run of several processes, which may not compile at the same time.

        Args:
          in_steps: also at what comes of each kind of decision in turn.
          assume: also for CPU devices of which nothing is measured.
        """
        context = self.context
        if not processes_of(context.use.mesh).is_alone:
            return
        planned, place = self.planned, (context.use.mesh, context.use.platform)
        seen = examined(planned, self.sharded, *place, context.options, in_steps, assume)
        if planned is self.runs.fastest:
            self.runs.fastest = seen
        else:
            vars(self)["_simulated"] = seen

    def measure(self, args: tuple, processes: Alone) -> None:
        """Where the user wants that, runs the plans that simulate fastest on a copy of ``args``: the fastest is taken.

        Not those that have their state elsewhere.

        Raises:
          NoRoomToMeasureError: there is no memory for the copy.
        """
        simulated = self._simulated
        if self.runs.fastest is not None or not simulated.rivals or not self.context.options.measure:
            return
        mesh, traced = self.context.use.mesh, self.traced
        assert isinstance(mesh, Mesh), "what is measured is attached"
        programs = ((plan, plan.program(self.sharded, mesh)) for plan in simulated.rivals)
        rivals = (replace(simulated, plan=plan, program=program, evaluation=None) for plan, program in programs)
        each = [simulated, *(one for one in rivals if self._placed(one) == self.placed)]
        jitted = [jit(one, traced, self.placed, self.call, self.context) for one in each]
        steps = [one.lower(*args).compile() for one in jitted]
        copied = copy_donated(self.context.name, args, traced.donated_leaves, steps, mesh)
        processes.agree(f"measure {len(each)} plans of {self.title}")
        seconds, copied = measure_in_turns(steps, copied, simulated.program)
        seconds = json.loads(processes.first_says(json.dumps(seconds)))
        best = min(range(len(each)), key=seconds.__getitem__)
        taken = take_profile(
            steps[best],
            copied,
            steps[best],
            each[best].program,
            mesh,
            base=self.sharded,
            known=simulated.profile,
            runs=_PROFILED_RUNS,
            compiler_options=each[best].plan.compiler_options(),
        )
        self.runs.fastest = fastest_of(each, seconds, self.context.options)
        self.runs.profile, self.runs.measured = taken.profile, taken.profile.step
        vars(self).pop("jitted", None)

    def compile(self, args: tuple, processes: Alone) -> None:
        """Compiles what runs for ``args`` before its first run, where it may not fit or not run in all processes.

        JAX keeps what is compiled for the run itself.

        Raises:
          MemoryExceededError: it exceeds the memory limit.
        """
        compiled = self.jitted.lower(*args).compile()
        require_fit(self.context.name, compiled, self.planned.limit_bytes)
        if not processes.is_alone:
            processes.agree(f"run {self.title}")
        self.runs.is_compiled, self.runs.compiled = True, compiled

    @cached_property
    def title(self) -> str:
        """What runs, in words and with a digest that are equal in all processes that run the same."""
        options, machine = self.planned.plan.compiler_options(), machine_of(self.context.use.mesh)
        digest = fingerprint(program_text(self.planned.program), machine, options)[:16]
        given = [port for port in self.program.inputs if not port.role.is_state]
        shapes = [f"{port.path} {port.dtype}[{','.join(map(str, port.shape))}]" for port in given[:_SHOWN]]
        more = [f"{len(given) - _SHOWN} more"] * (len(given) > _SHOWN)
        on = f" on {', '.join(shapes + more)}" if given else ""
        return f"{self.context.name}{on} (program {digest})"


Made = TypeVar("Made", Program, Traced, Partitioned, Planned)


def stage(name: str, function: Callable[..., Made], *inputs: Any) -> Made:
    """What ``function`` makes of ``inputs``, once it is known to be what a program must be.

    Raises:
      InvariantError: it is not; names the stage.
    """
    made = function(*inputs)
    try:
        verify(program_of(made))
    except errors.InvariantError as error:
        raise error.after(name) from error
    return made


def program_of(made: Program | Traced | Partitioned | Planned) -> Program:
    return made if isinstance(made, Program) else made.program


def trace(call: PureCall, signature: Signature, context: Context) -> Traced:
    """The step, traced.

    Raises:
      NoBatchError: there is nothing to divide into microbatches.
    """
    if context.options.microbatches != 1 and not (signature.batch or signature.keywords):
        raise errors.NoBatchError(context.name, context.options.microbatches)
    function = _function(context, call, signature)
    return trace_step(function, call, signature, context.use.axes, context.options.donate)


def partition(program: Program, context: Context) -> Partitioned:
    use, microbatches = context.use, context.options.microbatches
    assert isinstance(microbatches, int), "of several numbers of microbatches one was chosen"
    return partition_step(program, use.mesh, use.state, use.axes.names, microbatches, latency_bytes_of(use.mesh))


def donate(program: Program, traced: Traced) -> Program:
    """``program`` with only those arguments' memory taken that are donated."""
    donated = traced.donated_leaves
    return program.replace(state_outputs=tuple(pair for pair in program.state_outputs if pair[0] in donated))


def plan(program: Program, context: Context) -> Planned:
    mesh, options = context.use.mesh, context.options
    is_shared = context.use.platform == "cpu" and mesh.size > 1 and attached(mesh)
    folder = None if options.cache_dir is None else Path(options.cache_dir, "hosts")
    if is_shared and isinstance(mesh, Mesh) and options.profile is None and (folder or options.measure):
        options = replace(options, profile=host_profile(mesh, folder))
    return plan_program(program, mesh, context.use.platform, options)


@dataclass(frozen=True)
class Shardings:
    """Where a jitted step has its arguments and results.

    Attributes:
      inputs: for every leaf of ``(*args, kwargs)``; None where it may stay.
      in_shardings, out_shardings: for ``jax.jit`` of a function of ``(*args, kwargs)``.
    """

    inputs: tuple[NamedSharding | None, ...]
    in_shardings: tuple
    out_shardings: Any

    @classmethod
    def of(cls, program: Program, traced: Traced, use: MeshUse) -> Shardings:
        """Of ``program``, in the local view. State that may be divided over automatic axes too is XLA's to place."""
        automatic = len(use.mesh.axis_names) > len(use.axes.names)

        def sharding(port: Port) -> NamedSharding | None:
            return None if automatic and port.role.is_state else sharding_of(port, program, use.mesh)

        inputs = tuple(map(sharding, program.inputs))
        positional, keywords = traced.in_tree.children()
        divided, start = [], 0
        for tree in (*positional.children(), keywords):
            here = inputs[start : start + tree.num_leaves]
            divided.append(here if takes_arrays_only(tree) else jax.tree.unflatten(tree, here))
            start += tree.num_leaves
        return cls(inputs, tuple(divided), shardings_of(program.out_tree, tuple(map(sharding, program.outputs))))


def jit(planned: Planned, traced: Traced, shardings: Shardings, call: PureCall, context: Context) -> Any:
    """The planned program as a jitted function; see ``Compilation.jitted``."""
    types = call.leaf_types
    run = emit(planned.program, context.use.mesh)

    def step(*args):
        leaves = jax.tree.leaves(args)
        if tuple(map(leaf_type, leaves)) != types:
            raise OtherTypes
        return jax.tree.unflatten(planned.program.out_tree, run(*leaves))

    step.__name__ = step.__qualname__ = context.name.rsplit(".", 1)[-1]
    return jax.jit(
        step,
        in_shardings=shardings.in_shardings,
        out_shardings=shardings.out_shardings,
        donate_argnums=traced.donated,
        compiler_options=planned.plan.compiler_options() or None,
    )


def compile_init(creation: Callable, args: tuple, kwargs: dict, use: MeshUse) -> Program:
    """The local view of the function that creates the state, which the same stages make, less those of a step."""
    with as_if_here(use.mesh):
        traced = stage("trace", trace_init, creation, args, kwargs, use.axes)
    program = stage("canonicalize", canonicalize, traced.program, REGISTRY.knows)
    return stage("partition", partition_init, program, use.mesh, use.state).program


def _function(context: Context, call: PureCall, signature: Signature) -> Function:
    """The step as a function of flat arrays.

    Raises:
      KernelNeedsGpuError, LibraryNeedsGpuError: it has a kernel that only a machine with a GPU compiles, or a call of
        a library that only such a one has, and is for GPUs that are not here.
    """
    with as_if_here(context.use.mesh):
        function = trace_function(call, signature)
    if is_described(context.use.mesh):
        for eqn, located in located_equations(function.closed):
            if compiles_on_gpus_only(eqn):
                raise errors.KernelNeedsGpuError(context.name, eqn.primitive.name, user_line(located))
            if calls_on_gpus_only(eqn):
                raise errors.LibraryNeedsGpuError(context.name, eqn.primitive.name, user_line(located))
    return function


_PROFILED_RUNS = 3

_SHOWN = 4
"""Arguments whose shapes an error shows."""
