"""What can go wrong, said so that it can be put right: what, where in the user's code, the values, and the remedy."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence


class DeepCompileError(Exception):
    """Base of every error this package raises on purpose; in its text a line break with an indent is a space."""

    def __init__(self, text: str) -> None:
        super().__init__(re.sub(r"\n +", " ", text))


_ELSEWHERE = (
    "If it holds no examples, make it an argument of its own, which is replicated, or name the arguments that do: "
    "shard(..., batch_argnums=...), () for none."
)


class BatchNotDivisibleError(DeepCompileError, ValueError):
    def __init__(self, path: str, shape: Sequence[int], parts: int, counted: str) -> None:
        size = shape[0] if shape else 0
        below, above = size // parts * parts, (size // parts + 1) * parts
        choices = f"{below} or {above}" if below else f"{above}"
        super().__init__(f"""batch leaf {path} has shape {tuple(shape)}: its leading dimension {size} must be a multiple
        of {parts}, the number of {counted}. Use a batch of {choices} examples, or drop the last, shorter batch of an
        epoch. Examples lead: where time or microbatches do, transpose or reshape it before the step. {_ELSEWHERE} If it
        is state, name what is: shard(..., state_argnums=...).""")


class ArgnumsError(DeepCompileError, ValueError):
    def __init__(self, parameter: str, given: object, last: int | None = None) -> None:
        named = "Name those further behind by their number too" if last is None else f"Its last is {last}"
        super().__init__(f"""{parameter} is {given!r}: positions count the parameters of the step from the first, which
        is 0. {named}.""")


class StateAndBatchError(DeepCompileError, ValueError):
    def __init__(self, positions: Sequence[int]) -> None:
        super().__init__(f"""state_argnums and batch_argnums both name position {", ".join(map(str, positions))}: an
        argument is one or the other. What is returned anew is state, and what holds an example in each row is batch;
        make two arguments of one that has both.""")


class AmbiguousRowsError(DeepCompileError, ValueError):
    def __init__(self, function: str, argument: str, places: tuple[object, object], processes: int) -> None:
        batch, other = places
        super().__init__(f"""{function} was given {argument} with as many rows as the batch, in a run of {processes}
        processes: they may be the rows of this process or the same in all of them. Say which arguments have examples:
        shard(..., batch_argnums=({batch}, {other})) if {argument} is one of them, else batch_argnums={batch}.""")


class MicrobatchCountError(DeepCompileError, ValueError):
    def __init__(self, microbatches: object) -> None:
        super().__init__(f"""microbatches is {microbatches!r}: it must be a positive whole number, the number of parts
        in which each device works on its examples, one after the other; several to choose from, such as range(1, 17);
        or "auto". Use 1 for all examples at once.""")


class NoBatchError(DeepCompileError, ValueError):
    def __init__(self, function: str, microbatches: object) -> None:
        super().__init__(f"""{function} was to work through its batch in {microbatches} parts, but no argument looks
        like a batch: arrays whose leading dimension counts examples, beside the state. Name the positions of those that
        have examples, shard(..., batch_argnums=...), or leave microbatches out.""")


class MicrobatchNotDivisibleError(DeepCompileError, ValueError):
    def __init__(self, path: str, shape: Sequence[int], devices: int, microbatches: int) -> None:
        held, together = shape[0] // devices, devices * microbatches
        divisors = ", ".join(str(count) for count in range(1, held + 1) if held % count == 0)
        super().__init__(f"""batch leaf {path} has shape {tuple(shape)}: each of {devices} devices holds {held} of its
        {shape[0]} examples, and {held} do not divide into {microbatches} microbatches. Use microbatches={divisors}, or
        a batch of {-(-shape[0] // together) * together} examples. {_ELSEWHERE}""")


class WholeBatchNeededError(DeepCompileError, NotImplementedError):
    def __init__(self, what: str, where: str, microbatches: int, reason: str, remedy: str) -> None:
        super().__init__(f"""{what} at {where} needs the whole batch in the middle of the step, and with
        microbatches={microbatches} only a part of it is there at a time: {reason}. {remedy}, or use microbatches=1. If
        it comes of what holds no examples, as a table in the batch, make that an argument of its own, or name the
        arguments that have some: shard(..., batch_argnums=...).""")


class MeshAxisError(DeepCompileError, ValueError):
    def __init__(self, asked: str, axes: Mapping[str, int], parameter: str) -> None:
        shape = ", ".join(f"{name}={size}" for name, size in axes.items())
        super().__init__(f"""the mesh has no axis '{asked}' to shard over: its axes are {shape}. Name the right one,
        shard(mesh, {parameter}="{next(iter(axes), asked)}"), or give the mesh an axis called '{asked}'.""")


class ManualAxisError(DeepCompileError, ValueError):
    def __init__(self, axis: str, theirs: Mapping[str, int], ours: Mapping[str, int], where: str) -> None:
        super().__init__(f"""the shard_map at {where} runs over {theirs[axis]} blocks along its axis '{axis}' (its mesh
        is {dict(theirs)}), and no axes of this step's mesh {dict(ours)} have as many. Give the step a mesh with an axis
        of {theirs[axis]} devices, or the shard_map the mesh of the step; where it only computes faster, leave it
        out.""")


class NestedManualError(DeepCompileError, NotImplementedError):
    def __init__(self, axis: str, theirs: Mapping[str, int], free: Mapping[str, int], where: str) -> None:
        there = ", ".join(f"{name}={size}" for name, size in free.items()) or "none"
        super().__init__(f"""the shard_map at {where} divides along '{axis}' (its mesh is {dict(theirs)}) where this
        step leaves other axes to it: {there}. Make it part of the shard_map around it, if there is one; else give the
        step's mesh the axis '{axis}', which then is the shard_map's alone.""")


class ManualAxesOrderError(DeepCompileError, NotImplementedError):
    def __init__(self, spec: str, axes: Sequence[str], where: str) -> None:
        super().__init__(f"""the shard_map at {where} divides a dimension by {spec}, and this step's mesh has its axes
        in the order {", ".join(axes)}. Name the axes of a dimension in the order of the mesh.""")


class ExplicitAxesError(DeepCompileError, ValueError):
    def __init__(self, function: str, reason: str) -> None:
        super().__init__(f"""{function} has a shard_map over a mesh of explicit axes, which takes values whose types say
        how they are divided, and in a sharded step none do: divisions are derived. Give the shard_map a mesh of
        automatic axes, jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,)). JAX said: {reason}""")


class MeshTooLargeError(DeepCompileError, ValueError):
    def __init__(self, axes: Mapping[str, int], needed: int, present: int, platform: str) -> None:
        shape = ", ".join(f"{name}={size}" for name, size in axes.items())
        super().__init__(f"""the mesh {shape} needs {needed} devices and there are {present} ({platform}). Make it
        smaller, or start more: on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before importing
        jax.""")


class DevicesNotAttachedError(DeepCompileError, RuntimeError):
    def __init__(self, kind: str, count: int) -> None:
        super().__init__(f"""this step was sharded for {count} devices ({kind}) that are not attached to this process,
        so it can be traced, lowered and compiled but not called. Call .lower(...).compile(), or shard it on a mesh of
        jax.devices().""")


class NothingToMeasureOnError(DeepCompileError, ValueError):
    def __init__(self, kind: str, count: int) -> None:
        super().__init__(f"""measure=True runs plans on the devices of the mesh, and these {count} ({kind}) are not
        attached to this process. Leave it out: the plan is then the one that simulates fastest.""")


class NoRoomToMeasureError(DeepCompileError, MemoryError):
    def __init__(self, function: str, needed_bytes: int, copy_bytes: int, free_bytes: int) -> None:
        super().__init__(f"""measure=True runs {function} on a copy of its state, for which there is no room: it takes
        {sized(needed_bytes)} more a device, {sized(copy_bytes)} of them the copy, and {sized(free_bytes)} are free,
        {sized(needed_bytes - free_bytes)} too few. Leave measure=True out, or measure on more devices.""")


class StepSpecError(DeepCompileError, ValueError):
    def __init__(self, spec: str, problem: str) -> None:
        super().__init__(f"""{spec} is no step: {problem}. Name a function without arguments that returns (step, state,
        batch), as FILE.py:NAME or package.module:NAME; jax.ShapeDtypeStructs will do for state and batch.""")


class NothingSimulatedError(DeepCompileError, ValueError):
    def __init__(self, spec: str, devices: int, platform: str) -> None:
        super().__init__(f"""{spec}: nothing is simulated for its {devices} devices ({platform}), and so nothing says
        what fits. Name GPUs, which need not be here: --gpu h100.""")


class SpecError(DeepCompileError, ValueError):
    def __init__(self, spec: str, problem: str) -> None:
        self.problem = problem
        super().__init__(f"{spec}: {problem}. Say FILE.py:NAME or package.module:NAME, seen from the current folder.")


class WouldOverwriteError(DeepCompileError, FileExistsError):
    def __init__(self, paths: Sequence[object]) -> None:
        super().__init__(f"{', '.join(map(str, paths))} would be overwritten; name another folder.")


class CannotWriteError(DeepCompileError, OSError):
    def __init__(
        self, what: str, problem: str, remedy: str = "Name a file in a folder that is there and yours to write"
    ) -> None:
        super().__init__(f"{what} cannot be written: {problem}. {remedy}.")


class CannotReadError(DeepCompileError, OSError):
    def __init__(self, what: str, problem: str, written_by: str) -> None:
        super().__init__(f"{what} cannot be read: {problem}. Name a file that `{written_by}` wrote.")


class TargetError(DeepCompileError, ValueError):
    def __init__(self, target: str, parameter: str, value: object, expected: str) -> None:
        super().__init__(f"targets.{target}({parameter}={value!r}): expected {expected}.")


class TargetMeshError(DeepCompileError, ValueError):
    def __init__(self, target: str, axes: Mapping[str, int], places: int, gpus: int) -> None:
        shape = ", ".join(f"{name}={size}" for name, size in axes.items())
        super().__init__(f"""the mesh {shape} has {places} places for the {gpus} GPUs of this target ({target}). Give
        axes whose sizes multiply to {gpus}, or a target with other nodes and gpus_per_node.""")


class TargetUnavailableError(DeepCompileError, RuntimeError):
    def __init__(self, target: str, reason: str) -> None:
        super().__init__(f"""compiling for {target} GPUs that are not here needs JAX's CUDA compiler plugin and ptxas:
        install them with `pip install 'jax-deepcompile[h100]'` and `deepcompile install-compiler` (no CUDA libraries
        are needed). JAX said: {reason}""")


class CompilerNotInstalledError(DeepCompileError, RuntimeError):
    def __init__(self, package: str, folder: str) -> None:
        super().__init__(f"""pip did not install {package} into {folder}, and said why above. Where there is no pip, as
        in an environment of uv's, run `uv pip install --no-deps --target {folder} {package}`.""")


class KernelNeedsGpuError(DeepCompileError, RuntimeError):
    def __init__(self, function: str, primitive: str, line: str) -> None:
        super().__init__(f"""{function} has a Pallas kernel for Mosaic GPU ({primitive}), made at {line}, which this
        machine cannot compile for GPUs that are not here: what it loads for that is in no package but
        jax-cuda12-plugin. Install that, of jax's version and with --no-deps, or plan where the GPUs are.""")


class LibraryNeedsGpuError(DeepCompileError, RuntimeError):
    def __init__(self, function: str, primitive: str, line: str) -> None:
        super().__init__(f"""{function} has a {primitive} at {line}, which on GPUs is a call of a library, such as
        cuSOLVER, that this machine cannot compile for GPUs that are not here. Plan where the GPUs are, or plan the step
        without it.""")


class MissingExtraError(DeepCompileError, ImportError):
    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"""{what} needs {package}, which is not installed: pip install {package}, or all that comes
        with it by pip install 'jax-deepcompile[{extra}]'.""")


class ProfileFormatError(DeepCompileError, ValueError):
    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"""{name} is not a profile: {problem}. Take the profile again (deepcompile profile); profiles
        are not meant to be edited, and not kept from one format to the next.""")


