"""The compiler, a list: what becomes of a step for calls of one form, each stage from what the one before made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import jax
from jax.extend import core as jex
from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import calls_on_gpus_only, compiles_on_gpus_only, is_tracing, user_line
from jax_deepcompile.analysis.names import with_loop_names
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.devices import as_if_here, is_described, latency_bytes_of
from jax_deepcompile.costs.entries import StepTime
from jax_deepcompile.costs.measured import costs_of
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.costs.utilisation import model_flops
from jax_deepcompile.frontend.arguments import Form, on_host
from jax_deepcompile.frontend.call import PureCall
from jax_deepcompile.frontend.canonicalize import canonicalize
from jax_deepcompile.frontend.containers import closed
from jax_deepcompile.frontend.meshes import MeshUse
from jax_deepcompile.frontend.roles import Roles
from jax_deepcompile.frontend.signature import Signature
from jax_deepcompile.frontend.trace import Function, Traced, trace_function, trace_init, trace_step
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.hlo.trip_counts import launches
from jax_deepcompile.ir.placement import attached
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.traversal import located_equations
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.jitted import Shardings, jit
from jax_deepcompile.lowering.first_nan import is_looked_for
from jax_deepcompile.options import StepOptions
from jax_deepcompile.partition.partition import Partitioned, partition_init, partition_step
from jax_deepcompile.partition.rules.families import REGISTRY
from jax_deepcompile.planner.examination import examined
from jax_deepcompile.planner.session import Planned, plan_program
from jax_deepcompile.profilers.hosts import host_profile
from jax_deepcompile.report import dump
from jax_deepcompile.report.dump import Rewritten
from jax_deepcompile.runtime.processes import processes_of
from jax_deepcompile.transforms.microbatch import accumulate
from jax_deepcompile.transforms.stop_alone import stop_alone


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
    form: Form | None = None
    """Of the arguments that it was compiled for."""
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
        context, call, unknown = self.context, self.call, Signature(self.context.name)
        return context.roles.signature(
            context.name,
            call,
            lambda known: _function(context, call, known).returned,
            lambda other: model_flops(_function(context, other, unknown).closed),
        )

    @cached_property
    def traced(self) -> Traced:
        """The step on whole arrays, as the user wrote it."""
        return self._stage("trace", trace, self.call, self.signature, self.context)

    @cached_property
    def program(self) -> Program:
        """The same as partitioning rules expect it."""
        return self._stage("canonicalize", canonicalize, self.traced.program, REGISTRY.knows, self.context.use.platform)

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
        """The planned step for XLA; see ``jit``."""
        return jit(self.planned, self.traced, self.placed, self.call.leaf_types, self.context.use)

    def keep(self, compiled: jax.stages.Compiled, args: tuple) -> None:
        """``compiled``, of the jitted step for ``args``, is what runs, and all processes have it."""
        self.runs.is_compiled, self.runs.compiled, self.runs.form = True, compiled, Form.of(args)

    def runner_for(self, args: tuple) -> Callable:
        """What runs ``args``: the jitted step, but what was compiled of it where JAX would compile it once more.

        It does where arrays of NumPy's come in the place of those on devices, or the other way round.
        """
        compiled, form = self.runs.compiled, self.runs.form
        if compiled is None or form is None or is_tracing() or is_looked_for():
            return self.jitted
        given = Form.of(args)
        return compiled if given != form and given.structure == form.structure else self.jitted

    def as_written(self, *args: Any) -> Any:
        """What the user's step makes of ``(*args, kwargs)``, in containers of any kind."""
        leaves = jax.tree.leaves(args)
        if self.traced.alone:
            written = self.traced.program
            return jax.tree.unflatten(written.out_tree, jex.jaxpr_as_fun(written.jaxpr)(*leaves))
        *positional, named = closed(jax.tree.unflatten(jax.tree.structure(self.call.inputs), leaves))
        return self.call.step.fun(*positional, **named)

    def launched_singly(self) -> Compilation:
        """The same, but with every kernel launched by itself, for profiles to tell them apart."""
        other = copy(self)
        jitted = jit(self.planned, self.traced, self.placed, self.call.leaf_types, self.context.use, singly=True)
        vars(other).update(jitted=jitted, runs=replace(self.runs, is_compiled=False))
        return other

    @cached_property
    def shardings(self) -> Shardings:
        """How arguments and results are divided."""
        return Shardings.of(self.sharded, self.traced, self.context.use)

    @cached_property
    def placed(self) -> Shardings:
        """Where ``jitted`` has its arguments and results: divided so, some of them on the host."""
        return Shardings.of(self.planned.program, self.traced, self.context.use)

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

    def take(self, fastest: Planned, profile: Profile) -> None:
        """From now on what runs is the plan that was measured to be ``fastest``, as ``profile`` says."""
        self.runs.fastest, self.runs.profile, self.runs.measured = fastest, profile, profile.step
        vars(self).pop("jitted", None)


Made = TypeVar("Made", Program, Traced, Partitioned, Planned)


def stage(name: str, function: Callable[..., Made], *inputs: Any) -> Made:
    """What ``function`` makes of ``inputs``, once it is known to be what a program must be.

    Raises:
      InvariantError: it is not; names the stage.
    """
    made = function(*inputs)
    verify(program_of(made), name)
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


def compile_init(creation: Callable, args: tuple, kwargs: dict, use: MeshUse) -> Program:
    """The local view of the function that creates the state, which the same stages make, less those of a step."""
    with as_if_here(use.mesh):
        traced = stage("trace", trace_init, creation, args, kwargs, use.axes)
    program = stage("canonicalize", canonicalize, traced.program, REGISTRY.knows, use.platform)
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
