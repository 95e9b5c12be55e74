"""The tables of a mesh's devices, and the network read off them."""

from __future__ import annotations

import inspect
import re
from importlib import resources
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_deepcompile import errors
from jax_deepcompile.costs import devices, hardware
from jax_deepcompile.costs.devices import allocator_bytes_of, hardware_of, host_bytes_of, network_of
from jax_deepcompile.costs.hardware import B200_SXM, CPU_HOST, H100_SXM, H200_SXM, HARDWARE, known_hardware
from jax_deepcompile.costs.network import CPU_NETWORK, Network, describe_network

pytestmark = pytest.mark.pure


class Client:
    """Of devices of one topology."""

    def __init__(self, runtime_type: str = "compile_only_runtime"):
        self.runtime_type = runtime_type


HERE, DESCRIBED = Client("pjrt_c_api"), Client()


def gpu(process: int, kind: str = "NVIDIA H100 80GB HBM3", client=DESCRIBED, **more):
    return SimpleNamespace(process_index=process, device_kind=kind, client=client, **more)


@pytest.mark.parametrize(
    ("kind", "hardware"),
    [
        ("cpu", CPU_HOST),
        ("NVIDIA H100 80GB HBM3", H100_SXM),
        ("NVIDIA H200 141GB HBM3e", H200_SXM),
        ("NVIDIA B200", B200_SXM),
    ],
)
def test_a_kind_has_its_entry(kind, hardware):
    assert hardware_of(kind) is known_hardware(kind) is hardware


@pytest.mark.parametrize("target", ["h100", "h200", "gh200", "b200"])
def test_xla_compiles_for_the_memory_and_the_cudnn_of_the_entry(target):
    text = resources.files("jax_deepcompile.lowering").joinpath("gpus", f"{target}_sxm.txtpb").read_text()
    major, minor, patch = map(
        int, re.findall(r"dnn_version_info \{ major: (\d+) minor: (\d+) patch: (\d+) \}", text)[0]
    )
    assert HARDWARE[target].cudnn_version == 10_000 * major + 100 * minor + patch
    assert f"device_memory_size: {HARDWARE[target].memory_bytes}\n" in text


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-40GB", "NVIDIA GB200"])
def test_another_gpu_is_taken_for_an_h100_aloud_and_once(kind):
    sentence = (
        f"nothing is known of {kind}: what programs take on it is simulated as on one H100 SXM.* B200 SXM; add it"
    )
    with pytest.warns(errors.UnknownHardwareWarning, match=sentence):
        assert hardware_of(kind) is H100_SXM
    assert hardware_of(kind) is H100_SXM
    assert known_hardware(kind) is None