class ProfileMismatchError(DeepCompileError, ValueError):
    def __init__(self, what: str, expected: str, found: str) -> None:
        super().__init__(f"""the profile is of another {what}: expected {expected}, found {found}. Take a profile of
        this {what}; without one, costs come from the analytical model.""")


class LeafTypeError(DeepCompileError, TypeError):
    def __init__(self, path: str, leaf: object) -> None:
        dtype = None if isinstance(leaf, type) else getattr(leaf, "dtype", None)
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}" + (f" of {dtype}" if dtype is not None else "")
        if dtype is not None and getattr(dtype, "kind", "f") not in "OSUVMm":
            super().__init__(f"""argument leaf {path} is a {kind}, which JAX does not take for an array:
            {_shortened(leaf)}. Pass numpy.asarray(..., dtype) of it, after .filled() if it is masked.""")
            return
        if dtype is None and isinstance(leaf, Iterable) and not isinstance(leaf, Collection):
            super().__init__(f"""argument leaf {path} is a {kind}, neither an array nor a number. Pass what it gives,
            one at a step: for batch in {path}: ...""")
            return
        what = "an array nor a number" if dtype is None else "numbers nor random keys"
        super().__init__(f"""argument leaf {path} is a {kind}, neither {what}: {_shortened(leaf)}. Keep it out of the
        step's arguments (close over it; of an Equinox model pass what eqx.partition gives), or, in a class of yours,
        mark it static: flax.struct.field(pytree_node=False).""")


