"""Copies that take longer or less than is known of them, for a benchmark of plans that were made for others."""

from __future__ import annotations

import pytest

from experiments.bench.copies import copies_profile
from experiments.bench.workload import Cluster
from jax_deepcompile.costs.entries import Direction
from jax_deepcompile.costs.measured import costs_of


@pytest.mark.h100_aot
@pytest.mark.parametrize("takes", [0.8, 1.25])
def test_copies_take_what_they_are_said_to(takes):
    mesh = Cluster(nodes=1).make_mesh()
    known, other = costs_of(mesh), costs_of(mesh, copies_profile(takes, mesh))
    for direction in Direction:
        for size in (1 << 20, 1 << 26):
            before, after = known.copy(size, direction), other.copy(size, direction)
            assert after.seconds == pytest.approx(takes * before.seconds)
            assert after.both_ways == before.both_ways
    assert copies_profile(1.0, mesh) is None
