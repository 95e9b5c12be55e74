"""A sharded train step: it runs, is made state for, traced, planned, profiled, and sharded anew."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import bound_axes, is_tracing
from jax_deepcompile.compiler import Compilation, Context, compile_init
from jax_deepcompile.costs.devices import as_if_here, has_host_memory, machine_of
from jax_deepcompile.costs.fingerprint import fingerprint, program_text
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.first_run import prepare, title
from jax_deepcompile.frontend.arguments import (
    Form,
    are_plain,
    arrays_among,
    free_moved,
    join_rows,
    move,
    refuse_deleted,
    replicated_text,
    shapes_only,
    tell_what_is_moved,
)
from jax_deepcompile.frontend.call import PureCall, bind, function_name
from jax_deepcompile.frontend.meshes import MeshLike, resolve_mesh
from jax_deepcompile.frontend.objects import Creation, bound_to_objects, holds_objects
from jax_deepcompile.frontend.roles import Roles
from jax_deepcompile.frontend.signature import Signature
from jax_deepcompile.frontend.static_arguments import static_and_donated
from jax_deepcompile.ir.placement import attached
from jax_deepcompile.ir.program import Port, Program
from jax_deepcompile.jitted import OtherTypes
from jax_deepcompile.lowering.compile import launched_singly
from jax_deepcompile.lowering.emit import abstract_outputs, emit, sharding_of
from jax_deepcompile.microbatch_counts import compilation_of
from jax_deepcompile.options import StepOptions
from jax_deepcompile.planner.limits import MemoryLimit
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.state_on_host import born
from jax_deepcompile.profilers.agreement import Agreement, agreement, made_up
from jax_deepcompile.profilers.take import Taken, take_profile
from jax_deepcompile.report.explanation import Explanation
from jax_deepcompile.report.memory_curve import LimitedStep
from jax_deepcompile.report.summary import summary_of_step
from jax_deepcompile.runtime.processes import ALONE, Alone, processes_of
from jax_deepcompile.stages import LoweredStep, TracedStep, explain_compilation
from jax_deepcompile.summary import Summarized, Summary

P = ParamSpec("P")
R = TypeVar("R")


def make_step(fun: Callable, options: StepOptions) -> ShardedStep | BoundStep:
    """``fun`` sharded as ``options`` say; see ``shard``, which raises what this does."""
    if bound := bound_to_objects(fun):
        function, instance = bound
        state, batch = (_behind_object(each) for each in (options.state_argnums, options.batch_argnums))
        step = _sharded(function, replace(options, state_argnums=state, batch_argnums=batch))
        return BoundStep(step, instance, counts_object=False)
    return _sharded(fun, options)


def _sharded(fun: Callable, options: StepOptions) -> ShardedStep:
    if not callable(fun) or isinstance(fun, jax.stages.Compiled):
        raise errors.OptionTypeError("fun", "a function (state, batch, ...) -> (state, ...)", fun)
    if _is_pmapped(fun):
        raise errors.PmappedStepError(function_name(fun))
    use = resolve_mesh(options.mesh, options.fsdp_axes, options.data_axes)
    if options.measure and not attached(use.mesh):
        raise errors.NothingToMeasureOnError(*_devices(use.mesh))
    roles = Roles.of(options.state_argnums, options.batch_argnums)
    return ShardedStep(fun, Context(function_name(fun), use, roles, options))


def _behind_object(argnums: int | Sequence[int] | None) -> int | Sequence[int] | None:
    """Positions of a method's arguments where its object is the first of them."""
    if argnums is None:
        return None
    behind = tuple(each + 1 if each >= 0 else each for each in ((argnums,) if isinstance(argnums, int) else argnums))
    return behind[0] if isinstance(argnums, int) else behind


def _is_pmapped(fun: Callable) -> bool:
    """``pmap`` leaves its mark in what it returns: a C++ ``PmapFunction``, or a wrapper from JAX's pmap module."""
    wrapper = getattr(type(fun), "__name__", "") == "PmapFunction"
    code = getattr(getattr(fun, "lower", None), "__module__", "") or ""
    return wrapper or "pmap" in code.rsplit(".", 1)[-1] or "pmap" in getattr(fun, "__qualname__", "").split(".")[0]


