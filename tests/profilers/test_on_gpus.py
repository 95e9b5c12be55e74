"""The same profile on real GPUs: run with ``JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/profilers``."""

from __future__ import annotations

import jax
import pytest

from jax_deepcompile.costs.entries import Direction, Method
from tests.profilers import steps

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def profile():
    try:
        count = len(jax.devices("cuda"))
    except RuntimeError:
        pytest.skip("no GPU")
    step = steps.sharded(mesh=jax.make_mesh((count,), ("fsdp",), devices=jax.devices("cuda")))
    return step.profile(step.init(steps.create), steps.batch()).profile


def test_matrix_products_are_timed_and_attributed(profile):
    products = [op for op in profile.ops if "gemm" in op.name or "dot" in op.name]
    assert products
    assert any(op.source.method is Method.MEASURED and op.equations for op in products)


def test_the_allocators_peak_holds_the_step(profile):
    assert profile.memory.allocator_peak_bytes >= profile.memory.device_bytes


def test_copies_both_ways(profile):
    assert all(profile.copy_s(direction, 1 << 20) for direction in Direction)


def test_collectives_over_every_axis_of_several_devices(profile):
    assert all(entry.fit for entry in profile.collectives)
