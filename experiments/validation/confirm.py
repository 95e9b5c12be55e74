"""``deepcompile bench confirm``: simulated beside measured, on the devices that are here."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_deepcompile as deepcompile
from experiments.bench.steps import constrained, create_state, linen_gradients, training_step
from experiments.bench.systems import NVIDIA_FLAGS, tokens_of
from experiments.validation.programs import MODELS
from experiments.validation.runs import RUNS, PublishedRun
from jax_deepcompile.runtime.files import write_whole
from jax_deepcompile.runtime.quiet import start_backends
from models import llama

TITLE = "Simulated beside measured steps, on the devices that are here"

_STEPS = 10
"""Measured of each step, after two that are not."""


@dataclass(frozen=True)
class Confirmed:
    """One step on the attached devices.

    Attributes:
      run: number of the published run; 0 for the small model that other devices than eight GPUs train.
      system: ``jit``, or ``planned`` by this package.
      simulated_s: seconds a step.
      measured_s: the median of the steps, each waited for.
      published_s: what its source measured, for ``jit``; None where there is none.
    """

    run: int
    system: str
    simulated_s: float
    measured_s: float
    published_s: float | None

    @property
    def line(self) -> str:
        published = "" if self.published_s is None else f", published {self.published_s:.4g} s"
        return (
            f"run {self.run}, {self.system}: simulated {self.simulated_s:.4g} s, measured {self.measured_s:.4g} s "
            f"({self.simulated_s / self.measured_s - 1:+.1%}){published}"
        )


def confirm(out: Path | None) -> int:
    """Runs what fits on the devices that are here; results are printed, and written to ``out`` to be sent back."""
    start_backends()
    devices, done = jax.devices(), []
    mesh = Mesh(np.array(devices).reshape(1, -1), ("data", "fsdp"))
    for found in _confirmed(mesh):
        done.append(found)
        print(found.line, flush=True)
        if out is not None:
            machine = {"device": devices[0].device_kind, "count": len(devices), "jax": jax.__version__}
            steps = [dataclasses.asdict(each) for each in done]
            write_whole(out, json.dumps({**machine, "date": time.strftime("%Y-%m-%d"), "steps": steps}, indent=1))
    if devices[0].platform == "cpu":
        print("these are CPU devices, whose costs are assumed: their figures only show that this runs", file=sys.stderr)
    return 0


def _confirmed(mesh: Mesh) -> Iterator[Confirmed]:
    gpus = mesh.devices.flat[0].platform == "gpu"
    for run in RUNS if gpus else ():
        if run.how == "jit" and run.cluster.nodes == 1 and run.cluster.gpus == mesh.size:
            yield from _both(run.number, MODELS[run.model](), tokens_of(run, mesh), mesh, run)
    if not (gpus and mesh.size == 8):
        small = llama.Llama(llama.LLAMA_TINY)
        yield from _both(0, small, jax.ShapeDtypeStruct((2 * mesh.size, 129), jnp.int32), mesh, None)


def _both(number: int, model: Any, shape: Any, mesh: Mesh, run: PublishedRun | None) -> Iterator[Confirmed]:
    step = training_step(linen_gradients())
    tokens = jax.random.randint(jax.random.key(1), shape.shape, 0, model.config.vocab_size, jnp.int32)
    create = partial(create_state, model)

    plain = deepcompile.shard(constrained(step, mesh), mesh, passes=())
    state = plain.init(create, jax.random.key(0))
    options = dict(NVIDIA_FLAGS) if run is not None else {}
    by_jit = plain.lower_gspmd(state, tokens).compile(compiler_options=options or None)
    given = jax.device_put((state, tokens, {}), by_jit.input_shardings[0])
    simulated_s = deepcompile.simulate(by_jit, mesh).step_s
    del state
    measured_s = _median_s(lambda state, tokens: by_jit(state, tokens, {}), *given[:2])
    del given
    yield Confirmed(number, "jit", simulated_s, measured_s, None if run is None else run.measured_s)

    planned = deepcompile.shard(step, mesh)
    state = planned.init(create, jax.random.key(0))
    simulated_s = deepcompile.simulate(planned.lower(state, tokens).compile(), mesh).step_s
    yield Confirmed(number, "planned", simulated_s, _median_s(planned, state, tokens), None)


def _median_s(step: Callable, state: Any, tokens: jax.Array) -> float:
    """Seconds of a step that takes its state's memory for the next one."""
    seconds = []
    for _ in range(2 + _STEPS):
        began = time.perf_counter()
        state, loss = step(state, tokens)
        jax.block_until_ready((state, loss))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])