def test_gpus_of_one_process_share_a_node():
    assert network_of([gpu(index // 4) for index in range(8)]) == Network(4, nics_per_node=4)


def test_gpus_of_one_machine_share_a_node_however_many_processes_drive_them():
    devices = [gpu(index, client=HERE, slice_index=index // 8) for index in range(16)]
    assert network_of(devices) == Network(8, nics_per_node=8)


def test_described_gpus_are_all_of_one_slice_yet_not_of_one_node():
    assert network_of([gpu(index // 8, slice_index=0) for index in range(16)]).gpus_per_node == 8


def test_nvlink_is_that_of_the_gpus():
    assert network_of([gpu(0, "NVIDIA B200")] * 8) == Network(8, 8, nvlink_bytes_per_s=B200_SXM.nvlink_bytes_per_s)
    assert network_of([gpu(0, "cpu")] * 8) == CPU_NETWORK


@given(st.integers(1, 16), st.integers(1, 16), st.sampled_from([25.0, 100.0, 200.0, 400.0, 800.0, 12.5]))
def test_described_gpus_have_the_network_of_their_target(gpus_per_node, cards, speed_gbps):
    network = Network(gpus_per_node, nics_per_node=cards, nic_gbps=speed_gbps)
    client, other = Client(), Client()
    describe_network(client, network)
    devices = [gpu(index // gpus_per_node, client=client) for index in range(2 * gpus_per_node)]
    assert network_of(devices) == network_of(reversed(devices)) == network
    assert network_of([gpu(0, client=other)]) == Network(1, 1)


@pytest.mark.parametrize(("cards", "share"), [(8, 2), (4, 1), (1, 1)])
def test_gpus_that_are_a_part_of_each_node_have_their_share_of_its_cards(cards, share):
    client = Client()
    describe_network(client, Network(8, nics_per_node=cards))
    devices = [gpu(process, client=client) for process in (0, 0, 1, 1)]
    assert network_of(devices) == Network(2, nics_per_node=share)


def with_allocator(limit: int | None, platform: str = "gpu", process: int = 0):
    stats = None if limit is None else {"bytes_limit": limit}
    return SimpleNamespace(platform=platform, process_index=process, client=HERE, memory_stats=lambda: stats)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (with_allocator((60 << 30) + 5), 60 << 30),
        (with_allocator(None), None),
        (with_allocator(60 << 30, platform="cpu"), None),
        (with_allocator(60 << 30, process=1), None),
        (gpu(0, platform="gpu"), None),
    ],
    ids=["here", "says nothing", "CPU", "another process's", "described"],
)
def test_what_the_allocator_has(device, expected):
    mesh: Any = SimpleNamespace(devices=np.array([device], object))
    assert allocator_bytes_of(mesh) == expected


NODES = [gpu(index // 4, client=HERE, platform="gpu", slice_index=index // 4) for index in range(8)]


@pytest.mark.parametrize(
    ("gpus", "pinned_gb", "expected"),
    [
        ([gpu(0, platform="gpu")] * 8, None, H100_SXM.host_bytes),
        (NODES, None, 14 << 30),
        (NODES, "2000", 250 << 30),
        ([gpu(0, "cpu", client=HERE, platform="cpu")], None, 0),
    ],
    ids=["described", "a quarter of what XLA pins", "a quarter of the node's", "CPU"],
)
def test_the_hosts_memory_is_for_all_its_gpus(monkeypatch, gpus, pinned_gb, expected):
    """Nodes of one kind differ by a few pages."""
    pages = {"SC_PAGE_SIZE": 1 << 12, "SC_PHYS_PAGES": (1000 << 18) + 5}
    monkeypatch.setattr(devices.os, "sysconf", pages.__getitem__)
    monkeypatch.delenv(devices.PINNED_GB, raising=False)
    if pinned_gb is not None:
        monkeypatch.setenv(devices.PINNED_GB, pinned_gb)
    monkeypatch.setattr(devices, "has_host_memory", lambda mesh: True)
    mesh: Any = SimpleNamespace(devices=np.array(gpus, object))
    assert host_bytes_of(mesh) == expected


@pytest.mark.parametrize(
    ("gpus", "pinned_gb", "size_bytes", "expected"),
    [
        (NODES, None, 16 * 10**9, ""),
        (NODES, None, 16 * 10**9 + 1, f"{devices.PINNED_GB}=65"),
        (NODES, "100", 16 * 10**9 + 1, ""),
        ([gpu(0, platform="gpu")] * 8, None, 10**10, f"{devices.PINNED_GB}=80"),
        ([gpu(0, "cpu", client=HERE, platform="cpu")], None, 1 << 40, ""),
    ],
    ids=["as much as XLA pins", "a byte more", "as the environment says", "described", "CPU"],
)
def test_more_than_xla_pins_has_to_be_asked_for(monkeypatch, gpus, pinned_gb, size_bytes, expected):
    monkeypatch.delenv(devices.PINNED_GB, raising=False)
    if pinned_gb is not None:
        monkeypatch.setenv(devices.PINNED_GB, pinned_gb)
    monkeypatch.setattr(devices, "Mesh", SimpleNamespace)
    assert devices.to_pin(SimpleNamespace(devices=np.array(gpus, object)), size_bytes) == expected


def test_the_hosts_of_all_targets_have_a_source():
    assert all(each.host_bytes > each.memory_bytes for name, each in HARDWARE.items() if name != "cpu")
    lines = inspect.getsource(hardware).splitlines()
    given = [place for place, line in enumerate(lines) if line.strip().startswith("host_bytes=")]
    assert all("#" in lines[place] or "https://" in lines[place - 1] for place in given)