def _devices(mesh: Mesh | AbstractMesh) -> tuple[str, int]:
    """What JAX calls their kind, and how many there are."""
    return "abstract mesh" if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].device_kind, mesh.size


class ShardedStep(Summarized, Generic[P, R]):
    """A train step that runs fully sharded; made by ``shard``."""

    def __init__(self, fun: Callable, context: Context) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._context = context
        self._compilations: dict[Hashable, Compilation] = {}
        self._signatures: dict[Hashable, Signature] = {}
        self._last: Compilation | None = None
        self._fast: Callable | None = None
        self._given: dict[int, bool] = {}

    def __get__(self, instance: Any, owner: type | None = None) -> ShardedStep | BoundStep:
        """As a method it takes its object, an NNX module or a pytree, as the argument at position 0."""
        return self if instance is None else BoundStep(self, instance)

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The mesh the step runs on."""
        return self._context.use.mesh

    def reshard(self, mesh: MeshLike | None = None, **options: Any) -> ShardedStep:
        """The same step, sharded anew.

        Args:
          mesh: other devices; by default the same.
          **options: of ``shard``, in place of those it was made with.
        """
        changes = options if mesh is None else {**options, "mesh": mesh}
        return _sharded(self._fun, replace(self._context.options, **changes))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs one step; state is donated, batches may be numpy arrays or arrays anywhere.

        In a run of several processes each passes its own rows of the batch, or arrays that all of them have. What goes
        wrong in one before its step runs, and its program's end, is an error in all of them.

        Raises:
          BatchNotDivisibleError, NoBatchError, MicrobatchNotDivisibleError, AmbiguousRowsError, StateDonatedError,
            NoRoomToMeasureError, DevicesNotAttachedError: see ``jax_deepcompile.errors``, as for what tracing finds
            wrong with the step.
          ProcessStoppedError, ProcessMismatchError: another process cannot run it, or would run another.
        """
        if self._fast is not None and not kwargs and not bound_axes() and are_plain(args, self._given):
            try:
                return self._fast(*args, {})
            except (TypeError, ValueError, OtherTypes):
                self._fast = None
        self._require_devices()
        processes = self._processes()
        with processes.together():
            return self._call(args, kwargs, processes)

    def init(self, create_state: Callable, *args, **kwargs) -> Any:
        """``create_state(*args, **kwargs)``, born sharded: every device computes its own part of each leaf only.

        Args:
          create_state: makes the state: any pytree, or NNX objects.
          *args: its arguments; replicated.
          **kwargs: those passed by name.

        Returns:
          What ``create_state`` returns, its leaves sharded as the step wants them; where the devices are not attached
          the leaves are ``jax.ShapeDtypeStruct``s, to trace, plan and compile the step for.

        Raises:
          ArgumentError: ``create_state`` is no function.
        """
        if not callable(create_state):
            raise errors.ArgumentError("init", "create_state", create_state, "a function that makes the state")
        creation, mesh, processes = Creation(create_state), self.mesh, self._processes()
        with processes.together():
            program = compile_init(creation, args, kwargs, self._context.use)
            shardings = [sharding_of(port, program, mesh) for port in self._placed(program)]
            if not attached(mesh):
                return creation.finish(jax.tree.unflatten(program.out_tree, abstract_outputs(program, shardings)))
            run, inputs = jax.jit(emit(program, mesh), out_shardings=shardings), jax.tree.leaves((args, kwargs))
            if not processes.is_alone:
                digest = fingerprint(program_text(program), machine_of(mesh))[:16]
                what = f"{program.name}, which creates the state (program {digest})"
                processes.agree(f"compile {what}")
                run.lower(*inputs).compile()
                processes.agree(f"run {what}")
            return creation.finish(jax.tree.unflatten(program.out_tree, run(*inputs)))

    def _placed(self, program: Program) -> Sequence[Port]:
        """The leaves of the state that ``program`` creates, in the memory where steps have them.

        That is as the last was planned for such a state; before any was, as the plan that was given says.
        """
        created, plan = program.outputs, self._context.options.plan
        for made in reversed(self._compilations.values()):
            planned = made.planned if plan is not None else made.planned_already
            ports = [port for port in planned.program.inputs if port.role.is_state] if planned else []
            if [(port.shape, port.dtype) for port in ports] == [(port.shape, port.dtype) for port in created]:
                pairs = zip(created, ports, strict=True)
                return [replace(port, memory_kind=there.memory_kind) for port, there in pairs]
        has_host = isinstance(self.mesh, Mesh) and has_host_memory(self.mesh)
        return created if plan is None or not has_host else born(program, plan)

    def trace(self, *args, **kwargs) -> TracedStep:
        """Traces and partitions the step.

        Args:
          *args: as for a step, of global shapes; leaves may be ``jax.ShapeDtypeStruct``s.
          **kwargs: those passed by name.

        Returns:
          The step before it is planned, to look at, plan and lower.

        Raises:
          BatchNotDivisibleError, NoBatchError, MicrobatchNotDivisibleError: see ``jax_deepcompile.errors``, as for what
            tracing finds wrong with the step.
        """
        call = self._bind(args, kwargs)
        made = self._compilation(call)
        shapes = shapes_only(call.inputs, made.shardings.inputs, made.program)
        self._last = made
        return TracedStep(made, shapes)

    def lower(self, *args, **kwargs) -> LoweredStep:
        """Plans the step and lowers it to StableHLO; takes and raises what ``trace`` does.

        Raises:
          MemoryExceededError: no plan fits in ``memory_limit``.
          PlanError: ``plan`` speaks of what the step does not have.
        """
        return self.trace(*args, **kwargs).lower()

    def lower_gspmd(self, *args, **kwargs) -> jax.stages.Lowered:
        """The undecorated step under ``jax.jit`` with the same shardings: what XLA's own partitioner makes of it.

        For comparison; takes and raises what ``trace`` does.
        """
        call = self._bind(args, kwargs)
        made = self._compilation(call)
        plain = jax.jit(
            made.as_written,
            in_shardings=made.shardings.in_shardings,
            out_shardings=made.shardings.out_shardings,
            donate_argnums=made.traced.donated,
            keep_unused=bool(made.program.unread_state),
        )
        shapes = shapes_only(call.inputs, made.shardings.inputs, made.program)
        with as_if_here(self.mesh):
            traced = plain.trace(*shapes)
        return traced.lower(lowering_platforms=(self._context.use.platform,))

    def plan(self, *args, **kwargs) -> Plan:
        """The decisions of every pass for these arguments; takes and raises what ``lower`` does."""
        return self.trace(*args, **kwargs).plan()

    def profile(self, *args, runs: int = 5, known: Profile | None = None, **kwargs) -> Taken:
        """Measures the step on these arguments, and the machine; ``shard(profile=...)`` plans by the result.

        The step runs ``1 + 2 * runs`` times, on GPUs once more: what runs when is measured of a program that launches
        its kernels one by one, with longer gaps between them. State that it donates is used up; the result has its
        successor.

        Args:
          *args: state, batch and what else the step takes, some of it by name.
          runs: measurements of everything; the median counts.
          known: an earlier profile, whose entries are not measured again where they still hold.

        Raises:
          ArgumentError: ``runs`` or ``known`` is not what it is to be.
          DevicesNotAttachedError: the devices are not here.
        """
        if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
            raise errors.ArgumentError("profile", "runs", runs, "a whole number, at least 1")
        if not (known is None or isinstance(known, Profile)):
            expected = "a deepcompile.Profile, such as step.profile(...).profile"
            raise errors.ArgumentError("profile", "known", known, expected)
        self._require_devices()
        processes = self._processes()
        with processes.together():
            processes.agree(f"profile {self._context.name}")
            traced = self.trace(*args, **kwargs)
            singly = self._launching_singly(traced.compilation)
            if kwargs:
                bound = inspect.signature(self._fun).bind(*args, **kwargs)
                args, kwargs = bound.args, bound.kwargs
            taken = take_profile(
                functools.partial(self, **kwargs),
                args,
                traced.lower().compile(),
                traced.planned,
                self.mesh,
                base=traced.sharded,
                runs=runs,
                known=known or traced.compilation.runs.profile,
                compiler_options=traced.plan().compiler_options(),
                singly=singly and functools.partial(singly, **kwargs),
            )
        traced.compilation.runs.measured = taken.profile.step
        return taken

    def _launching_singly(self, made: Compilation) -> Callable | None:
        """The step that launches every kernel by itself, for after this one has run; None if that does already."""
        if not launched_singly(made.context.use.platform):
            return None
        other = ShardedStep(self._fun, self._context)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not other._compilations:
                other._compilations[made.call.form] = made.launched_singly()
            return other(*args, **kwargs)

        return run

    def validate(self, *args, tolerance: float = 0.01, **kwargs) -> Agreement:
        """Runs the step once as written, on one device, and once sharded, and says where the results differ.

        Nothing is donated, and NNX objects keep their values. The step as written has to fit one device; where it
        has shardings of its own it runs on the devices that they name.

        Args:
          *args: state, batch and what else the step takes, some of it by name; shapes get values that are made up.
          tolerance: what a leaf may differ, of what the step changes of it, beside what rounding explains.

        Raises:
          ArgumentError: ``tolerance`` is no share.
          DevicesNotAttachedError: the devices are not here, or other processes have some of them.
        """
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
            raise errors.ArgumentError("validate", "tolerance", tolerance, "a share, from 0 to 1")
        self._require_devices()
        if not self._processes().is_alone:
            raise errors.DevicesNotAttachedError(*_devices(self.mesh))
        call = self._bind(*jax.tree.map(made_up, (args, kwargs)))
        made = self._compilation(call)
        leaves, tree = jax.tree.flatten(call.inputs)

        def as_written(*values: Any) -> list:
            return jax.tree.leaves(made.as_written(*jax.tree.unflatten(tree, values)))

        def sharded(*values: Any) -> list:
            there, _ = move(jax.tree.unflatten(tree, values), made.placed.inputs, (), (), (), self.mesh)
            return jax.tree.leaves(made.jitted(*there))

        self._last = made
        return agreement(as_written, sharded, leaves, made.traced.program, tolerance)

    def explain(self, assume: bool = False) -> Explanation:
        """What was decided for the last shapes traced, and why: fields, which print as text.

        Args:
          assume: as of ``TracedStep.explain``.

        Raises:
          NotTracedError: none were.
        """
        if self._last is None:
            raise errors.NotTracedError(self._context.name)
        return explain_compilation(self._last, assume)

    def plot_memory_curve(self, limits: Sequence[MemoryLimit | LimitedStep], ax: Any = None) -> Any:
        """As ``TracedStep.plot_memory_curve``, for the last shapes traced."""
        if self._last is None:
            raise errors.NotTracedError(self._context.name)
        return TracedStep(self._last, ()).plot_memory_curve(limits, ax)

    def _summary(self) -> Summary:
        last = None if self._last is None else TracedStep(self._last, ())._summary()
        return summary_of_step(self._context.name, self.mesh, last)

    def _call(self, args: tuple, kwargs: dict, processes: Alone):
        call = self._bind(args, kwargs)
        made = self._compilation(call)
        is_first = not (made.runs.is_compiled or is_tracing())
        refuse_deleted(call.inputs, made.program.inputs, self._context.name)
        if not processes.is_alone:
            processes.agree(f"{'compile' if is_first else 'run'} {title(made)}")
            if is_first:
                processes.agree(f"call {self._context.name} with {replicated_text(call.inputs, made.program.inputs)}")
        returned, donated = made.traced.returned_leaves, made.traced.donated_leaves
        alike = arrays_among(made.traced.alike, call.inputs)
        self._last = made
        unread = made.planned.program.unread_state
        there, is_moved = move(call.inputs, made.placed.inputs, returned | alike, donated, unread, self.mesh)
        if is_first:
            prepare(made, there, processes)
            tell_what_is_moved(there if call.objects else call.inputs, made.placed.inputs, made.program)
        free_moved(call.inputs, made.placed.inputs, donated, there)
        run = made.runner_for(there)
        out = run(*there)
        if call.objects:
            state, result = out
            return call.finish(there[0] if state is None else state, result)
        as_given = jax.tree.structure(there) == jax.tree.structure(call.inputs)
        is_jitted = run is made.jitted and not call.step.static and jax.process_count() == 1
        if is_jitted and not is_moved and not kwargs and as_given:
            first_and_last = (min(returned), max(returned)) if returned else ()
            given = {at: is_placed for at, is_placed in enumerate(Form.of(there).placed) if at not in returned}
            given |= dict.fromkeys((*first_and_last, *made.traced.handed_on, *alike), True)
            self._fast, self._given = run, given
        return out

    def _bind(self, args: tuple, kwargs: dict) -> PureCall:
        """A call as a pure one, on arrays of all processes where each passed its own rows."""
        context = self._context
        call = bind(self._fun, context.name, args, kwargs)
        if jax.process_count() == 1 or not attached(self.mesh):
            return call
        signature = self._signature(call)
        rows = NamedSharding(self.mesh, PartitionSpec(context.use.axes.names))
        context.roles.refuse_ambiguous(call, signature, rows)
        joined = [
            join_rows(arg, signature.name_of(index), rows) if index in signature.batch else arg
            for index, arg in enumerate(call.args)
        ]
        named = {
            name: join_rows(arg, name, rows) if name in signature.keywords else arg for name, arg in call.kwargs.items()
        }
        return replace(call, args=tuple(joined), kwargs=named)

    def _signature(self, call: PureCall) -> Signature:
        """What each argument is in calls of this form, on whose arrays nothing is compiled."""
        form = call.form
        if form not in self._signatures:
            self._signatures[form] = Compilation(self._context, call.without_values()).signature
        return self._signatures[form]

    def _compilation(self, call: PureCall) -> Compilation:
        """The step for calls of this form, as far as it is compiled."""
        form = call.form
        if form not in self._compilations:
            self._compilations[form] = compilation_of(self._context, call.without_values())
        return self._compilations[form]

    def _processes(self) -> Alone:
        """Who has to agree on what runs here and now; where a function around the step is traced, nothing does."""
        return ALONE if is_tracing() else processes_of(self.mesh)

    def _require_devices(self) -> None:
        if not attached(self.mesh):
            raise errors.DevicesNotAttachedError(*_devices(self.mesh))


