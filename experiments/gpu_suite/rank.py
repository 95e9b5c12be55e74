"""One of two processes that train together: ``jax.jit``, fully sharded and planned, in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_deepcompile as deepcompile
from experiments.gpu_suite.cases import Row, error_text
from experiments.gpu_suite.sizes import PairSizes
from experiments.trainings import Training, llama_training


@dataclass
class System:
    """A way to run the step, and the state it has come to."""

    name: str
    step: Callable
    state: Any
    batch: jax.Array

    def run(self, steps: int) -> list[float]:
        """The losses of that many steps."""
        losses = []
        for _ in range(steps):
            self.state, loss = self.step(self.state, self.batch)
            losses.append(loss)
        return [float(loss) for loss in losses]


def rows(index: int, port: int, sizes: PairSizes) -> Iterator[Row]:
    """Trains as process ``index`` of two; the rows are process 0's.

    ``what="losses"``: of a system, its first ``losses`` and how long it took to compile, or its ``error``;
    ``what="agreement"``, of the systems up to then: the largest ``relative_difference`` between the losses of two, and
    ``step_s`` of each, measured in turn.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, index, initialization_timeout=60)
    return (row for row in _rows(sizes) if index == 0)


def _rows(sizes: PairSizes) -> Iterator[Row]:
    work = llama_training(sizes.model, sizes.sequence, sizes.batch)
    state = deepcompile.shard(work.step, passes=()).init(work.create)
    systems: list[System] = []
    losses: list[list[float]] = []
    for name, make in _SYSTEMS.items():
        begun = time.perf_counter()
        try:
            system = make(work, state)
            found = system.run(sizes.loss_steps)
        except Exception as error:
            yield {"what": "losses", "system": name, "error": error_text(error)}
            continue
        seconds = time.perf_counter() - begun
        yield {"what": "losses", "system": name, "losses": found, "compile_and_first_steps_s": seconds}
        systems.append(system)
        losses.append(found)
        if len(systems) > 1:
            difference, step_s = largest_difference(losses), _step_seconds(systems, sizes)
            yield {"what": "agreement", "relative_difference": difference, "step_s": step_s}


def largest_difference(losses: list[list[float]]) -> float:
    """Between two systems at one step, relative to the loss."""
    return max(
        ((max(values) - min(values)) / max(map(abs, values)) for values in zip(*losses, strict=True)),
        default=math.nan,
    )


def _step_seconds(systems: list[System], sizes: PairSizes) -> dict[str, float]:
    """Medians of samples taken in turn; the number of steps is fixed, for both processes must take as many."""
    seconds: dict[str, list[float]] = {system.name: [] for system in systems}
    for _ in range(sizes.samples):
        for system in systems:
            begun = time.perf_counter()
            system.run(sizes.steps)
            seconds[system.name].append((time.perf_counter() - begun) / sizes.steps)
    return {name: statistics.median(samples) for name, samples in seconds.items()}


def _plain(work: Training, state: Any) -> System:
    """``jax.jit`` of the undecorated step with the same shardings, which XLA's own partitioner works out."""
    batch = _placed(work)
    compiled = deepcompile.shard(work.step, passes=()).lower_gspmd(state, batch).compile()
    return System("jit", lambda state, batch: compiled(state, batch, {}), _copied(state), batch)


def _sharded(work: Training, state: Any) -> System:
    return System("shard", deepcompile.shard(work.step, passes=()), _copied(state), _placed(work))


def _planned(work: Training, state: Any) -> System:
    return System("planned", deepcompile.shard(work.step), _copied(state), _placed(work))


def _measured(work: Training, state: Any) -> System:
    """Of the plans that simulate fastest the one that both processes ran fastest."""
    return System("measured", deepcompile.shard(work.step, measure=True), _copied(state), _placed(work))


_SYSTEMS = {"jit": _plain, "shard": _sharded, "planned": _planned, "measured": _measured}


def _copied(state: Any) -> Any:
    """The same values in memory of their own, for every system donates its state."""
    return jax.jit(lambda state: jax.tree.map(jnp.copy, state))(state)


def _placed(work: Training) -> jax.Array:
    """Every process holds the same batch and puts its own rows of it on its devices."""
    mesh, batch = deepcompile.shard(work.step).mesh, np.asarray(work.batch)
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    return jax.make_array_from_callback(batch.shape, rows, lambda part: batch[part])
