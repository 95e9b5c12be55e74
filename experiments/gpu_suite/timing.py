"""Seconds of what a device does, measured from the host without counting what the host does."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.gpu_suite.sizes import Effort


def seconds_a_call(run: Callable, args: tuple, effort: Effort) -> float:
    """The median over samples of many calls in a row; the device works on one while the host makes the next.

    The first call, which compiles, and a sample by which the number of calls is chosen do not count.
    """
    jax.block_until_ready(run(*args))
    calls = _calls(_sample_s(run, args, 3) / 3, effort.sample_s)
    return statistics.median(_sample_s(run, args, calls) for _ in range(effort.samples)) / calls


def seconds_an_operation(
    function: Callable,
    args: tuple,
    expected_s: float,
    effort: Effort,
    compiler_options: Mapping[str, Any] | None = None,
) -> float:
    """Seconds of ``function(*args)`` on the device; a short one is repeated in one program.

    Args:
      function: of arrays.
      args: those.
      expected_s: about what it takes.
      effort: how long to measure.
      compiler_options: XLA's.
    """
    repeats = min(effort.most_repeats, _calls(expected_s, effort.call_s))
    copies = [args, *(tuple(map(jnp.copy, args)) for _ in range(repeats - 1))]
    options = None if compiler_options is None else {**compiler_options}
    return seconds_a_call(jax.jit(in_a_row(function), compiler_options=options), tuple(copies), effort) / repeats


def in_a_row(function: Callable) -> Callable[..., list]:
    """``function`` of one tuple of arguments after another, in one program.

    All results are returned, or XLA would drop all but the last. The arguments are arrays of their own, or it would
    compute one result and return it again; and they wait for the result before, or it would make one kernel of several.
    """

    def run(*arguments: tuple) -> list:
        results = []
        for args in arguments:
            if results:
                args, results[-1] = lax.optimization_barrier((args, results[-1]))
            results.append(function(*args))
        return results

    return run


def _calls(seconds_each: float, wanted_s: float) -> int:
    return max(1, math.ceil(wanted_s / seconds_each))


def _sample_s(run: Callable, args: tuple, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        out = run(*args)
    jax.block_until_ready(out)
    return time.perf_counter() - start
