"""A second run of the same program: its plan is kept, and so is what was compiled for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_mesh

RUN = """
import json, sys
import jax, jax.monitoring
import jax.numpy as jnp
import jax_deepcompile as deepcompile
from jax_deepcompile.lowering.latencies import Latency

counts = {}
def count(event, **_):
    counts[event] = counts.get(event, 0) + 1
jax.monitoring.register_event_listener(count)

def step(state, batch):
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(state)
    return state - 0.1 * gradient, value

arguments = jnp.ones((64, 64)), jnp.ones((32, 64))
told = deepcompile.Plan("told", latencies=(Latency("fusion", 1.0),))
_, value = deepcompile.shard(step, plan=told, cache_dir=sys.argv[1])(*arguments)
step = deepcompile.shard(step, memory_limit="1GiB", cache_dir=sys.argv[1])
_, value = step(*arguments)
value.block_until_ready()
found = {key: counts.get(f"/jax/compilation_cache/{key}", 0) for key in ("cache_hits", "cache_misses")}
print(json.dumps(found | {"explain": str(step.explain()), "step": float(value)}))
"""


def run(cache: Path) -> dict:
    done = subprocess.run([sys.executable, "-c", RUN, str(cache)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_is_planned_or_compiled_again(tmp_path):
    """Not even where XLA is told latencies."""
    first, second = run(tmp_path), run(tmp_path)
    assert "plan: made for this run" in first["explain"]
    assert "plan: kept from an earlier run" in second["explain"]
    assert first["cache_misses"]
    assert (second["cache_misses"], second["cache_hits"] > 0) == (0, True)
    assert second["step"] == first["step"]
