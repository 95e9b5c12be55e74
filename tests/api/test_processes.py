"""Runs of two processes: they train as one does, and what goes wrong in one is an error in both, soon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading

import jax
import numpy as np
import pytest

from tests.api.steps import batch, create, step

pytestmark = pytest.mark.cpu_mesh


_LIMIT_S = 240

START = """
import sys, time
import jax, numpy as np
rank, port = map(int, sys.argv[1:])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from tests.api.steps import batch, create, step
import jax_deepcompile as deepcompile
def rows_of(size, kind=np.asarray):
    rows = batch(size)["x"]
    return {"x": kind(rows[rank * size // 2 : (rank + 1) * size // 2])}
"""


def run_two(script: str) -> list[subprocess.CompletedProcess[str]]:
    """``script`` in two processes of four devices each, which find ``rank`` and all else that START has."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")}
    command, pipe = [sys.executable, "-c", START + textwrap.dedent(script)], subprocess.PIPE
    runs = [
        subprocess.Popen([*command, str(rank), str(port)], env=environment, stdout=pipe, stderr=pipe, text=True)
        for rank in range(2)
    ]
    limit = threading.Timer(_LIMIT_S, lambda: [run.kill() for run in runs])
    limit.start()
    outputs = [run.communicate() for run in runs]
    limit.cancel()
    return [
        subprocess.CompletedProcess(run.args, run.returncode, *both) for run, both in zip(runs, outputs, strict=True)
    ]


def lines(run: subprocess.CompletedProcess[str], word: str) -> list[str]:
    return [line.removeprefix(f"{word} ") for line in run.stdout.splitlines() if line.startswith(f"{word} ")]


def test_each_process_passes_its_own_rows():
    """Two processes of four devices train as one of eight does, on fewer rows each than there are devices too."""
    runs = run_two(
        """
        sharded = deepcompile.shard(step)
        state = sharded.init(create)
        for mine in (rows_of(16), rows_of(8, jax.numpy.asarray)):
            state, loss = sharded(state, mine)
            print("LOSS", float(loss))
        try:
            sharded(state, {"x": np.ones((6, 16), np.float32)})
        except deepcompile.errors.BatchNotDivisibleError as error:
            print("ERROR", error)
        def weighted(state, batch, weights):
            return step(state, {"x": batch["x"] * weights[:, None]})
        weights = np.linspace(1, 2, 8, dtype=np.float32)[rank * 4 : (rank + 1) * 4]
        try:
            deepcompile.shard(weighted)(state, mine, weights)
        except deepcompile.errors.AmbiguousRowsError as error:
            print("ERROR", error)
        given = sharded.init(create)
        print("LOSS", float(deepcompile.shard(weighted, batch_argnums=(1, 2))(given, mine, weights)[1]))
        planned = deepcompile.shard(step, memory_limit="1GiB")
        print("LOSS", float(planned(planned.init(create), mine)[1]))
        def noisy(state, batch):
            noise = jax.vmap(lambda key: jax.random.normal(key, (16,)))(batch["key"])
            return step(state, {"x": batch["x"] + noise})
        keys = jax.random.split(jax.random.key(0), 8)[rank * 4 : (rank + 1) * 4]
        print("LOSS", float(deepcompile.shard(noisy)(sharded.init(create), {**mine, "key": keys})[1]))
        def scaled(state, batch, scale, table):
            return step(state, {"x": batch["x"] * scale + table})
        for scale, table in ((1.0, 1.0), (1.0 + rank, 1.0), (1.0, rank)):
            try:
                deepcompile.shard(scaled)(sharded.init(create), mine, scale, np.full(16, table, np.float32))
            except deepcompile.errors.ProcessMismatchError as error:
                print("VALUES", error)
        def evaluate(state, batch):
            return ((batch["x"] @ state["w"]) ** 2).mean(-1)
        trained = sharded.init(create)
        print("EVALUATED", *np.asarray(deepcompile.shard(evaluate)(trained, mine)), sharded(trained, mine)[1])
        examples = {"x": jax.ShapeDtypeStruct((8, 16), "f4")}
        traced = jax.eval_shape(deepcompile.shard(step), sharded.init(create), examples)
        print("SHAPE", traced[1].shape)
        def different(state, batch):
            return step(state, {"x": batch["x"] * (2.0 + rank)})
        for options in ({}, {"memory_limit": "1GiB"}):
            try:
                deepcompile.shard(different, **options)(sharded.init(create), mine)
            except deepcompile.errors.ProcessMismatchError as error:
                print("ERROR", error)
        """
    )
    evaluated = [[float(value) for line in lines(run, "EVALUATED") for value in line.split()] for run in runs]
    expected = ((batch(8)["x"] @ create()["w"]) ** 2).mean(-1)
    for each in evaluated:
        np.testing.assert_allclose(each, [*expected, expected.mean()], 1e-5)
    losses = [[float(loss) for loss in lines(run, "LOSS")] for run in runs]
    state, first = jax.jit(step)(create(), batch())
    _, second = jax.jit(step)(state, batch(8))
    _, third = step(create(), {"x": batch(8)["x"] * np.linspace(1, 2, 8, dtype=np.float32)[:, None]})
    _, fourth = step(create(), batch(8))
    noise = jax.vmap(lambda key: jax.random.normal(key, (16,)))(jax.random.split(jax.random.key(0), 8))
    _, fifth = step(create(), {"x": batch(8)["x"] + noise})
    expected = [float(first), float(second), float(third), float(fourth), float(fifth)]
    assert len(losses[0]) == len(expected), runs
    np.testing.assert_allclose(losses, [expected] * 2, rtol=1e-6)
    for run in runs:
        assert "SHAPE ()" in run.stdout, run.stderr[-3000:]
        numbers, arrays = lines(run, "VALUES")
        assert "process 1 would call scaled with scale = 2.0, table = float32 of digest " in numbers
        assert "process 0 would call scaled with scale = 1.0, table = float32 of digest " in arrays
        uneven, ambiguous, *different = lines(run, "ERROR")
        assert "6 must be a multiple of 4, the number of this process's devices" in uneven
        assert "shard(..., batch_argnums=(1, 2)) if weights is one" in ambiguous
        assert len(different) == 2
        assert "process 0 would compile different on batch['x'] float32[8,16] (program " in different[0]
        assert "process 0 would plan different (fingerprint " in different[1]


def test_what_goes_wrong_in_one_process_is_an_error_in_both_within_seconds():
    """Each time the other would wait forever, or for as long as JAX's collectives do; a slow one is waited for."""
    runs = run_two(
        """
        def tell(run):
            start = time.monotonic()
            try:
                run()
                print("RESULT went through")
            except deepcompile.errors.DeepCompileError as error:
                print(f"RESULT {type(error).__name__}: {error}")
            print("SECONDS", time.monotonic() - start)
        def train(steps, last):
            state = sharded.init(create)
            for _ in range(steps):
                state, loss = sharded(state, rows_of(16))
            print("LOSS", float(loss))
            return sharded(state, last)
        sharded = deepcompile.shard(step)
        short, shorter = {"x": batch(8)["x"][:3]}, rows_of(8)
        tell(lambda: train(3, short if rank == 1 else rows_of(16)))
        tell(lambda: train(1, shorter if rank == 0 else rows_of(16)))
        def stateless(state, batch):
            return (state if rank == 0 else {}), batch["x"].sum()
        tell(lambda: deepcompile.shard(stateless)(sharded.init(create), rows_of(16)))
        tell(lambda: deepcompile.shard(stateless, memory_limit="1GiB")(sharded.init(create), rows_of(16)))
        def broken():
            return {"w": 1 / rank}
        def divides():
            try:
                sharded.init(broken)
            except ZeroDivisionError as error:
                raise deepcompile.errors.DeepCompileError("division by zero") from error
        tell(divides)
        def other(state, batch):
            return step(state, batch)
        tell(lambda: deepcompile.shard(step if rank else other)(sharded.init(create), rows_of(16)))
        tell(lambda: (sharded.profile if rank else sharded)(sharded.init(create), rows_of(16)))
        if rank:
            time.sleep(3)
        tell(lambda: train(2, shorter))
        state = sharded.init(create)
        for number in range(5):
            if number == 4 and rank == 1:
                raise OSError("no more data")
            state, loss = sharded(state, rows_of(16))
        """
    )
    first, second = (lines(run, "RESULT") for run in runs)
    assert len(first) == len(second) == 8, runs
    stopped = "ProcessStoppedError: process 1 of this run does not go on, so this one stops too: its collectives would"
    uneven = "BatchNotDivisibleError: batch leaf batch['x'] has shape (3, 16): its leading dimension 3 must be a"
    assert second[0].startswith(uneven)
    assert first[0].startswith(stopped)
    assert f"Its reason: {uneven}" in first[0]
    assert first[1] == second[1]
    assert first[1].startswith("ProcessMismatchError: the processes of this run are about to do different things: ")
    assert "process 0 would compile step on batch['x'] float32[8,16] (program " in first[1]
    assert "process 1 would run step on batch['x'] float32[16,16] (program " in first[1]
    for call in (2, 3):
        assert second[call].startswith("StateNotReturnedError: stateless does not return its state")
        assert first[call].startswith(stopped)
        assert f"Its reason: {second[call]}" in first[call]
    assert first[4] == "DeepCompileError: division by zero"
    assert "process 0 of this run does not go on" in second[4]
    assert "Its reason: ZeroDivisionError: division by zero" in second[4]
    assert first[5] == second[5]
    assert "process 0 would compile other on " in first[5]
    assert "process 1 would compile step on " in first[5]
    assert first[6] == second[6]
    assert "process 1 would profile step" in first[6]
    assert first[7] == second[7] == "went through"
    assert max(float(seconds) for run in runs for seconds in lines(run, "SECONDS")) < 25, runs
    losses = [[float(loss) for loss in lines(run, "LOSS")] for run in runs]
    assert losses[0] == losses[1]
    ended = runs[0].stderr.splitlines()[-1]
    assert "Its reason: its program has ended with OSError: no more data" in ended
    assert [run.returncode for run in runs] == [1, 1]
