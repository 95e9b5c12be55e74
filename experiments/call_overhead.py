"""What a call of a sharded step costs beside ``jax.jit``'s on the same arrays: ``python -m experiments.call_overhead``.

Both run the same trivial step on the same sharded pytree, side by side, alternating; the medians of the time until the
call returns (not until the devices are done) are printed as JSON, in microseconds, with their difference.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_deepcompile as deepcompile

CALLS = 300


def step(state: dict[str, jax.Array], batch: jax.Array):
    return jax.tree.map(lambda leaf: leaf + 1, state), batch.sum()


def seconds_a_call(run: Callable, state: Any, batch: jax.Array) -> tuple[float, Any]:
    begin = time.perf_counter()
    state, metric = run(state, batch)
    elapsed = time.perf_counter() - begin
    jax.block_until_ready((state, metric))
    return elapsed, state


def measure(leaves: int) -> dict[str, float]:
    """Medians for a state of ``leaves`` arrays."""
    sharded = deepcompile.shard(step)
    mesh = sharded.mesh
    state = sharded.init(lambda: {f"leaf{index}": jnp.zeros(64) for index in range(leaves)})
    batch = jax.device_put(np.zeros((mesh.size, 4), np.float32), NamedSharding(mesh, PartitionSpec("fsdp")))
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    whole = NamedSharding(mesh, PartitionSpec())
    plain = jax.jit(step, in_shardings=(places, batch.sharding), out_shardings=(places, whole), donate_argnums=0)
    states = {"shard": state, "jit": jax.tree.map(jnp.copy, state)}
    runs = {"shard": sharded, "jit": plain}
    times: dict[str, list[float]] = {"shard": [], "jit": []}
    for index in range(CALLS):
        for name, run in runs.items():
            elapsed, states[name] = seconds_a_call(run, states[name], batch)
            if index >= CALLS // 10:
                times[name].append(elapsed * 1e6)
    medians = {f"{name}_us": statistics.median(values) for name, values in times.items()}
    return {"leaves": leaves, **medians, "extra_us": medians["shard_us"] - medians["jit_us"]}


def main() -> None:
    print(json.dumps({"jax": jax.__version__, "devices": jax.device_count(), "calls": CALLS}))
    for leaves in (10, 100, 500):
        print(json.dumps(measure(leaves)))


if __name__ == "__main__":
    main()
