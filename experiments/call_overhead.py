"""What a call of a sharded step costs beside ``jax.jit``'s on the same arrays: ``python -m experiments.call_overhead``.

All run the same trivial step on the same sharded pytree, side by side, in random order; the lower quartiles of the time
until the call returns (not until the devices are done) are printed as JSON, in microseconds: of the sharded step, of
``jax.jit``, and of ``jax.jit`` behind the walk over all leaves that a sharded step takes, with the walk's difference.
"""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jax_deepcompile as deepcompile
from jax_deepcompile.frontend.arguments import are_plain

CALLS = 300


def create(leaves: int) -> dict:
    """As many leaves, half of them an optimizer's: such a state is donated."""
    params = {f"leaf{index}": jnp.zeros(64) for index in range(leaves // 2)}
    return {"params": params, "opt_state": optax.TraceState(params)}


def step(state: dict, batch: jax.Array):
    return jax.tree.map(lambda leaf: leaf + 1, state), batch.sum()


def seconds_a_call(run: Callable, state: Any, batch: jax.Array) -> tuple[float, Any]:
    begin = time.perf_counter()
    state, metric = run(state, batch)
    elapsed = time.perf_counter() - begin
    jax.block_until_ready((state, metric))
    return elapsed, state


def measure(leaves: int) -> dict[str, float]:
    """Lower quartiles for a state of ``leaves`` arrays."""
    sharded = deepcompile.shard(step)
    mesh = sharded.mesh
    state = sharded.init(functools.partial(create, leaves))
    batch = jax.device_put(np.zeros((mesh.size, 4), np.float32), NamedSharding(mesh, PartitionSpec("fsdp")))
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    whole = NamedSharding(mesh, PartitionSpec())
    plain = jax.jit(step, in_shardings=(places, batch.sharding), out_shardings=(places, whole), donate_argnums=0)

    def checked(state, batch):
        return plain(state, batch) if are_plain((state, batch), {0: True, leaves - 1: True}) else None

    runs = {"shard": sharded, "jit": plain, "checked_jit": checked}
    states = {name: jax.tree.map(jnp.copy, state) for name in runs}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(CALLS):
        for name in random.sample(list(runs), len(runs)):
            elapsed, states[name] = seconds_a_call(runs[name], states[name], batch)
            if index >= CALLS // 10:
                times[name].append(elapsed * 1e6)
    found = {f"{name}_us": statistics.quantiles(values, n=4)[0] for name, values in times.items()}
    return {"leaves": leaves, **found, "walk_us": found["checked_jit_us"] - found["jit_us"]}


def main() -> None:
    print(json.dumps({"jax": jax.__version__, "devices": jax.device_count(), "calls": CALLS}))
    for leaves in (10, 200, 500):
        print(json.dumps(measure(leaves)))


if __name__ == "__main__":
    main()
