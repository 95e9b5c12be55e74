"""What connects the devices: nodes with NVLink inside, and the network cards between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jax_deepcompile.costs.hardware import CPU_HOST, GIGA, H100_SXM, MICRO


@dataclass(frozen=True)
class Network:
    """What connects the GPUs. Bus bandwidths are those of NCCL's tests.

    Source of the formulas: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

    Attributes:
      gpus_per_node: GPUs in a node, connected by NVLink.
      nics_per_node: network cards in a node.
      nic_gbps: speed of each, in Gbit/s each way.
      nic_fraction: of that, attained as bus bandwidth.
      nvlink_bytes_per_s: attained bus bandwidth within a node.
      launch_s: what any collective takes before its first byte moves.
      nvlink_hop_s: per step of a ring between two GPUs of a node.
      nic_hop_s: per step of a ring between two nodes.
    """

    gpus_per_node: int = 8
    nics_per_node: int = 8
    nic_gbps: float = 400.0
    # 340 of 400 GB/s over 32 nodes with eight 400 Gbit/s cards: https://github.com/NVIDIA/nccl/issues/1218
    nic_fraction: float = 0.85
    nvlink_bytes_per_s: float = H100_SXM.nvlink_bytes_per_s
    # LL128 protocol in NCCL's own model, github.com/NVIDIA/nccl src/graph/tuning.cc: baseLat and hwLat
    launch_s: float = 10.0 * MICRO
    nvlink_hop_s: float = 1.9 * MICRO
    nic_hop_s: float = 4.0 * MICRO

    @property
    def cards(self) -> str:
        """The network cards of a node, in words."""
        return f"{self.nics_per_node} x {self.nic_gbps:g} Gbit/s a node"

    @property
    def node_bytes_per_s(self) -> float:
        """Attained bytes/s that leave a node through all its network cards."""
        return self.nics_per_node * self.nic_gbps / 8 * GIGA * self.nic_fraction

    def bus_bytes_per_s(self, group_size: int, ranks_per_node: int) -> float:
        """Bus bandwidth of a ring over ``group_size`` GPUs of which ``ranks_per_node`` share each node.

        A group with fewer GPUs in each node than there are leaves the rest of the cards to the groups beside it.
        """
        if ranks_per_node >= group_size:
            return self.nvlink_bytes_per_s
        return min(self.nvlink_bytes_per_s, self.node_bytes_per_s * ranks_per_node / self.gpus_per_node)

    def pair_bytes_per_s(self, group_size: int, ranks_per_node: int) -> float:
        """What one GPU sends to GPUs elsewhere, when all send at once."""
        if ranks_per_node >= group_size:
            return self.nvlink_bytes_per_s
        return min(self.nvlink_bytes_per_s, self.node_bytes_per_s / self.gpus_per_node)

    def ring_s(self, group_size: int, ranks_per_node: int) -> float:
        """Latency of a ring, in which each GPU's part passes all others: all-gather and reduce-scatter."""
        nodes = math.ceil(group_size / ranks_per_node)
        return self.launch_s + (group_size - nodes) * self.nvlink_hop_s + (nodes - 1) * self.nic_hop_s

    def tree_s(self, group_size: int, ranks_per_node: int) -> float:
        """Latency of a double tree, up and down again: all-reduce."""
        nodes = math.ceil(group_size / ranks_per_node)
        hops = (ranks_per_node - 1) * self.nvlink_hop_s + math.log2(nodes) * self.nic_hop_s
        return self.launch_s + 2 * hops


DGX_NETWORK = Network()
"""Nodes of eight GPUs and eight 400 Gbit/s cards, as in a DGX H100."""

CPU_NETWORK = Network(
    nics_per_node=1,
    nic_gbps=80.0,
    nvlink_bytes_per_s=CPU_HOST.nvlink_bytes_per_s,
    launch_s=20 * MICRO,
    nvlink_hop_s=18 * MICRO,  # 0.145 ms for 8 devices on 2 cores, whose threads wake one after the other
)
"""Virtual devices of one process, which exchange data through its memory: measured as those of ``CPU_HOST``."""

_DESCRIBED: WeakKeyDictionary[Any, Network] = WeakKeyDictionary()
"""Networks of described GPUs, each as long as any device of its topology lives."""


def describe_network(client: Any, network: Network) -> None:
    """Remembers what connects the devices of ``client``, which are described and not here.

    Nothing that JAX describes GPUs by has room for a network, and its devices take no attributes. But all devices of
    one topology have one client, which is no other topology's, and keep it alive: whatever meshes are made of them.
    """
    _DESCRIBED[client] = network


def described_network(client: Any) -> Network | None:
    """What ``describe_network`` remembers of ``client``; None for nothing."""
    return _DESCRIBED.get(client)