class MutableArrayError(DeepCompileError, NotImplementedError):
    def __init__(self, what: str) -> None:
        super().__init__(f"""{what}, and each device would change one of its own. Keep a value in its place: a leaf of
        the state, which the step returns anew.""")


class PlainSelfError(DeepCompileError, TypeError):
    def __init__(self, function: str, instance: object) -> None:
        name = function.rsplit(".", 1)[-1]
        super().__init__(f"""{function} is a method of a {type(instance).__module__}.{type(instance).__qualname__},
        which is neither an NNX module nor a pytree, so it cannot be an argument of a step. Shard the method of the
        object in its place, where it is a function of the other arguments, numbered from 0: self.{name} =
        shard(self.{name}) in __init__.""")


class PythonValueNeededError(DeepCompileError, TypeError):
    def __init__(self, function: str, arguments: Sequence[str], reason: str) -> None:
        name = function.rsplit(".", 1)[-1]
        keyword = arguments[0].split("[")[0].split(".")[0]
        lists = " Where it is one number of many in a list, pass the list as an array." * ("[" in arguments[0])
        super().__init__(f"""{function} needs the value of {", ".join(arguments)} while it is traced, for an if, a loop
        or a shape, and an argument is an array then, whose value is not known. Fix it beforehand, with
        functools.partial({name}, {keyword}=...) in the place of {name}, one for each value; or close over it.{lists}
        JAX said: {reason}""")


