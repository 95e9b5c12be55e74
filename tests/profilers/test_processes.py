"""Processes that train together plan from one profile."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import jax
import pytest

from jax_deepcompile.profilers.processes import of_first_process
from tests.costs.test_profile import PROFILE

SCRIPT = """
import sys
import jax
rank, port = map(int, sys.argv[1:])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from jax_deepcompile.costs.fingerprint import fingerprint
from jax_deepcompile.profilers import take_profile
from tests.profilers import steps
step = steps.sharded()
args = (step.init(steps.create), {"x": steps.batch()["x"][rank::2]})
traced = step.trace(args[0], steps.batch())
compiled = traced.lower().compile()
taken = take_profile(step, args, compiled, traced.sharded, step.mesh, limit_bytes=40_000, runs=1)
profile = taken.profile
known = profile if rank == 0 else None
assert take_profile(None, taken.args, compiled, traced.sharded, step.mesh, known=known).profile == profile
assert all(entry.fit for entry in profile.collectives), profile.fallbacks()
print("PROFILE", fingerprint(profile.to_json(), profile.machine), profile.step.seconds, profile.machine.axes[0].hosts)
"""


@pytest.mark.cpu_mesh
def test_two_processes_have_the_first_ones_profile():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(port)],
            env=os.environ | flags,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [run.communicate(timeout=240) for run in runs]
    profiles = [line for out, _ in outputs for line in out.splitlines() if line.startswith("PROFILE")]
    assert len(profiles) == 2, outputs
    assert len(set(profiles)) == 1
    assert profiles[0].endswith(" 2"), "the axis spans two hosts"


@pytest.mark.pure
def test_a_single_process_keeps_its_own():
    mesh = jax.make_mesh((1,), ("fsdp",))
    assert of_first_process(PROFILE, mesh) is PROFILE
    assert of_first_process(None, mesh) is None
