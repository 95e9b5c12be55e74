"""Processes that train together plan from one profile."""

from __future__ import annotations

import jax
import pytest

from jax_deepcompile.profilers.take import of_first_process
from tests.api.test_processes import lines, run_two
from tests.costs.test_profile import PROFILE

SCRIPT = """
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
    runs = run_two(SCRIPT)
    profiles = [line for run in runs for line in lines(run, "PROFILE")]
    assert len(profiles) == 2, runs
    assert len(set(profiles)) == 1
    assert profiles[0].endswith(" 2"), "the axis spans two hosts"


@pytest.mark.pure
def test_a_single_process_keeps_its_own():
    mesh = jax.make_mesh((1,), ("fsdp",))
    assert of_first_process(PROFILE, mesh) is PROFILE
    assert of_first_process(None, mesh) is None
