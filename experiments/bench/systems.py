"""What trains a workload: ``jax.jit`` as users run it, and this package with some or all of its passes."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jax_deepcompile as deepcompile
from experiments.bench.copies import copies_profile
from experiments.bench.steps import LINEN, MODELS, accumulated, constrained, training_step
from experiments.bench.workload import Workload
from experiments.host_memory import moments_passing_through, traced, with_moments_on_host

CUBLAS_GEMMS: Mapping[str, Any] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
"""Without a GPU nothing can be autotuned; these make dots cuBLAS calls, as tuning does."""

_PIPELINED = ("all_gather", "reduce_scatter", "all_reduce")
"""Collectives that XLA pipelines in loops where it is told to; jax 0.11 (2026-07) came without these options."""

NVIDIA_FLAGS: Mapping[str, Any] = {
    "xla_gpu_all_gather_combine_threshold_bytes": 1 << 30,
    "xla_gpu_all_reduce_combine_threshold_bytes": 1 << 30,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 128 << 20,
    "xla_gpu_enable_while_loop_double_buffering": True,
    **{f"xla_gpu_enable_pipelined_{kind}": True for kind in _PIPELINED if jax.__version_info__ < (0, 11)},
}
"""The options NVIDIA recommends for JAX on GPUs (JAX-Toolbox, GPU performance), as far as XLA has them."""

GIB = 1 << 30

MEMORY_LIMIT = "72GiB"
"""A GPU's, where planning has one to keep."""


@dataclass(frozen=True)
class Figures:
    """One system's step on one GPU.

    Attributes:
      step_s, compute_s, communication_s, exposed_s: simulated seconds.
      bound_s: what no schedule of the same operations beats.
      sent_gib: what a GPU sends.
      peak_gib: XLA's figure: arguments and temporaries.
      simulated_peak_gib: the simulator's own.
      compile_s: of the last compilation.
      plan_s: tracing, partitioning and planning, all compilations of theirs included.
      warm_plan_s: the same once the plan is kept from an earlier run.
      mfu: model FLOP utilisation; see ``jax_deepcompile.costs.utilisation``.
      plan: its decisions, in words.
      host_gib: of the host's memory, for each GPU.
      exposed_copy_s: seconds that compute waited for copies between device and host.
    """

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    bound_s: float
    sent_gib: float
    peak_gib: float
    simulated_peak_gib: float
    compile_s: float
    plan_s: float = 0.0
    warm_plan_s: float = 0.0
    plan: str = ""
    mfu: float = 0.0
    host_gib: float = 0.0
    exposed_copy_s: float = 0.0


@dataclass(frozen=True)
class Jit:
    """``jax.jit`` with FSDP NamedShardings.

    Attributes:
      name: in the table.
      by_hand: whether the user casts parameters to bfloat16 before the loss.
      is_constrained: whether the user holds activations to the batch's sharding.
      flags: XLA's, on top of its defaults.
      on_host: by memory kind: the optimizer's ``moments``, whose copies XLA's scheduler begins when it likes; or
        ``everything``: the activations that layers name, too, and moments are copied in when all gradients are ready.
    """

    name: str
    by_hand: bool = False
    is_constrained: bool = False
    flags: Mapping[str, Any] = field(default_factory=dict)
    on_host: Literal["nothing", "moments", "everything"] = "nothing"

    def trains(self, workload: Workload) -> bool:
        """Whether there is such a step of the workload's model."""
        return self._model(workload) in MODELS and (not self.is_constrained or workload.model in LINEN)

    def _model(self, workload: Workload) -> str:
        return workload.model + "_activations_on_host" * (self.on_host == "everything")

    def measure(self, workload: Workload, mesh: Mesh) -> Figures:
        gradients, state = MODELS[self._model(workload)](self.by_hand)
        plain = training_step(accumulated(gradients, workload.microbatches, mesh.size))
        plain = constrained(plain, mesh) if self.is_constrained else plain
        step, given = deepcompile.shard(plain, mesh, passes=()), (state, tokens_of(workload, mesh))
        placed = step.trace(*given)
        if self.on_host == "nothing":
            lowered = step.lower_gspmd(*given)
        else:
            moved = moments_passing_through(plain, after_backward=self.on_host == "everything")
            program = with_moments_on_host(placed.sharded)
            lowered = traced(moved, given, program, mesh).lower(lowering_platforms=("cuda",))
        compiled, compile_s = _timed(lambda: lowered.compile(compiler_options={**CUBLAS_GEMMS, **self.flags}))
        return figures(compiled, mesh, placed, compile_s)