class BoundStep(Summarized):
    """A ``ShardedStep`` that is a method, bound to its object: the first argument of every call.

    Positions count the object, unless what was sharded was bound already.
    """

    def __init__(self, step: ShardedStep, instance: Any, counts_object: bool = True) -> None:
        functools.update_wrapper(self, step, updated=())
        self._step = step
        self._instance = instance
        self._counts_object = counts_object

    def __call__(self, *args, **kwargs):
        return self._step(self._self(), *args, **kwargs)

    def init(self, create_state: Callable, *args, **kwargs) -> Any:
        """As ``ShardedStep.init``: the object has no part in it."""
        return self._step.init(create_state, *args, **kwargs)

    def reshard(self, mesh: Any = None, **options: Any) -> BoundStep:
        if not self._counts_object:
            given = {"state_argnums", "batch_argnums"}.intersection(options)
            options |= {name: _behind_object(options[name]) for name in given}
        return BoundStep(self._step.reshard(mesh, **options), self._instance, self._counts_object)

    def trace(self, *args, **kwargs) -> TracedStep:
        return self._step.trace(self._self(), *args, **kwargs)

    def lower(self, *args, **kwargs) -> LoweredStep:
        return self._step.lower(self._self(), *args, **kwargs)

    def lower_gspmd(self, *args, **kwargs) -> jax.stages.Lowered:
        return self._step.lower_gspmd(self._self(), *args, **kwargs)

    def plan(self, *args, **kwargs) -> Plan:
        return self._step.plan(self._self(), *args, **kwargs)

    def profile(self, *args, runs: int = 5, known: Profile | None = None, **kwargs) -> Taken:
        return self._step.profile(self._self(), *args, runs=runs, known=known, **kwargs)

    def validate(self, *args, tolerance: float = 0.01, **kwargs) -> Agreement:
        return self._step.validate(self._self(), *args, tolerance=tolerance, **kwargs)

    def _summary(self) -> Summary:
        bound = f", bound to a {type(self._instance).__name__}"
        summary = self._step._summary()
        return Summary(summary.title + bound, summary.rows, summary.trees)

    def explain(self, assume: bool = False) -> Explanation:
        return self._step.explain(assume)

    def plot_memory_curve(self, limits: Sequence[MemoryLimit | LimitedStep], ax: Any = None) -> Any:
        return self._step.plot_memory_curve(limits, ax)

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        return self._step.mesh

    def _self(self) -> Any:
        is_leaf = not holds_objects(self._instance) and jax.tree_util.all_leaves([self._instance])
        if is_leaf and static_and_donated(self._step._fun)[0].isdisjoint(("self", 0)):
            raise errors.PlainSelfError(self._step._context.name, self._instance)
        return self._instance
