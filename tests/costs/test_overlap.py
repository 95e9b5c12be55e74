"""What streams take from each other, against figures worked out by hand."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from jax_deepcompile.costs import overlap
from jax_deepcompile.costs.cost_model import CostModel, Direction
from jax_deepcompile.costs.hardware import CPU_HOST, H100_SXM, HARDWARE
from jax_deepcompile.costs.network import Network
from jax_deepcompile.costs.overlap import GPU, NOTHING_TAKEN, Overlap, Taken, overlap_of
from jax_deepcompile.costs.player import Operation, Player
from jax_deepcompile.costs.streams import Stream, Timing

pytestmark = pytest.mark.pure


def played(*timings: Timing) -> Player:
    """Each issued once the compute stream comes to it."""
    player = Player()
    for timing in timings:
        player.play(timing, player.now_s, {}, lambda: Operation("", "", ""))
    return player


def kernel(seconds: float, is_memory_bound: bool = False) -> Timing:
    return Timing(Stream.COMPUTE, seconds, "fusion", is_memory_bound=is_memory_bound)


def gather(seconds: float, sms: float = 0.5, memory: float = 0.2) -> Timing:
    return Timing(Stream.ALL_GATHER, seconds, "all-gather", taken=Taken(sms, memory))


def copy(stream: Stream, seconds: float, both_ways: float = 2.0, memory: float = 0.0) -> Timing:
    return Timing(stream, seconds, "copy", taken=Taken(0.0, memory), both_ways=both_ways)


def test_a_kernel_beside_a_collective_takes_longer_until_that_ends():
    assert played(gather(2.0), kernel(5.0)).now_s == pytest.approx(6.0), "half as fast for two seconds"
    assert played(gather(10.0), kernel(2.0)).now_s == pytest.approx(4.0)
    assert played(gather(2.0), kernel(5.0, is_memory_bound=True)).now_s == pytest.approx(5.4)
    assert played(kernel(5.0), gather(2.0)).now_s == 5.0


def test_what_runs_beside_adds_up():
    run = played(gather(2.0, memory=0.2), copy(Stream.TO_HOST, 4.0, memory=0.3), kernel(4.0, is_memory_bound=True))
    assert run.now_s == pytest.approx(4.0 + (4.0 - 2.0 * 0.5 - 2.0 * 0.7) / 1.0)
    assert run.totals.compute_s == pytest.approx(run.now_s)
    assert run.totals.slowed_s == pytest.approx(run.now_s - 4.0)
    assert run.totals.delayed_s == pytest.approx(2.0 * 0.2), "the collective takes at least its share of the memory"


def test_copies_both_ways_slow_each_other_down_while_they_last():
    run = played(copy(Stream.TO_HOST, 4.0), copy(Stream.FROM_HOST, 1.0))
    assert max(run.free[Stream.FROM_HOST.queue].values()) == pytest.approx(2.0)
    run = played(copy(Stream.TO_HOST, 1.0), copy(Stream.FROM_HOST, 4.0))
    assert max(run.free[Stream.FROM_HOST.queue].values()) == pytest.approx(4.5), "one second at half its rate"


def test_nothing_takes_all_of_anything():
    assert Taken(2.0, 3.0).slowdown(True) == Taken(2.0, 3.0).slowdown(False) == pytest.approx(10.0)


def test_gpus_of_a_node_share_their_hosts_memory():
    node = CostModel(H100_SXM, Network(gpus_per_node=8), overlap=Overlap(both_ways=0.75, host_bytes_per_s=160e9))
    alone = CostModel(H100_SXM, Network(gpus_per_node=1), overlap=Overlap(both_ways=0.75, host_bytes_per_s=160e9))
    assert node.copy_s(20e9, Direction.TO_HOST) == pytest.approx(1.0, rel=1e-3)
    assert alone.copy_s(55e9, Direction.TO_HOST) == pytest.approx(1.0, rel=1e-3)
    assert node.copy(1, Direction.TO_HOST).both_ways == pytest.approx(2.0)
    assert alone.copy(1, Direction.TO_HOST).both_ways == pytest.approx(1 / 0.75)


def test_six_constants_each_with_its_source_or_its_fit():
    assert len(dataclasses.fields(GPU)) <= 6
    lines = inspect.getsource(overlap).partition("GPU = Overlap(")[2].partition("\n)")[0].splitlines()
    said = ""
    for line in lines[1:]:
        said = said + line if line.strip().startswith("#") else said
        if "=" in line.partition("#")[0]:
            assert "#" in line or any(word in said for word in ("https://", "Fitted")), line
            said = ""


def test_virtual_cpu_devices_take_nothing():
    assert overlap_of(CPU_HOST.name) is NOTHING_TAKEN
    assert overlap_of(H100_SXM.name) is GPU


def test_every_gpu_has_the_memory_of_its_own_host():
    assert {hardware.name for hardware in HARDWARE.values()} == set(overlap._OF)
    assert overlap_of(HARDWARE["b200"].name).host_bytes_per_s < overlap_of(HARDWARE["h200"].name).host_bytes_per_s


def test_a_gh200_copies_over_its_own_link():
    costs = CostModel(HARDWARE["gh200"], Network(gpus_per_node=4), overlap=overlap_of("GH200"))
    assert costs.copy_s(375e9, Direction.FROM_HOST) == pytest.approx(1.0, rel=1e-3)
    assert costs.copy(1, Direction.FROM_HOST).both_ways == pytest.approx(2.0)