@dataclass(frozen=True)
class Ours:
    """``deepcompile.shard``.

    Attributes:
      name: in the table.
      memory_limit: of a GPU.
      passes: that planning may use, or by name what it may not; None for all.
      planned_for: what of the cluster is another in what the plan is made for: its ``nic_gbps`` or ``copies_take``.
    """

    name: str
    passes: tuple[Any, ...] | str | None
    planned_for: Mapping[str, float] = field(default_factory=dict)
    memory_limit: str = MEMORY_LIMIT

    def trains(self, workload: Workload) -> bool:
        return True

    def measure(self, workload: Workload, mesh: Mesh) -> Figures:
        gradients, state = MODELS[workload.model](False)
        given = state, tokens_of(workload, mesh)
        profile = copies_profile(workload.cluster.copies_take, mesh)
        cluster = dataclasses.replace(workload.cluster, **self.planned_for)
        planned_for = cluster.make_mesh() if self.planned_for else mesh
        with tempfile.TemporaryDirectory() as plans:
            step = deepcompile.shard(
                training_step(gradients),
                planned_for,
                microbatches=workload.microbatches,
                memory_limit=self.memory_limit,
                passes=self.passes,
                profile=copies_profile(cluster.copies_take, planned_for),
                cache_dir=plans,
            )
            traced, plan_s = _timed(lambda: _planned(step, *given))
            _, warm_plan_s = _timed(lambda: _planned(step.reshard(), *given))
        if self.planned_for:
            traced = step.reshard(mesh, plan=traced.plan(), profile=profile).trace(*given)
        compiled, compile_s = _timed(traced.lower().compile)
        return figures(compiled, mesh, traced, compile_s, plan_s, warm_plan_s, str(traced.plan()), profile)


def _planned(step: Any, *shapes: Any) -> Any:
    """The traced step, once it is planned."""
    traced = step.trace(*shapes)
    traced.plan()
    return traced


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What ``call`` returns, and the seconds it took."""
    began = time.perf_counter()
    return call(), time.perf_counter() - began


System = Jit | Ours

JIT = Jit("jit")
JIT_FLAGS = Jit("jit + flags", flags=NVIDIA_FLAGS)
JIT_BY_HAND = Jit("jit + flags, bf16 by hand", by_hand=True, flags=NVIDIA_FLAGS)
JIT_CONSTRAINED = Jit("jit + flags, constrained", is_constrained=True, flags=NVIDIA_FLAGS)
JIT_EVERYTHING_AWAY = Jit("jit, everything offloaded", on_host="everything")
JIT_MOMENTS_AWAY = Jit("jit, moments by memory kind", on_host="moments")
CONSTRAINED_EVERYTHING_AWAY = dataclasses.replace(
    JIT_CONSTRAINED, name="jit + flags, constrained, everything offloaded", on_host="everything"
)
CONSTRAINED_MOMENTS_AWAY = dataclasses.replace(
    JIT_CONSTRAINED, name="jit + flags, constrained, moments by memory kind", on_host="moments"
)
FULLY_SHARDED = Ours("fully sharded", ())
PREFETCH = Ours(
    "+ prefetch", (deepcompile.PipelineLoops(), deepcompile.BucketCollectives(), deepcompile.PrefetchGathers())
)
UNSHARD = Ours("+ unshard", (deepcompile.Unshard(), deepcompile.UnshardUnrolled()))
_NOT_ON_HOST = "-offload_activations, -offload_parameters, -offload_state, -rematerialize"
ON_DEVICE = Ours("all but host memory", _NOT_ON_HOST)
ON_DEVICE_64 = Ours("all but host memory, 64 GiB", _NOT_ON_HOST, memory_limit="64GiB")
ALL = Ours("all", None)
ALL_64 = Ours("all, 64 GiB", None, memory_limit="64GiB")
ALL_60 = Ours("all, 60 GiB", None, memory_limit="60GiB")
ALL_32 = Ours("all, 32 GiB", None, memory_limit="32GiB")
ALL_24 = Ours("all, 24 GiB", None, memory_limit="24GiB")
ALL_FOR_400 = Ours("all, planned for 400 Gb/s", None, planned_for={"nic_gbps": 400.0})
ALL_FOR_KNOWN_COPIES = Ours("all, planned for copies as known", None, planned_for={"copies_take": 1.0})


def tokens_of(workload: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The global batch, of a ``batch``, ``microbatches`` and a ``sequence``: one token more than is predicted."""
    examples = mesh.size * workload.batch * workload.microbatches
    return jax.ShapeDtypeStruct((examples, workload.sequence + 1), jnp.int32)


def figures(
    compiled: Any,
    mesh: Mesh,
    traced: Any,
    compile_s: float,
    plan_s: float = 0.0,
    warm_plan_s: float = 0.0,
    plan: str = "",
    profile: deepcompile.Profile | None = None,
) -> Figures:
    """The figures of a compiled step, whose model is that of a traced one on the same mesh."""
    simulation, memory = deepcompile.simulate(compiled, mesh, profile), compiled.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    host_outputs = memory.host_output_size_in_bytes - memory.host_alias_size_in_bytes
    return Figures(
        step_s=simulation.step_s,
        compute_s=simulation.compute_s,
        communication_s=simulation.communication_s,
        exposed_s=simulation.exposed_communication_s,
        bound_s=simulation.bound_s,
        sent_gib=simulation.sent_bytes / GIB,
        peak_gib=(memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes) / GIB,
        simulated_peak_gib=simulation.peak_bytes / GIB,
        compile_s=compile_s,
        plan_s=plan_s,
        warm_plan_s=warm_plan_s,
        plan=plan,
        mfu=traced.utilisation.mfu(simulation.step_s),
        host_gib=(memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes + host_outputs) / GIB,
        exposed_copy_s=simulation.exposed_copy_s,
    )
