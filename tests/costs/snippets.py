"""Scheduled HLO for tests, short enough to check by hand."""

from __future__ import annotations

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.hardware import Hardware
from jax_deepcompile.costs.network import Network
from jax_deepcompile.hlo import reader as hlo

ROUND = Hardware(
    name="round numbers",
    matmul_flops_per_s={"bf16": 1e9, "f32": 1e8},
    vector_flops_per_s=1e12,
    matmul_fraction=1.0,
    memory_bytes=10**9,
    memory_bytes_per_s=1e6,
    memory_fraction=1.0,
    kernel_launch_s=0.0,
    shortest_kernel_s=0.0,
    to_host_bytes_per_s=1e5,
    from_host_bytes_per_s=5e4,
    nvlink_bytes_per_s=1e5,
)
"""One second is 1 MB of device memory, 100 kB to the host or 50 kB from it, 1 GFLOP of bf16."""

NETWORK = Network(
    gpus_per_node=4, nvlink_bytes_per_s=ROUND.nvlink_bytes_per_s, launch_s=0.0, nvlink_hop_s=0.0, nic_hop_s=0.0
)

COSTS = CostModel(ROUND, NETWORK)

ADDER = """%adder (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""

GROUPS = "replica_groups={{0,1,2,3}}"


def module(entry: str, *computations: str, header: str = "") -> hlo.Module:
    """A scheduled module for four devices: the instructions of its entry, and whole computations that they call."""
    lines = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    called = "\n".join(computations)
    text = f"HloModule test, is_scheduled=true{header}, num_partitions=4\n\n{called}\nENTRY %main () -> f32[] {{\n"
    return hlo.read(f"{text}{lines}\n}}\n")
