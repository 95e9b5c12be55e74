"""Seconds that operations take, from what they do and what the hardware can."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from jax_deepcompile.costs.hardware import H100_SXM, Hardware
from jax_deepcompile.costs.network import DGX_NETWORK, Network
from jax_deepcompile.costs.simulation import Simulation


class Direction(StrEnum):
    """Which way a copy between device and host goes."""

    TO_HOST = "to host"
    FROM_HOST = "from host"


@dataclass(frozen=True)
class CostModel:
    """Analytical costs: rooflines of the hardware, rings of the network.

    Attributes:
      hardware: the GPU.
      network: what connects the GPUs.
    """

    hardware: Hardware = H100_SXM
    network: Network = DGX_NETWORK

    def matmul_s(self, flops: float, dtype: str, size_bytes: float) -> float:
        """A kernel that multiplies matrices.

        Args:
          flops: multiplications and additions.
          dtype: type of the factors' elements.
          size_bytes: read and written in device memory.
        """
        return self._kernel_s(flops / self.hardware.matmul_rate(dtype), size_bytes)

    def vector_s(self, flops: float, size_bytes: float) -> float:
        """A kernel without matrix products."""
        return self._kernel_s(flops / self.hardware.vector_flops_per_s, size_bytes)

    def memory_s(self, size_bytes: float) -> float:
        """A kernel that reads and writes ``size_bytes`` of device memory, all told."""
        return self._kernel_s(0.0, size_bytes)

    def calibrated(self, simulation: Simulation) -> CostModel:
        """This model, made to agree with what was measured of the program simulated; the same object if nothing was."""
        return self

    def kernel_s(self, seconds: float, line: str) -> float:
        """A kernel that the tables give ``seconds``, which stems from the user's ``line``, ``file:line``."""
        return seconds

    def collective_s(self, kind: str, size_bytes: float, group_size: int, ranks_per_node: int) -> float:
        """A collective, by the formulas of NCCL's tests.

        Args:
          kind: as in HLO, such as ``all-gather``.
          size_bytes: the whole result of an all-gather, the whole operand of a reduce-scatter, else one GPU's buffer.
          group_size: GPUs that take part together.
          ranks_per_node: how many of those share a node.
        """
        if group_size <= 1:
            return self.memory_s(2 * size_bytes)
        network, others = self.network, (group_size - 1) / group_size
        bus = network.bus_bytes_per_s(group_size, ranks_per_node)
        if kind == "all-reduce":
            return network.tree_s(group_size, ranks_per_node) + 2 * size_bytes * others / bus
        if kind in ("all-to-all", "ragged-all-to-all"):
            elsewhere = max(group_size - ranks_per_node, 0) / group_size
            pair = network.pair_bytes_per_s(group_size, ranks_per_node)
            seconds = max(size_bytes * others / network.nvlink_bytes_per_s, size_bytes * elsewhere / pair)
            return network.tree_s(group_size, ranks_per_node) / 2 + seconds
        if kind == "collective-permute":
            hop = network.nic_hop_s if ranks_per_node < group_size else network.nvlink_hop_s
            return network.launch_s + hop + size_bytes / network.pair_bytes_per_s(group_size, ranks_per_node)
        share = 1.0 if kind == "collective-broadcast" else others
        return network.ring_s(group_size, ranks_per_node) + size_bytes * share / bus

    def copy_s(self, size_bytes: float, direction: Direction) -> float:
        """A copy between device memory and pinned host memory."""
        hardware = self.hardware
        rate = hardware.to_host_bytes_per_s if direction is Direction.TO_HOST else hardware.from_host_bytes_per_s
        return hardware.kernel_launch_s + size_bytes / rate

    def _kernel_s(self, arithmetic_s: float, size_bytes: float) -> float:
        hardware = self.hardware
        roofline_s = max(arithmetic_s, size_bytes / hardware.memory_rate)
        return hardware.kernel_launch_s + max(hardware.shortest_kernel_s, roofline_s)