class StateValueNeededError(DeepCompileError, TypeError):
    def __init__(self, function: str, leaves: Sequence[str], reason: str) -> None:
        listed = some_of(leaves, 5)
        super().__init__(f"""{function} needs the value of {listed} while it is traced, a Python number among the leaves
        of its state, and state is arrays then, whose values are not known. Of an Equinox model pass the arrays alone:
        params, static = eqx.partition(model, eqx.is_array) before the step, eqx.combine(params, static) in it; in a
        class of yours mark the field static, flax.struct.field(pytree_node=False). JAX said: {reason}""")


class StateNotReturnedError(DeepCompileError, ValueError):
    def __init__(self, function: str, argument: str, returned: str) -> None:
        super().__init__(f"""{function} does not return its state: nothing it returns has the structure of argument
        {argument}. It returned {returned}. Return the updated state, as in `return state, metrics`; if another argument
        is the state, say which: shard(..., state_argnums=...). A step that evaluates returns no state, and makes no new
        one either; this one does, or reads none.""")


class StateChangedError(DeepCompileError, ValueError):
    def __init__(self, function: str, changes: Sequence[str]) -> None:
        listed = "; ".join(changes[:5]) + (f"; and {len(changes) - 5} more" if len(changes) > 5 else "")
        super().__init__(f"""{function} returns its state changed in structure, shape or dtype, so the next step could
        not take it: {listed}. Return every leaf as it came in: where a dtype was promoted, cast back with
        .astype(old.dtype); where only the first step changes something, begin with state as that returns it.""")


class HostCallbackError(DeepCompileError, NotImplementedError):
    def __init__(self, primitive: str, where: str, too_large: str = "") -> None:
        reason = "A callback would run once on every device, each seeing only its own part of the data"
        if too_large:
            reason = f"""Every device would call it with {too_large}, and calls with arrays of more than 100 KiB wait
            for one another for ever where devices share a host's threads"""
        super().__init__(f"""the step calls back to the host with {primitive} at {where}. {reason}. Return the value
        from the step and use it outside; to look at it, use jax.debug.print or jax.debug.callback.""")


