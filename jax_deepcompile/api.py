"""``shard`` and the object it returns."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import is_tracing
from jax_deepcompile.compiler import Launch, OtherShapes, Prepared, Programs
from jax_deepcompile.costs.devices import as_if_here, machine_of
from jax_deepcompile.costs.fingerprint import fingerprint, program_text
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.frontend.arguments import are_plain, join_rows, place, refuse_deleted, shapes_only
from jax_deepcompile.frontend.call import Creation, PureCall, bind
from jax_deepcompile.frontend.meshes import AxisNames, MeshUse, resolve_mesh
from jax_deepcompile.frontend.roles import Roles
from jax_deepcompile.frontend.trace import function_name, trace_init
from jax_deepcompile.ir.placement import attached
from jax_deepcompile.lowering.emit import abstract_outputs, emit, sharding_of
from jax_deepcompile.methods import BoundStep
from jax_deepcompile.options import check_options
from jax_deepcompile.partition.partition import partition_init
from jax_deepcompile.planner.limits import MemoryLimit
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.selection import Passes
from jax_deepcompile.planner.session import PlanOptions
from jax_deepcompile.profilers.take import Taken, take_profile
from jax_deepcompile.report.summary import summary_of_step
from jax_deepcompile.report.text import explain
from jax_deepcompile.runtime.processes import ALONE, Alone, processes_of
from jax_deepcompile.stages import LoweredStep, TracedStep
from jax_deepcompile.summary import Summarized, Summary, Text

MeshLike = Mesh | AbstractMesh | Mapping[str, int]


def shard(
    fun: Callable | MeshLike | None = None,
    mesh: MeshLike | None = None,
    *,
    state_argnums: int | Sequence[int] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    fsdp_axes: AxisNames = "fsdp",
    data_axes: AxisNames = "data",
    microbatches: int = 1,
    memory_limit: MemoryLimit = None,
    passes: Passes = None,
    profile: Profile | None = None,
    plan: Plan | None = None,
    cache_dir: str | os.PathLike | None = None,
    donate: bool = True,
) -> Any:
    """Trains an ordinary single-device step fully sharded.

    Use it as ``@shard``, ``@shard(mesh, ...)`` or ``shard(step, mesh, ...)``::

        @deepcompile.shard(mesh)
        def train_step(state, batch):
            ...
            return state, metrics

        state = train_step.init(create_state, jax.random.key(0))
        state, metrics = train_step(state, batch)

    The step is written for one device: global batch, global shapes, no axis names. Sharded it computes the same
    numbers, up to the order of floating-point sums.

    Args:
      fun: the step, ``(state, batch, ...) -> (state, ...)``. NNX objects among its arguments are state and are updated
        in place, as ``nnx.jit`` does.
      mesh: the devices: a ``jax.sharding.Mesh``, a shape such as ``{"data": 2, "fsdp": 4}``, or None for all devices
        along one axis "fsdp".
      state_argnums: positions of the arguments that are state; each must be returned, with the same structure, shapes
        and dtypes. By default the NNX objects, or else the first argument that is not a random key or a number, and
        with them every argument that the state of an optax optimizer is in, and others that look like parameters or
        that are returned anew: with their old elements in the new ones. Those that are not returned are divided like
        state and only read. Positions count the parameters of the step, those that are passed by name too.
      batch_argnums: positions of the arguments whose leaves have examples along dimension 0, divided among all devices;
        scalars among them are replicated. By default the first argument, scalars aside, that is neither state nor
        parameters nor a random key, and those that have as many examples in every leaf, such as labels; or those with
        as many as more arguments have. All further arguments are replicated.
      fsdp_axes: mesh axes that divide the state.
      data_axes: mesh axes that divide the batch and replicate the state, where the mesh has them. Axes that are in
        neither are left to XLA and to the step's own sharding constraints.
      microbatches: into how many parts each device divides its examples, to work on one after the other and update the
        state once, with the gradients of all of them: a step takes the memory of a smaller batch and computes the same.
      memory_limit: device memory a step may take: bytes, "72GiB", a fraction of the device's memory such as 0.9, or
        None for the device's memory less a reserve.
      passes: strategies to make the step faster, in the order they are asked; by default all. ``()`` shards and no
        more, ``"-unshard"`` leaves one out by name, as ``DEEPCOMPILE_DISABLE=unshard`` in the environment does.
      profile: measured times to plan by; by default tables for the device.
      plan: decisions to carry out as they are, such as another run's ``step.plan(...)``.
      cache_dir: a folder that keeps plans between runs, and executables if nobody else can write them.
      donate: reuse the memory of the state passed in for the one returned. Without an optimizer's state only of what
        ``state_argnums`` names or cannot be mistaken: gradients look like new parameters.

    Returns:
      A ``ShardedStep``, or a decorator that makes one.

    Raises:
      ArgnumsError, MemoryLimitError, MeshAxisError, MeshShapeError, MeshTooLargeError, MicrobatchCountError,
        OptionTypeError, PmappedStepError: see ``jax_deepcompile.errors``.
    """
    if isinstance(fun, (Mesh, AbstractMesh, Mapping)):
        if mesh is not None:
            raise errors.OptionTypeError("mesh", "one mesh, or the function first: shard(step, mesh)", mesh)
        fun, mesh = None, fun
    asked = {
        "mesh": mesh,
        "state_argnums": state_argnums,
        "batch_argnums": batch_argnums,
        "fsdp_axes": fsdp_axes,
        "data_axes": data_axes,
        "microbatches": microbatches,
        "memory_limit": memory_limit,
        "passes": passes,
        "profile": profile,
        "plan": plan,
        "cache_dir": cache_dir,
        "donate": donate,
    }
    make = functools.partial(_make_step, asked=asked)
    return make if fun is None else make(fun)


def _make_step(fun: Callable, asked: Mapping[str, Any]) -> ShardedStep:
    check_options(fun, asked)
    if _is_pmapped(fun):
        raise errors.PmappedStepError(function_name(fun))
    passes, cache_dir = asked["passes"], asked["cache_dir"]
    wishes = PlanOptions(
        asked["memory_limit"],
        passes if passes is None or isinstance(passes, str) else tuple(passes),
        asked["profile"],
        asked["plan"],
        None if cache_dir is None else Path(cache_dir),
    )
    return ShardedStep(fun, resolve_mesh(asked["mesh"], asked["fsdp_axes"], asked["data_axes"]), wishes, asked)


def _is_pmapped(fun: Callable) -> bool:
    """``pmap`` leaves its mark in what it returns: a C++ ``PmapFunction``, or a wrapper from JAX's pmap module."""
    wrapper = getattr(type(fun), "__name__", "") == "PmapFunction"
    code = getattr(getattr(fun, "lower", None), "__module__", "") or ""
    return wrapper or "pmap" in code.rsplit(".", 1)[-1] or "pmap" in getattr(fun, "__qualname__", "").split(".")[0]


