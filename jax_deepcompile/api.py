"""``shard``: what users call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, cast, overload

from jax.sharding import AbstractMesh, Mesh

from jax_deepcompile import errors
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.frontend.meshes import AxisNames, Cluster, MeshLike
from jax_deepcompile.options import Microbatches, StepOptions
from jax_deepcompile.planner.limits import MemoryLimit
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.selection import Passes
from jax_deepcompile.step import ShardedStep, make_step
from jax_deepcompile.summary import Summarized, Summary

P = ParamSpec("P")
R = TypeVar("R")


class ShardOptions(TypedDict, total=False):
    """The options of ``shard``, for its types."""

    state_argnums: int | Sequence[int] | None
    batch_argnums: int | Sequence[int] | None
    fsdp_axes: AxisNames
    data_axes: AxisNames
    microbatches: Microbatches
    memory_limit: MemoryLimit
    host_memory_limit: MemoryLimit
    passes: Passes
    profile: Profile | None
    plan: Plan | None
    cache_dir: str | os.PathLike | None
    donate: bool
    measure: bool


@overload
def shard(fun: Callable[P, R], mesh: MeshLike | None = None, **options: Unpack[ShardOptions]) -> ShardedStep[P, R]: ...


@overload
def shard(
    fun: MeshLike | None = None, mesh: MeshLike | None = None, **options: Unpack[ShardOptions]
) -> Callable[[Callable[P, R]], ShardedStep[P, R]]: ...


def shard(
    fun: Callable | MeshLike | None = None,
    mesh: MeshLike | None = None,
    *,
    state_argnums: int | Sequence[int] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    fsdp_axes: AxisNames = "fsdp",
    data_axes: AxisNames = "data",
    microbatches: Microbatches = 1,
    memory_limit: MemoryLimit = None,
    host_memory_limit: MemoryLimit = None,
    passes: Passes = None,
    profile: Profile | None = None,
    plan: Plan | None = None,
    cache_dir: str | os.PathLike | None = None,
    donate: bool = True,
    measure: bool = False,
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

    >>> import jax, jax.numpy as jnp
    >>> def step(w, x):
    ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    ...     return w - 0.1 * grad, loss
    >>> sharded = shard(step, {"fsdp": 8}, state_argnums=0)
    >>> w = sharded.init(lambda: jnp.ones((16, 16)))
    >>> w.addressable_shards[0].data.shape
    (2, 16)
    >>> w, loss = sharded(w, jnp.ones((8, 16)))
    >>> float(loss)
    256.0

    Args:
      fun: the step, ``(state, batch, ...) -> (state, ...)``. NNX objects among its arguments are state and are updated
        in place, as ``nnx.jit`` does. One that returns results alone, ``(state, batch) -> metrics``, and makes no new
        state either, evaluates: it only reads its state, which stays where it is.
      mesh: the devices: a ``jax.sharding.Mesh``, a shape such as ``{"data": 2, "fsdp": 4}``, or None for all devices
        along one axis "fsdp"; so is a cluster that is not here, such as ``targets.h100(nodes=4)``.
      state_argnums: positions of the arguments that are state; each must be returned, with the same structure, shapes
        and dtypes. By default the NNX objects, or else the first argument that is not a random key, a number or named
        in ``batch_argnums``, and with them every argument that the state of an optax optimizer is in, and others that
        look like parameters or that are returned anew: with their old elements in the new ones. Those that are not
        returned are divided like state and only read. Positions count the parameters of the step, those that are
        passed by name too.
      batch_argnums: positions of the arguments whose leaves have examples along dimension 0, divided among all devices;
        scalars among them are replicated. By default the first argument, scalars aside, that is neither state nor
        parameters nor a random key, and those that have as many examples in every leaf, such as labels; or those with
        as many as more arguments have. All further arguments are replicated.
      fsdp_axes: mesh axes that divide the state.
      data_axes: mesh axes that divide the batch and replicate the state, where the mesh has them. Axes that are in
        neither are left to XLA and to the step's own sharding constraints.
      microbatches: into how many parts each device divides its examples, to work on one after the other and update the
        state once, with the gradients of all of them: a step takes the memory of a smaller batch and computes the same.
        "auto", or numbers to choose from such as ``range(1, 17)``: those that divide the batch are planned, "auto" 1,
        2, 4 and so on, and the fastest that fits is taken; ``explain()`` says what each takes.
      memory_limit: device memory a step may take: bytes, "72GiB", a fraction of the device's memory such as 0.9, or
        None for the device's memory less a reserve.
      host_memory_limit: likewise, of the host's memory, what a step may take for each device; by default the host's
        memory over its devices, less a reserve, and what XLA pins of it; 0 for none. GPUs only.
      passes: strategies to make the step faster, in the order they are asked; by default all. ``()`` shards and no
        more, ``"-unshard"`` leaves one out by name, as ``DEEPCOMPILE_DISABLE=unshard`` in the environment does.
      profile: measured times to plan by; by default tables for the device.
      plan: decisions to carry out as they are, such as another run's ``step.plan(...)``.
      cache_dir: a folder that keeps plans between runs, and executables if nobody else can write them.
      donate: reuse the memory of the state passed in for the one returned. Gradients look like new parameters; without
        an optax optimizer's state it is done for what ``state_argnums`` names, and for what has leaves that no gradient
        has, such as counts, or moments and averages kept by hand. ``explain()`` says what is donated, and why.
      measure: run the plans that simulate fastest before the first step, on a copy of its state, and go on with the one
        that is fastest. ``step.profile(...)`` then has what was measured.

    Returns:
      A ``ShardedStep``, or a decorator that makes one.

    Raises:
      ArgnumsError, AxisUseError, MemoryLimitError, MeshAxisError, MeshShapeError, MeshTooLargeError,
        MicrobatchCountError, NothingToMeasureOnError, OptionTypeError, PmappedStepError, UnknownPassError: see
        ``jax_deepcompile.errors``.
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if name != "fun"}
    if isinstance(fun, (Mesh, AbstractMesh, Mapping, Cluster)):
        if mesh is not None:
            raise errors.OptionTypeError("mesh", "one mesh, or the function first: shard(step, mesh)", mesh)
        fun, given["mesh"] = None, fun
    options = StepOptions(**given)
    return Sharding(options) if fun is None else cast(ShardedStep, make_step(fun, options))


@dataclass(frozen=True, repr=False)
class Sharding(Summarized):
    """What ``shard`` returns where it is not given the step yet: a decorator."""

    options: StepOptions

    def __call__(self, fun: Callable) -> ShardedStep:
        return cast(ShardedStep, make_step(fun, self.options))

    def _summary(self) -> Summary:
        given, default = self.options.arguments(), StepOptions().arguments()
        rows = tuple((name, repr(value)) for name, value in given.items() if value is not default[name])
        return Summary("shard, to decorate a step", rows)
