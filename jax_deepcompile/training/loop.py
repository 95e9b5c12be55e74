"""Steps, one after another, each timed to its end; knows no file and no screen."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from jax_deepcompile.training.config import ConfigError
from jax_deepcompile.training.metrics import Record, memory_in_use


def seconds_of(call: Callable, *args: Any) -> float:
    """What ``call(*args)`` takes, such as planning and compiling before the first step.

    Apart from the steps, so that ``step_s`` and ``tokens_per_s`` are of training alone, and that who stops the run now
    does not wait for the compiler: there is nothing to save yet.
    """
    started = time.perf_counter()
    call(*args)
    return time.perf_counter() - started


def training_steps(
    step: Any, state: Any, batches: Iterator[Any], steps: range, tokens_per_step: int
) -> Iterator[tuple[Any, Record]]:
    """Runs the steps and yields the state and the record of each.

    A step's time begins with asking for its batch, and ends when its metrics are on the host.

    Args:
        step: the sharded step, ``(state, batch) -> (state, metrics)``.
        state: what to start from; the step may free it.
        batches: this process's rows of each global batch.
        steps: their numbers, the first step ever being 1.
        tokens_per_step: of the global batch.

    Raises:
        ConfigError: the loss is no longer a number.
    """
    for number in steps:
        started = time.perf_counter()
        batch = next(batches)
        state, metrics = step(state, batch)
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        seconds = time.perf_counter() - started
        yield (
            state,
            {
                "step": number,
                **metrics,
                "tokens_per_s": tokens_per_step / seconds,
                "step_s": seconds,
                "memory_bytes": memory_in_use()[0],
            },
        )
        if not math.isfinite(metrics["loss"]):
            raise ConfigError(
                f"the loss is {metrics['loss']} at step {number}: lower optimizer.learning_rate or optimizer.clip_norm"
            )


def mean_loss(step: Any, state: Any, batches: Iterable[Any]) -> float:
    """The mean ``loss`` over batches of one size, of which ``step`` returns the metrics."""
    return statistics.fmean(float(step(state, batch)["loss"]) for batch in batches)