class ShardedStep(Summarized):
    """A train step that runs fully sharded; made by ``shard``."""

    def __init__(
        self,
        fun: Callable,
        use: MeshUse,
        wishes: PlanOptions,
        asked: Mapping[str, Any],
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._name = function_name(fun)
        self._use = use
        self._asked = asked
        self._roles = Roles.of(asked["state_argnums"], asked["batch_argnums"])
        self._programs = Programs(self._name, use, self._roles, asked["microbatches"], wishes, asked["donate"])
        self._last: Prepared | None = None
        self._fast: Callable | None = None

    def __get__(self, instance: Any, owner: type | None = None) -> ShardedStep | BoundStep:
        """As a method it takes its object, an NNX module or a pytree, as the argument at position 0."""
        return self if instance is None else BoundStep(self, instance)

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The mesh the step runs on."""
        return self._use.mesh

    def reshard(self, mesh: MeshLike | None = None, **options: Any) -> ShardedStep:
        """The same step, sharded anew.

        Args:
          mesh: other devices; by default the same.
          **options: of ``shard``, in place of those it was made with.
        """
        asked: dict[str, Any] = {**self._asked, **options}
        if mesh is not None:
            asked["mesh"] = mesh
        return shard(self._fun, **asked)

    def __call__(self, *args, **kwargs):
        """Runs one step; state is donated, batches may be numpy arrays or arrays anywhere.

        In a run of several processes each passes its own rows of the batch, or arrays that all of them have. What goes
        wrong in one before its step runs, and its program's end, is an error in all of them.

        Raises:
          BatchNotDivisibleError, NoBatchError, MicrobatchNotDivisibleError, AmbiguousRowsError, StateDonatedError,
          DevicesNotAttachedError, and what tracing finds wrong with the step: see ``jax_deepcompile.errors``.
          ProcessStoppedError, ProcessMismatchError: another process cannot run it, or would run another.
        """
        if self._fast is not None and not kwargs and are_plain(args):
            try:
                return self._fast(*args, {})
            except (TypeError, ValueError, OtherShapes):
                self._fast = None
        self._require_devices()
        processes = self._processes()
        with processes.together():
            return self._call(args, kwargs, processes)

    def init(self, create_state: Callable, *args, **kwargs) -> Any:
        """``create_state(*args, **kwargs)``, born sharded: every device computes its own part of each leaf only.

        Args:
          create_state: makes the state: any pytree, or NNX objects.
          *args, **kwargs: its arguments; replicated.

        Returns:
          What ``create_state`` returns, its leaves sharded as the step wants them; where the devices are not attached
          the leaves are ``jax.ShapeDtypeStruct``s, to trace, plan and compile the step for.
        """
        creation, mesh, processes = Creation(create_state), self._use.mesh, self._processes()
        with processes.together():
            with as_if_here(mesh):
                traced = trace_init(creation, args, kwargs, self._use.axes)
            program = partition_init(traced.program, mesh, self._use.state).program
            outputs = [sharding_of(port, program, mesh) for port in program.outputs]
            if not attached(mesh):
                leaves = abstract_outputs(program, outputs)
                return creation.finish(jax.tree.unflatten(traced.program.out_tree, leaves))
            run, inputs = jax.jit(emit(program, mesh), out_shardings=outputs), jax.tree.leaves((args, kwargs))
            if not processes.is_alone:
                digest = fingerprint(program_text(program), machine_of(mesh))[:16]
                what = f"{program.name}, which creates the state (program {digest})"
                processes.agree(f"compile {what}")
                run.lower(*inputs).compile()
                processes.agree(f"run {what}")
            return creation.finish(jax.tree.unflatten(traced.program.out_tree, run(*inputs)))

    def trace(self, *args, **kwargs) -> TracedStep:
        """Traces and partitions the step; leaves may be ``jax.ShapeDtypeStruct``s."""
        call = self._bind(args, kwargs)
        prepared, programs = self._prepared(call), self._programs
        shapes = shapes_only((*call.args, call.kwargs), prepared.targets, prepared.roles)
        traced, partitioned = programs.partition(call.step, shapes[:-1], call.kwargs)
        return TracedStep(
            traced.program,
            partitioned,
            lambda: programs.planned(partitioned),
            lambda: programs.planned_already(partitioned),
            lambda: programs.run(prepared).trace(*shapes),
            self._use.platform,
        )

    def lower(self, *args, **kwargs) -> LoweredStep:
        """Lowers the step; leaves may be ``jax.ShapeDtypeStruct``s."""
        return self.trace(*args, **kwargs).lower()

    def lower_gspmd(self, *args, **kwargs) -> jax.stages.Lowered:
        """The undecorated step under ``jax.jit`` with the same shardings: what XLA's own partitioner makes of it.

        For comparison; leaves may be ``jax.ShapeDtypeStruct``s.
        """
        call = self._bind(args, kwargs)
        prepared = self._prepared(call)
        plain = jax.jit(
            lambda *args: call.step.fun(*args[:-1], **args[-1]),
            in_shardings=prepared.in_shardings,
            out_shardings=prepared.out_shardings,
            donate_argnums=prepared.donated,
        )
        shapes = shapes_only((*call.args, call.kwargs), prepared.targets, prepared.roles)
        with as_if_here(self._use.mesh):
            traced = plain.trace(*shapes)
        return traced.lower(lowering_platforms=(self._use.platform,))

    def plan(self, *args, **kwargs) -> Plan:
        """The decisions of every pass for these arguments; leaves may be ``jax.ShapeDtypeStruct``s."""
        return self.trace(*args, **kwargs).plan()

    def profile(self, *args, runs: int = 5, known: Profile | None = None) -> Taken:
        """Measures the step on these arguments, and the machine; ``shard(profile=...)`` plans by the result.

        The step runs ``1 + 2 * runs`` times. State that it donates is used up; the result has its successor.

        Args:
          *args: state, batch and what else the step takes.
          runs: measurements of everything; the median counts.
          known: an earlier profile, whose entries are not measured again where they still hold.

        Raises:
          DevicesNotAttachedError: the devices are not here.
        """
        self._require_devices()
        processes = self._processes()
        with processes.together():
            processes.agree(f"profile {self._name}")
            traced = self.trace(*args)
            taken = take_profile(
                self,
                args,
                traced.lower().compile(),
                traced.planned,
                self.mesh,
                base=traced.sharded,
                runs=runs,
                known=known,
                compiler_options=traced.plan().compiler_options(),
            )
        self._programs.measured(traced.partitioned, taken.profile.step)
        return taken

    def explain(self) -> Text:
        """What was decided for the last shapes traced, and why, in a screen."""
        if self._last is None:
            raise errors.NotTracedError(self._name)
        last = self._last
        return explain(last.traced.program, last.partitioned, self._programs.planned_already(last.partitioned))

    def _summary(self) -> Summary:
        partitioned = None if self._last is None else self._last.partitioned
        planned = None if partitioned is None else self._programs.planned_already(partitioned)
        return summary_of_step(self._name, self.mesh, partitioned, planned)

    def _call(self, args: tuple, kwargs: dict, processes: Alone):
        call = self._bind(args, kwargs)
        prepared = self._prepared(call)
        run = self._programs.run(prepared)
        args_of_run = (*call.args, call.kwargs)
        refuse_deleted(args_of_run, prepared.traced.program.inputs, self._name)
        launch = Launch("", is_compiled=True) if processes.is_alone else self._programs.launch(prepared, call)
        processes.agree(f"{'run' if launch.is_compiled else 'compile'} {launch.what}")
        placed, moved_inputs = place(args_of_run, prepared.targets, prepared.returned, prepared.taken, self._use.mesh)
        try:
            self._programs.require_fit(prepared, placed)
            if not launch.is_compiled:
                self._programs.compiled(prepared, placed)
                processes.agree(f"run {launch.what}")
                launch.is_compiled = True
            out = run(*placed)
        except (TypeError, ValueError):
            self._programs.partition(call.step, call.args, call.kwargs)
            raise
        if not call.objects:
            if not moved_inputs and not kwargs and jax.process_count() == 1:
                self._fast = run
            return out
        return call.finish(*out)

    def _bind(self, args: tuple, kwargs: dict) -> PureCall:
        """A call as a pure one, on arrays of all processes where each passed its own rows."""
        call = bind(self._fun, self._name, args, kwargs)
        if jax.process_count() == 1 or not attached(self._use.mesh):
            return call
        signature = self._programs.signature(call.step, call.args, call.kwargs)
        rows = NamedSharding(self._use.mesh, PartitionSpec(self._use.batch))
        self._roles.refuse_ambiguous(call, signature, rows)
        joined = [
            join_rows(arg, signature.name_of(place), rows) if place in signature.batch else arg
            for place, arg in enumerate(call.args)
        ]
        named = {
            name: join_rows(arg, name, rows) if name in signature.keywords else arg for name, arg in call.kwargs.items()
        }
        return replace(call, args=tuple(joined), kwargs=named)

    def _prepared(self, call: PureCall) -> Prepared:
        self._last = self._programs.prepare(call)
        return self._last

    def _processes(self) -> Alone:
        """Who has to agree on what runs here and now; where a function around the step is traced, nothing does."""
        return ALONE if is_tracing() else processes_of(self._use.mesh)

    def _require_devices(self) -> None:
        if not attached(self._use.mesh):
            mesh = self._use.mesh
            kind = "abstract mesh" if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].device_kind
            raise errors.DevicesNotAttachedError(kind, mesh.size)
