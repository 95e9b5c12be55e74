"""What is timed is what runs: nothing is folded away, and calls are counted right."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.gpu_suite import timing
from experiments.gpu_suite.sizes import Effort

pytestmark = pytest.mark.cpu_mesh


@pytest.mark.parametrize("times", [1, 4])
def test_every_operation_in_a_row_is_compiled_and_returned(times: int):
    arguments = [(jnp.ones((96, 64)), jnp.ones((64, 32)))] * times
    run = jax.jit(timing.in_a_row(lambda a, b: a @ b))
    cost: Any = run.lower(*arguments).compile().cost_analysis()
    assert cost["flops"] == pytest.approx(times * 2 * 96 * 64 * 32, rel=0.01)
    assert [result.shape for result in run(*arguments)] == [(96, 32)] * times


def test_seconds_are_of_one_call():
    effort = Effort(sample_s=0.02, samples=3)
    calls: list[int] = []
    pause = threading.Event()

    def run(x):
        calls.append(1)
        pause.wait(0.005)
        return x

    assert timing.seconds_a_call(run, (jnp.zeros(2),), effort) == pytest.approx(0.005, rel=1.0)
    assert 1 + 3 + 3 <= len(calls) <= 1 + 3 + 3 * 4


def test_short_operations_are_repeated_within_a_call(monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(timing, "seconds_a_call", lambda run, args, effort: seen.append(len(args)) or 1.0)
    effort = Effort(call_s=1e-3, most_repeats=8)
    seconds = [
        timing.seconds_an_operation(jnp.negative, (jnp.zeros(2),), each_s, effort) for each_s in (1e-6, 3e-4, 1.0)
    ]
    assert seen == [8, 4, 1]
    assert seconds == [1 / 8, 1 / 4, 1.0]
