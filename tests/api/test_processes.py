"""A run of several processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from tests.api.steps import batch, create, step

pytestmark = pytest.mark.cpu_mesh


@pytest.mark.parametrize("processes", [2])
def test_each_process_passes_its_own_rows(processes: int):
    """Two processes of four devices train as one of eight does, on fewer rows each than there are devices too."""
    script = textwrap.dedent(
        """
        import sys
        import jax, numpy as np
        rank, count, port = map(int, sys.argv[1:])
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", count, rank)
        from tests.api.steps import batch, create, step
        import jax_deepcompile as deepcompile
        sharded = deepcompile.shard(step)
        state = sharded.init(create)
        for rows, kind in ((batch()["x"], np.asarray), (batch(8)["x"], jax.numpy.asarray)):
            mine = {"x": kind(rows[rank * len(rows) // count : (rank + 1) * len(rows) // count])}
            state, loss = sharded(state, mine)
            print("LOSS", float(loss))
        try:
            sharded(state, {"x": np.ones((6, 16), np.float32)})
        except deepcompile.errors.BatchNotDivisibleError as error:
            print("ERROR", error)
        def weighted(state, batch, weights):
            return step(state, {"x": batch["x"] * weights[:, None]})
        weights = np.linspace(1, 2, len(rows), dtype=np.float32)[rank * 4 : (rank + 1) * 4]
        try:
            deepcompile.shard(weighted)(state, mine, weights)
        except deepcompile.errors.AmbiguousRowsError as error:
            print("ERROR", error)
        given = sharded.init(create)
        print("LOSS", float(deepcompile.shard(weighted, batch_argnums=(1, 2))(given, mine, weights)[1]))
        planned = deepcompile.shard(step, memory_limit="1GiB")
        print("LOSS", float(planned(planned.init(create), mine)[1]))
        examples = {"x": jax.ShapeDtypeStruct((8, 16), "f4")}
        traced = jax.eval_shape(deepcompile.shard(step), sharded.init(create), examples)
        print("SHAPE", traced[1].shape)
        def different(state, batch):
            return step(state, {"x": batch["x"] * (2.0 + rank)})
        for options in ({}, {"memory_limit": "1GiB"}):
            try:
                deepcompile.shard(different, **options)(sharded.init(create), mine)
            except deepcompile.errors.PlanMismatchError as error:
                print("ERROR", error)
        """
    )
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script]
    pipe = subprocess.PIPE
    runs = [
        subprocess.Popen(
            [*command, str(rank), str(processes), str(port)], env=environment, stdout=pipe, stderr=pipe, text=True
        )
        for rank in range(processes)
    ]
    outputs = [run.communicate(timeout=240) for run in runs]
    losses = [[float(line.split()[1]) for line in out.splitlines() if line.startswith("LOSS")] for out, _ in outputs]
    state, first = jax.jit(step)(create(), batch())
    _, second = jax.jit(step)(state, batch(8))
    _, third = step(create(), {"x": batch(8)["x"] * np.linspace(1, 2, 8, dtype=np.float32)[:, None]})
    _, fourth = step(create(), batch(8))
    assert len(losses[0]) == 4, outputs
    expected = [float(first), float(second), float(third), float(fourth)]
    np.testing.assert_allclose(losses, [expected] * processes, rtol=1e-6)
    assert all("SHAPE ()" in out for out, _ in outputs), outputs[0][1][-3000:]
    assert all(
        out.count("processes of this run do not agree on what different is (process 0: ") == 2 for out, _ in outputs
    )
    assert all("shard(..., batch_argnums=(1, 2)) if weights is one" in out for out, _ in outputs)
    assert all("6 must be a multiple of 4, the number of this process's devices" in out for out, _ in outputs)