class OrderedEffectError(DeepCompileError, NotImplementedError):
    def __init__(self, primitive: str, where: str) -> None:
        super().__init__(f"""{primitive} at {where} asks for ordered=True, and effects on several devices have no order.
        Drop ordered=True.""")


class PmappedStepError(DeepCompileError, TypeError):
    def __init__(self, function: str) -> None:
        super().__init__(f"""{function} is pmapped already, so it is written for one device's batch and its own
        collectives. Decorate the plain function instead, with the global batch: lax.pmean and the like may stay, over
        the one that sees all of it.""")


class AxisNameError(DeepCompileError, NameError):
    def __init__(self, function: str, reason: str) -> None:
        super().__init__(f"""{function} names an axis that it has no devices along ({reason}). Leave lax.pmean and the
        like over it out: the step sees the global batch, so that there is nothing to exchange.""")


class StaticArgumentError(DeepCompileError, TypeError):
    def __init__(self, name: str, value: object, reason: str) -> None:
        super().__init__(f"""static argument {name} is {_shortened(value)}, which has no hash ({reason}), so calls
        cannot be told apart by it. Give its class __hash__ and __eq__ (dataclass(frozen=True) does), or fix it:
        functools.partial(..., {name}=...).""")


class TracedStaticArgumentError(DeepCompileError, TypeError):
    def __init__(self, function: str, reason: str) -> None:
        name = function.rsplit(".", 1)[-1]
        super().__init__(f"""{function} calls what is jitted with static arguments on one of its own arguments, which is
        an array while it is traced. Fix that one beforehand: shard(functools.partial({name}, ...)). JAX said:
        {reason}""")


class ReturnedLeafError(DeepCompileError, TypeError):
    def __init__(self, function: str, path: str, leaf: object) -> None:
        super().__init__(f"""{function} returns {_shortened(leaf)} at {path}, a
        {type(leaf).__module__}.{type(leaf).__qualname__}, which is neither an array nor a number. Leave it out of what
        the step returns.""")


class StateDonatedError(DeepCompileError, RuntimeError):
    def __init__(self, function: str, path: str, shape: Sequence[int], dtype: str, is_state: bool) -> None:
        cause = "it was deleted, or donated to another function, or an earlier step was given it as part of its state"
        remedy = "Pass an array that is still there, or a copy that was made before."
        if is_state:
            cause = "an earlier step was given it and wrote its result there"
            remedy = """Go on with the state that step returned, or copy what you need later, jax.tree.map(jnp.copy,
            ...), before the step; shard(..., donate=False) keeps all that is passed in. If the step only reads it, say
            what is state: shard(..., state_argnums=...)."""
        super().__init__(f"""{function} was passed {path}, a {dtype}[{",".join(map(str, shape))}] whose memory is gone:
        {cause}. {remedy}""")


class NotTracedError(DeepCompileError, RuntimeError):
    def __init__(self, function: str) -> None:
        super().__init__(f"""{function} has not been traced yet, so there is nothing to explain. Call it, or trace it:
        step.trace(state, batch), where jax.ShapeDtypeStruct leaves will do.""")


class OptionTypeError(DeepCompileError, TypeError):
    def __init__(self, name: str, expected: str, given: object) -> None:
        super().__init__(f"""shard({name}={_shortened(given)}): expected {expected}, and this is a
        {type(given).__qualname__}.""")


class ArgumentError(DeepCompileError, TypeError, ValueError):
    def __init__(self, call: str, name: str, given: object, expected: str) -> None:
        super().__init__(f"{call}({name}={_shortened(given)}): expected {expected}.")


class AxisUseError(DeepCompileError, ValueError):
    def __init__(self, axis: str, fsdp_axes: object, data_axes: object) -> None:
        super().__init__(f"""shard(fsdp_axes={fsdp_axes!r}, data_axes={data_axes!r}): the mesh axis '{axis}' is named
        twice, and state cannot be both divided and replicated along it. Leave it out of data_axes: what divides the
        state divides the batch as well.""")


class UnknownPassError(DeepCompileError, ValueError):
    def __init__(self, where: str, name: str, nearest: str) -> None:
        super().__init__(f"{where} leaves out {name!r}, which is no strategy and no kind of decision{nearest}.")


