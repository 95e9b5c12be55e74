"""A Llama that Adam cannot train within the GPU, trained three ways: what each keeps on the host.

A larger one, of which not even the state fits, has the plan alone; the other two would need more than the GPU has.

Each way has a process of its own: the allocator keeps one high-water mark a process.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jax_deepcompile as deepcompile
from experiments import host_memory
from experiments.gpu_suite import host_copies
from experiments.gpu_suite.cases import Row, error_text
from experiments.gpu_suite.meshes import one_device_mesh
from experiments.gpu_suite.processes import rows_of
from experiments.gpu_suite.simulated_vs_measured import judged
from experiments.gpu_suite.sizes import OffloadSizes, Sizes
from experiments.trainings import Training, llama_training
from jax_deepcompile.costs.devices import PINNED_GB
from jax_deepcompile.lowering.compile import host_bytes
from models.llama import Llama, LlamaConfig

EVERYTHING, MOMENTS, PLAN = "jit, everything offloaded", "jit, moments by memory kind", "plan"

STATE_BYTES = 12
"""Of a float32 parameter and two moments."""

MODEL_STATES_BYTES = 16
"""Of those and the gradient, as ZeRO counts what training keeps of a model: https://arxiv.org/abs/1910.02054."""

PLANNED_FRACTION = 0.93
"""Of the allocator's memory: it has temporaries in one piece, and what creates the state leaves gaps."""


def cases(sizes: Sizes) -> list[Row]:
    """The copies come last: they take this process's part of the GPU."""
    systems = [
        {"system": PLAN, "parameter_bytes": MODEL_STATES_BYTES},
        {"system": MOMENTS, "parameter_bytes": MODEL_STATES_BYTES},
        {"system": EVERYTHING, "parameter_bytes": MODEL_STATES_BYTES},
        {"system": PLAN, "parameter_bytes": STATE_BYTES},
    ]
    return [*systems, {"size_bytes": sizes.offload.copy_bytes, "how": host_copies.BOTH_WAYS}]


def rows(case: Row, sizes: Sizes, seconds: float) -> Iterator[Row]:
    if "how" in case:
        return host_copies.rows(case, sizes, seconds)
    return rows_of(trained, [(case, sizes.offload)], seconds, [environment(sizes.offload)])


def environment(sizes: OffloadSizes) -> dict[str, str]:
    """What lets a process have almost all of the GPU's memory, and most of the host's."""
    host_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4 // 10**9
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(sizes.memory_fraction), PINNED_GB: str(host_gb)}


def trained(case: Row, sizes: OffloadSizes) -> Iterator[Row]:
    """A row with ``params layers step_s tokens_per_s losses``, what ``judged`` says, bytes and compile seconds.

    ``losses`` are of the first step, which does not count in ``step_s``, and of the last.
    """
    try:
        yield case | _trained(**case, sizes=sizes)
    except Exception as error:
        yield case | {"error": error_text(error)}


def _trained(system: str, parameter_bytes: int, sizes: OffloadSizes) -> Row:
    mesh = one_device_mesh()
    device = mesh.devices.flat[0]
    limit_bytes = (device.memory_stats() or {}).get("bytes_limit")
    config = sized(sizes, limit_bytes, parameter_bytes)
    if system == EVERYTHING:
        config = dataclasses.replace(config, remat_policy=host_memory.ACTIVATIONS_ON_HOST)
    work = llama_training(config, sizes.sequence, sizes.examples)
    batch = jax.device_put(work.batch, device)
    begun = time.perf_counter()
    if system == PLAN:
        planned_bytes = None if limit_bytes is None else int(limit_bytes * PLANNED_FRACTION)
        run = deepcompile.shard(work.step, mesh, memory_limit=planned_bytes)
        run.plan(jax.eval_shape(work.create), batch)
        state = run.init(work.create)  # born where the plan has it
        compiled = run.lower(state, batch).compile()  # the arrays themselves, or the call would compile it again
    else:
        compiled, state = by_memory_kind(work, batch, mesh, after_backward=system == EVERYTHING)
        run = compiled
    compile_s = time.perf_counter() - begun
    figures = _steps(run, state, batch, sizes)
    return {
        "params": parameters(config),
        "layers": config.n_layers,
        **figures,
        **judged(compiled, mesh, figures["step_s"]),
        "xla_host_bytes": host_bytes(compiled.memory_analysis()),
        "allocator_peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "compile_s": compile_s,
    }


def by_memory_kind(work: Training, batch: Any, mesh: Mesh, after_backward: bool) -> tuple[jax.stages.Compiled, Any]:
    """The step under ``jax.jit`` with the optimizer's moments on the host, and a state that was born so."""
    shapes = jax.eval_shape(work.create)
    sharded = deepcompile.shard(work.step, mesh, passes=()).trace(shapes, batch).sharded
    step = host_memory.moments_passing_through(work.step, after_backward)
    traced = host_memory.traced(step, (shapes, batch), host_memory.with_moments_on_host(sharded), mesh)
    compiled = traced.lower().compile()
    (placed, _), _ = compiled.input_shardings
    return compiled, jax.jit(work.create, out_shardings=placed)()


def _steps(run: Callable, state: Any, batch: Any, sizes: OffloadSizes) -> Row:
    state, first = jax.block_until_ready(run(state, batch))
    losses = [first]
    begun = time.perf_counter()
    for _ in range(sizes.steps):
        state, loss = run(state, batch)
        losses.append(loss)
    jax.block_until_ready((state, losses))
    step_s = (time.perf_counter() - begun) / sizes.steps
    tokens_per_s = sizes.examples * sizes.sequence / step_s
    return {"step_s": step_s, "tokens_per_s": tokens_per_s, "losses": [float(losses[0]), float(losses[-1])]}


def sized(sizes: OffloadSizes, memory_bytes: int | None, parameter_bytes: int) -> LlamaConfig:
    """The model with the fewest layers, within its bounds, for which the memory is too small.

    Args:
      memory_bytes: of the device; None where it is not known, as if it were none.
      parameter_bytes: that it would keep of each parameter.
    """

    def fits(config: LlamaConfig) -> bool:
        return memory_bytes is not None and parameter_bytes * parameters(config) <= memory_bytes

    low, high = sizes.layers
    deep = (dataclasses.replace(sizes.model, n_layers=layers) for layers in range(low, high))
    return next((config for config in deep if not fits(config)), dataclasses.replace(sizes.model, n_layers=high))


def parameters(config: LlamaConfig) -> int:
    model = Llama(dataclasses.replace(config, attention="xla"))  # whose parameters are the same, with and without a GPU
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))
