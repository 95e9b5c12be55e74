"""Whole train steps on one device: measured, simulated, their memory, and their kernels.

Each workload is run in a process of its own: the allocator keeps one high-water mark a process.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

import jax_deepcompile as deepcompile
from experiments.gpu_suite.cases import Row, error_text
from experiments.gpu_suite.kernels import profiled
from experiments.gpu_suite.meshes import one_device_mesh
from experiments.gpu_suite.processes import rows_of
from experiments.gpu_suite.sizes import Sizes, StepSizes
from experiments.gpu_suite.workloads import WORKLOADS
from experiments.trainings import Training
from jax_deepcompile.lowering.compile import peak_bytes


def cases(sizes: Sizes) -> list[Row]:
    return [{"workload": name} for name in sizes.steps.workloads]


def rows(case: Row, sizes: Sizes, seconds: float) -> Iterator[Row]:
    return rows_of(both, [(case, sizes.steps)], seconds)


def both(case: Row, sizes: StepSizes) -> Iterator[Row]:
    """``system``, ``step_s simulated_s simulated_over_measured``, bytes, compile seconds; and what ``profiled`` says.

    The sharded step comes first, so that the allocator's high-water mark is its own; the figure of ``jit`` has none.
    """
    work = WORKLOADS[case["workload"]]()
    for system, run in (("shard", _sharded), ("jit", _jitted)):
        try:
            for row in run(work, sizes):
                yield case | {"system": system} | row
        except Exception as error:
            yield case | {"system": system, "error": error_text(error)}


def _sharded(work: Training, sizes: StepSizes) -> Iterator[Row]:
    """On one device there is nothing to plan, and planning would only compile the step once more."""
    mesh = one_device_mesh()
    step = deepcompile.shard(work.step, mesh, passes=())
    state, batch = step.init(work.create), jax.device_put(work.batch, mesh.devices.flat[0])
    begun = time.perf_counter()
    compiled = step.lower(state, batch).compile()  # the arrays themselves, or the call would compile it again
    compile_s = time.perf_counter() - begun
    figures = _run(step, state, batch, sizes)
    stats = mesh.devices.flat[0].memory_stats() or {}
    peak = {"allocator_peak_bytes": stats.get("peak_bytes_in_use"), "compile_s": compile_s}
    yield figures | judged(compiled, mesh, figures["step_s"]) | peak
    yield from profiled(step, (step.init(work.create), batch), sizes.runs, sizes.heaviest)


def _jitted(work: Training, sizes: StepSizes) -> Iterator[Row]:
    mesh = one_device_mesh()
    step = jax.jit(work.step, donate_argnums=0)
    batch = jax.device_put(work.batch, mesh.devices.flat[0])
    begun = time.perf_counter()
    compiled = step.lower(jax.eval_shape(work.create), batch).compile()
    compile_s = time.perf_counter() - begun
    figures = _run(step, jax.jit(work.create)(), batch, sizes)
    yield figures | judged(compiled, mesh, figures["step_s"]) | {"compile_s": compile_s}


def _run(step: Callable, state: Any, batch: Any, sizes: StepSizes) -> Row:
    """Median seconds of a step among several in a row, and the loss of the first, which does not count."""
    state, loss = jax.block_until_ready(step(state, batch))
    state, loop_s = _sample(step, state, batch, 2)
    steps = max(1, math.ceil(sizes.sample_s / loop_s))
    seconds = []
    for _ in range(sizes.samples):
        state, step_s = _sample(step, state, batch, steps)
        seconds.append(step_s)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    return {"step_s": statistics.median(seconds), "steps": steps * sizes.samples, "first_loss": float(loss)}


def _sample(step: Callable, state: Any, batch: Any, steps: int) -> tuple[Any, float]:
    begun = time.perf_counter()
    for _ in range(steps):
        state, loss = step(state, batch)
    jax.block_until_ready((state, loss))
    return state, (time.perf_counter() - begun) / steps


def judged(compiled: Any, mesh: Mesh, step_s: float) -> Row:
    """The simulation's figures and XLA's own for memory."""
    simulated = deepcompile.simulate(compiled, mesh)
    return {
        "simulated_s": simulated.step_s,
        "simulated_over_measured": simulated.step_s / step_s,
        "simulated_bytes": simulated.peak_bytes,
        "xla_bytes": peak_bytes(compiled.memory_analysis()),
    }