class MeshShapeError(DeepCompileError, ValueError):
    def __init__(self, shape: Mapping, axis: object, size: object, present: int) -> None:
        problem = f"axis {axis!r} has size {size!r}" if shape else "it has no axes"
        super().__init__(f"""the mesh {shape!r} is no shape: {problem}. Give each axis a name and a whole number of
        devices, at least 1, such as {{'data': 2, 'fsdp': 4}}; there are {present} devices, and shard() without a mesh
        takes all.""")


class MemoryLimitError(DeepCompileError, ValueError):
    def __init__(self, limit: object, option: str = "memory_limit") -> None:
        whose = "host" if option.startswith("host") else "device"
        super().__init__(f"""{option}={_shortened(limit)} is not understood. Give bytes (a whole number), a size with
        its unit such as '72GiB', a fraction of the {whose}'s memory such as 0.9 (where the device has a memory of its
        own), or None for the {whose}'s memory less a reserve.""")


class MemoryExceededError(DeepCompileError, MemoryError):
    """The step does not fit, even with everything sharded and nothing kept.

    ``largest`` are the temporaries at the peak: bytes, and the line of the step that they stem from. Where
    ``needed_bytes`` are ``argument_bytes`` nothing was compiled: state and batch alone are too much, even with
    ``movable_bytes`` of them on the host. Of ``unread_bytes`` of them it reads nothing. It may take
    ``host_limit_bytes`` of the host's memory for each device; with ``host_bytes``, if not 0, it would fit, where the
    environment says what is ``pinned``.
    """

    def __init__(
        self,
        function: str,
        needed_bytes: int,
        limit_bytes: int,
        argument_bytes: int,
        largest: Sequence[tuple[int, str]] = (),
        host_bytes: int = 0,
        host_limit_bytes: int = 0,
        pinned: str = "",
        movable_bytes: int = 0,
        unread_bytes: int = 0,
    ) -> None:
        self.needed_bytes, self.limit_bytes, self.host_bytes = needed_bytes, limit_bytes, host_bytes
        matters = 0 < (needed_bytes - limit_bytes) / 10 < unread_bytes
        unread = f" It reads nothing of {sized(unread_bytes)} of its state: call it without." * matters
        excess = f"{sized(needed_bytes - limit_bytes)} more than the limit of {sized(limit_bytes)}"
        lines: Counter[str] = Counter()
        for size_bytes, line in largest:
            lines[line] += size_bytes
        worst = ", ".join(f"{sized(size_bytes)} of {line}" for line, size_bytes in lines.most_common(3))
        raised = f"or raise memory_limit to {_limit(needed_bytes)}"
        if host_bytes:
            more = f"{sized(host_bytes - host_limit_bytes)} more than it is"
            raised += f", or host_memory_limit to {_limit(host_bytes)} ({more}){_pinning(pinned)}"
            raised += ", for state and activations to be there"
        if needed_bytes == argument_bytes:
            away = f", with {sized(movable_bytes)} of them on the host" * bool(movable_bytes)
            what = f"""state and batch of {function} alone take {sized(needed_bytes)} a device{away}, {excess}. Use more
            devices"""
            raised = f"or raise memory_limit to at least {_limit(needed_bytes)} and what temporaries take besides"
        else:
            what = f"""{function} takes {sized(needed_bytes)} a device, {excess}: {sized(argument_bytes)} are state and
            batch, {sized(needed_bytes - argument_bytes)} temporaries{f" (most of all {worst})" * bool(worst)}. Use more
            devices, microbatches=k (a smaller batch at a time), jax.checkpoint around the layers"""
        super().__init__(f"{what}, {raised}.{unread}")


def _pinning(pinned: str) -> str:
    """For XLA to give programs as much of the host's memory."""
    return f", with {pinned} in the environment" * bool(pinned)


class HostMemoryExceededError(DeepCompileError, MemoryError):
    def __init__(self, function: str, needed_bytes: int, limit_bytes: int, pinned: str = "") -> None:
        self.needed_bytes, self.limit_bytes = needed_bytes, limit_bytes
        super().__init__(f"""{function} takes {sized(needed_bytes)} of the host's memory for each device as the plan has
        it, {needed_bytes - limit_bytes:,} bytes more than the limit of {sized(limit_bytes)}. Raise host_memory_limit to
        {_limit(needed_bytes)}{_pinning(pinned)}, or drop the plan, and the step is planned anew.""")


