"""The tables of a mesh's devices, and the network read off them."""

from __future__ import annotations

import re
from importlib import resources
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_deepcompile.costs import devices
from jax_deepcompile.costs.devices import allocator_bytes_of, hardware_of, has_table, kind_with_network, network_of
from jax_deepcompile.costs.hardware import CPU_HOST, H100_SXM, H200_SXM, Network
from jax_deepcompile.costs.tables import KernelTable, fitted_hardware

pytestmark = pytest.mark.pure

HERE = SimpleNamespace(runtime_type="pjrt_c_api")
DESCRIBED = SimpleNamespace(runtime_type="compile_only_runtime")


def gpu(process: int, kind: str = "NVIDIA H100 80GB HBM3", client=DESCRIBED, **more):
    return SimpleNamespace(process_index=process, device_kind=kind, client=client, **more)


@pytest.mark.parametrize(
    ("kind", "hardware"),
    [
        ("cpu", CPU_HOST),
        ("NVIDIA H100 80GB HBM3", H100_SXM),
        ("NVIDIA H200 141GB HBM3e (1 x 400 Gbit/s a node)", H200_SXM),
    ],
)
def test_a_kind_has_its_table(kind, hardware):
    assert hardware_of(kind) is hardware
    assert has_table(kind)


@pytest.mark.parametrize(("target", "hardware"), [("h100", H100_SXM), ("h200", H200_SXM)])
def test_jax_is_told_of_the_cudnn_that_xla_compiles_for(target, hardware):
    text = resources.files("jax_deepcompile.lowering").joinpath("gpus", f"{target}_sxm.txtpb").read_text()
    major, minor, patch = map(
        int, re.findall(r"dnn_version_info \{ major: (\d+) minor: (\d+) patch: (\d+) \}", text)[0]
    )
    assert hardware.cudnn_version == 10_000 * major + 100 * minor + patch


def test_another_gpu_is_taken_for_an_h100():
    assert hardware_of("NVIDIA A100-SXM4-40GB") is H100_SXM
    assert not has_table("NVIDIA A100-SXM4-40GB")


def test_what_was_measured_on_such_a_device_goes_before_what_was_published(monkeypatch):
    table = KernelTable("NVIDIA H200 141GB HBM3e", "2026-01-01", (), kernel_launch_s=2e-6, shortest_kernel_s=4e-6)
    monkeypatch.setattr(devices, "stored_tables", lambda: (table,))
    assert hardware_of("NVIDIA H200 141GB HBM3e (1 x 400 Gbit/s a node)") == fitted_hardware(H200_SXM, table)
    assert hardware_of("NVIDIA H100 80GB HBM3") is H100_SXM


def test_gpus_of_one_process_share_a_node():
    assert network_of([gpu(index // 4) for index in range(8)]) == Network(4, nics_per_node=4)


def test_gpus_of_one_machine_share_a_node_however_many_processes_drive_them():
    devices = [gpu(index, client=HERE, slice_index=index // 8) for index in range(16)]
    assert network_of(devices) == Network(8, nics_per_node=8)


def test_described_gpus_are_all_of_one_slice_yet_not_of_one_node():
    assert network_of([gpu(index // 8, slice_index=0) for index in range(16)]).gpus_per_node == 8


def test_a_card_of_400_gbit_a_gpu_goes_without_saying():
    assert kind_with_network("NVIDIA H100 80GB HBM3", Network(4, nics_per_node=4)) == "NVIDIA H100 80GB HBM3"


@given(st.integers(1, 16), st.integers(1, 16), st.sampled_from([25.0, 100.0, 200.0, 400.0, 800.0, 12.5]))
def test_the_kind_names_any_other_network(gpus_per_node, cards, speed_gbps):
    network = Network(gpus_per_node, nics_per_node=cards, nic_gbps=speed_gbps)
    kind = kind_with_network("NVIDIA H100 80GB HBM3", network)
    assert network_of([gpu(index // gpus_per_node, kind) for index in range(2 * gpus_per_node)]) == network


def with_allocator(limit: int | None, platform: str = "gpu", process: int = 0):
    stats = None if limit is None else {"bytes_limit": limit}
    return SimpleNamespace(
        platform=platform, process_index=process, client=SimpleNamespace(), memory_stats=lambda: stats
    )


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
