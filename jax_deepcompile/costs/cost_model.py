"""Seconds that operations take, from what they do and what the hardware can."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jax_deepcompile.analysis.work import Attention, Product
from jax_deepcompile.costs.entries import Direction
from jax_deepcompile.costs.hardware import H100_SXM, Hardware
from jax_deepcompile.costs.network import DGX_NETWORK, Network
from jax_deepcompile.costs.overlap import NONE, NOTHING_TAKEN, Overlap, Taken
from jax_deepcompile.costs.rates import NO_RATES, Rates
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.costs.streams import Stream, Timing


@dataclass(frozen=True)
class Kernel:
    """What one kernel takes alone.

    Attributes:
      seconds: launch included.
      is_memory_bound: whether device memory keeps it that long, not arithmetic.
    """

    seconds: float
    is_memory_bound: bool


@dataclass(frozen=True)
class CostModel:
    """Analytical costs: rooflines of the hardware, rings of the network.

    Attributes:
      hardware: the GPU.
      network: what connects the GPUs.
      rates: what products and attention attain by shape; without, the hardware's flat fraction of its peak.
      overlap: what operations take from each other.
      collectives_take: of what is known of them, to see what a program is worth on another network.
    """

    hardware: Hardware = H100_SXM
    network: Network = DGX_NETWORK
    rates: Rates = NO_RATES
    overlap: Overlap = NOTHING_TAKEN
    collectives_take: float = 1.0

    def matmul(self, products: Iterable[Product | Attention], size_bytes: float) -> Kernel:
        """A kernel that multiplies matrices, and reads and writes ``size_bytes`` of device memory."""
        return self._kernel(sum(product.flops / self._rate(product) for product in products), size_bytes)

    def vector(self, flops: float, size_bytes: float) -> Kernel:
        """A kernel without matrix products."""
        return self._kernel(flops / self.hardware.vector_flops_per_s, size_bytes)

    def memory_s(self, size_bytes: float) -> float:
        """A kernel that reads and writes ``size_bytes`` of device memory, all told."""
        return self._kernel(0.0, size_bytes).seconds

    def calibrated(self, simulation: Simulation) -> CostModel:
        """This model, made to agree with what was measured of the program simulated; the same object if nothing was."""
        return self

    def kernel_s(self, seconds: float, line: str) -> float:
        """A kernel that the tables give ``seconds``, which stems from the user's ``line``, ``file:line``."""
        return seconds

    def collective_s(self, kind: str, size_bytes: float, group_size: int, ranks_per_node: int) -> float:
        """A collective, by published measurements, else by the formulas of NCCL's tests.

        Args:
          kind: as in HLO, such as ``all-gather``.
          size_bytes: the whole result of an all-gather, the whole operand of a reduce-scatter, else one GPU's buffer.
          group_size: GPUs that take part together.
          ranks_per_node: how many of those share a node.
        """
        if group_size <= 1:
            return self.memory_s(2 * size_bytes)
        known = self.rates.collective_s(kind, size_bytes, group_size, ranks_per_node, self.network)
        if known is not None:
            return known
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
        """A copy between device memory and pinned host memory, while all GPUs of the node copy that way."""
        return self.hardware.kernel_launch_s + size_bytes / self._copy_rate(direction)

    def copy(self, size_bytes: int, direction: Direction, kind: str = "copy") -> Timing:
        """How a copy runs, which needs no multiprocessors; beside one the other way, as on all GPUs of the node."""
        of_host = self.overlap.host_bytes_per_s / self.network.gpus_per_node
        both = min(self._link_rate(direction) * self.overlap.both_ways, of_host / 2)
        seconds = self.copy_s(size_bytes, direction)
        taken = Taken(0.0, self.overlap.copy_traffic * size_bytes / self.hardware.memory_rate / seconds)
        slower = self._copy_rate(direction) / both
        return Timing(Stream(direction.value), seconds, kind, size_bytes, taken=taken, both_ways=slower)

    def taken_by_collective(self, sent_bytes: float, seconds: float) -> Taken:
        """What a collective takes from kernels that sends ``sent_bytes`` from each GPU in ``seconds``."""
        traffic = self.overlap.collective_traffic * sent_bytes / self.hardware.memory_rate
        return Taken(self.overlap.collective_sms, traffic / seconds) if seconds else NONE

    def _link_rate(self, direction: Direction) -> float:
        hardware = self.hardware
        return hardware.to_host_bytes_per_s if direction is Direction.TO_HOST else hardware.from_host_bytes_per_s

    def _copy_rate(self, direction: Direction) -> float:
        return min(self._link_rate(direction), self.overlap.host_bytes_per_s / self.network.gpus_per_node)

    def _rate(self, product: Product | Attention) -> float:
        """FLOP/s in a training step; those of products in a table are those of short bursts."""
        if isinstance(product, Attention):
            attained = self.rates.attention_flops_per_s(product)
        else:
            attained = self.rates.product_flops_per_s(product, self.hardware)
            attained = attained and attained * self.overlap.sustained
        return attained or self.hardware.matmul_rate(product.dtype)

    def _kernel(self, arithmetic_s: float, size_bytes: float) -> Kernel:
        hardware = self.hardware
        memory_s = size_bytes / hardware.memory_rate
        longest_s = max(hardware.shortest_kernel_s, arithmetic_s, memory_s)
        return Kernel(hardware.kernel_launch_s + longest_s, memory_s >= arithmetic_s)