class PlanError(DeepCompileError, ValueError):
    """``why`` is said again where the same plan is known by another name."""

    def __init__(self, where: str, why: str) -> None:
        self.why = why
        super().__init__(f"{where} cannot be used: {why}. Drop it, and the step is planned anew.")


class OtherProcessError(DeepCompileError, RuntimeError):
    """This process stops because of another one of its run, whose collectives it would wait for forever."""


class ProcessMismatchError(OtherProcessError):
    def __init__(self, said: Mapping[int, str]) -> None:
        listed = "; ".join(
            f"{listed_processes([process for process, text in said.items() if text == what])} would {what}"
            for what in dict.fromkeys(said.values())
        )
        super().__init__(f"""the processes of this run are about to do different things: {listed}. Their collectives
        would wait for each other forever. Give every process the same code, configuration and versions, the same of
        what is no batch, and in every step as many rows: drop the last, shorter batch of an epoch in all of them.""")


class ProcessStoppedError(OtherProcessError):
    def __init__(self, process: int, reason: str) -> None:
        super().__init__(f"""process {process} of this run does not go on, so this one stops too: its collectives would
        wait for process {process} forever. Its reason: {reason}""")


class InvariantError(DeepCompileError, AssertionError):
    """A compiler pass broke an invariant of ``ir/verifier.py``: a bug of this package, not of the user's step."""

    def __init__(self, number: int, invariant: str, found: str, made_by: str = "") -> None:
        self._what = (number, invariant, found)
        after = f" after {made_by}" if made_by else ""
        super().__init__(f"""invariant {number} does not hold{after} ({invariant}): {found}. Please report this as a
        bug.""")

    def after(self, pass_name: str) -> InvariantError:
        """The same, with the name of the pass that broke it."""
        return InvariantError(*self._what, made_by=pass_name)


class MalformedHloError(DeepCompileError, ValueError):
    def __init__(self, line: int, found: str) -> None:
        where = f"line {line}" if line else "the text"
        super().__init__(f"""this is not the text of a whole compiled program: {where}: {found}. Pass what
        Compiled.as_text() returns, unabridged.""")


class UnscheduledHloError(DeepCompileError, ValueError):
    def __init__(self, module: str) -> None:
        super().__init__(f"""module {module} is not scheduled, so nothing says in which order its operations run. Pass
        the text of a compiled program, lowered.compile().as_text(), not of a lowered one.""")


class UnknownOperationError(DeepCompileError, NotImplementedError):
    def __init__(self, opcode: str, name: str) -> None:
        super().__init__(f"""the compiled program has the operation {opcode} (%{name}), which this version of
        jax_deepcompile cannot time: it may be newer than XLA's of JAX 0.12. Add it to
        jax_deepcompile/hlo/opcodes.py.""")


class UnknownHardwareWarning(UserWarning):
    def __init__(self, device_kind: str, assumed: str, known: Sequence[str]) -> None:
        super().__init__(
            f"nothing is known of {device_kind}: what programs take on it is simulated as on one {assumed}, and its "
            f"memory is not. Known are {', '.join(known)}; add it to jax_deepcompile/costs/hardware.py."
        )


class UnknownXlaOptionWarning(UserWarning):
    def __init__(self, name: str, jaxlib: Sequence[int]) -> None:
        super().__init__(
            f"XLA of jaxlib {'.'.join(map(str, jaxlib))} does not know the option {name}, and compiles without it: "
            f"what the plan expects of it may not come true."
        )


def sized(size_bytes: int) -> str:
    """Bytes with the digits that tell what is needed from what there is."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes:,} bytes"


def _limit(size_bytes: int) -> str:
    """The least limit that holds so much, as options take it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size_bytes >= unit:
            return f'"{math.ceil(100 * size_bytes / unit) / 100:.2f}{name}"'
    return str(size_bytes)


def listed_processes(indices: Sequence[int]) -> str:
    """``process 3``, or ``processes 0, 1, 2 and 61 more``."""
    return f"{'process' if len(indices) == 1 else 'processes'} {some_of([*map(str, sorted(indices))], 8)}"


def some_of(names: Sequence[str], most: int) -> str:
    """``a, b and 3 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _shortened(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
