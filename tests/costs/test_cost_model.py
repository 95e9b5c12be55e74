"""Rooflines and rings against figures worked out by hand, and against what one measures on H100s."""

from __future__ import annotations

import pytest

from jax_deepcompile.analysis.work import Product
from jax_deepcompile.costs.cost_model import CostModel, Direction
from jax_deepcompile.costs.hardware import H100_SXM, H200_SXM
from jax_deepcompile.costs.network import Network
from tests.costs.snippets import COSTS

pytestmark = pytest.mark.pure

H100 = CostModel()


def product_s(costs: CostModel, size: int, dtype: str = "bf16", size_bytes: float = 0.0) -> float:
    return costs.matmul((Product(1, size, size, size, dtype),), size_bytes).seconds


def test_a_large_gemm_runs_at_seventy_percent_of_the_peak():
    flops, size_bytes = 2.0 * 8192**3, 3 * 2 * 8192**2
    assert flops / product_s(H100, 8192, size_bytes=size_bytes) == pytest.approx(0.70 * 989.4e12, rel=0.01)


def test_a_thin_gemm_runs_at_the_memory():
    size_bytes = 2 * 8192**2
    kernel = H100.matmul((Product(1, 1, 8192, 8192, "bf16"),), size_bytes)
    assert kernel.seconds == pytest.approx(size_bytes / (0.85 * 3.35e12), rel=0.1)
    assert kernel.is_memory_bound


@pytest.mark.parametrize(("dtype", "times"), [("f8e4m3fn", 0.5), ("f32", 2.0), ("f32-highest", 14.8), ("s64", 14.8)])
def test_other_types_have_other_rates(dtype: str, times: float):
    assert product_s(H100, 8192, dtype) / product_s(H100, 8192) == pytest.approx(times, rel=0.01)


def test_the_smallest_kernel():
    assert H100.memory_s(4) == pytest.approx(3.8e-6)


def test_h200_differs_in_its_memory():
    assert CostModel(H200_SXM).memory_s(1e9) < H100.memory_s(1e9)
    assert product_s(CostModel(H200_SXM), 8192) == product_s(H100, 8192)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all-gather", 0.75),
        ("reduce-scatter", 0.75),
        ("all-reduce", 1.5),
        ("all-to-all", 0.75),
        ("collective-permute", 1.0),
        ("collective-broadcast", 1.0),
    ],
)
def test_collectives_within_a_node(kind: str, seconds: float):
    assert COSTS.collective_s(kind, 1e5, group_size=4, ranks_per_node=4) == pytest.approx(seconds)


def test_across_nodes_a_ring_runs_at_340_gb_per_s():
    size_bytes = 8e9
    seconds = H100.collective_s("all-gather", size_bytes, group_size=32, ranks_per_node=8)
    assert size_bytes * 31 / 32 / seconds == pytest.approx(340e9, rel=0.01)


def test_one_gpu_of_each_node_has_one_card():
    size_bytes = 8e9
    seconds = H100.collective_s("all-gather", size_bytes, group_size=4, ranks_per_node=1)
    assert size_bytes * 3 / 4 / seconds == pytest.approx(340e9 / 8, rel=0.01)


def test_a_slow_network():
    slow = CostModel(network=Network(nics_per_node=1))
    fast, one = (costs.collective_s("reduce-scatter", 8e9, 32, 8) for costs in (H100, slow))
    assert one / fast == pytest.approx(8, rel=0.01)
    assert slow.collective_s("all-gather", 8e9, 8, 8) == H100.collective_s("all-gather", 8e9, 8, 8)


def test_small_collectives_take_their_latency():
    assert H100.collective_s("all-gather", 32, 32, 8) == pytest.approx(10e-6 + 28 * 1.9e-6 + 3 * 4e-6, rel=0.01)
    assert H100.collective_s("all-reduce", 32, 32, 8) == pytest.approx(10e-6 + 2 * (7 * 1.9e-6 + 2 * 4e-6), rel=0.01)


def test_a_group_of_one_copies():
    assert COSTS.collective_s("all-gather", 5e5, 1, 1) == pytest.approx(1.0)


def test_copies():
    assert COSTS.copy_s(1e5, Direction.TO_HOST) == pytest.approx(1.0)
    assert COSTS.copy_s(1e5, Direction.FROM_HOST) == pytest.approx(2.0)
    assert H100_SXM.to_host_bytes_per_s < 63e9
