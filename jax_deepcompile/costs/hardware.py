"""What GPUs and the networks between them can do: published peaks, and the part of them that programs attain.

Attained fractions are those of large, well-shaped operations; a measured profile replaces them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6


@dataclass(frozen=True)
class Hardware:
    """One GPU, or one host.

    Attributes:
      name: what it is called.
      matmul_flops_per_s: peak dense rate of matrix products by element type; ``f32`` is what JAX runs by default
        (TF32 on tensor cores), ``f32-highest`` is true float32.
      vector_flops_per_s: peak rate of float32 arithmetic outside matrix products.
      matmul_fraction: of the peak, attained by large matrix products.
      memory_bytes: device memory that a program may use.
      memory_bytes_per_s: peak bandwidth of the device memory.
      memory_fraction: of that, attained by streaming kernels.
      kernel_launch_s: from the end of one kernel to the start of the next.
      shortest_kernel_s: what a kernel takes that does almost nothing.
      to_host_bytes_per_s: attained copying from device to pinned host memory.
      from_host_bytes_per_s: attained copying from pinned host to device memory.
      cudnn_version: of the cuDNN that is assumed where the GPU is only described, as cuDNN counts: 9.10.0 is 91000.
    """

    name: str
    matmul_flops_per_s: Mapping[str, float] = field(hash=False)
    vector_flops_per_s: float
    matmul_fraction: float
    memory_bytes: int
    memory_bytes_per_s: float
    memory_fraction: float
    kernel_launch_s: float
    shortest_kernel_s: float
    to_host_bytes_per_s: float
    from_host_bytes_per_s: float
    cudnn_version: int = 0

    def matmul_rate(self, dtype: str) -> float:
        """Attained FLOP/s of a matrix product of elements of ``dtype``; the vector rate where it has no unit."""
        return self.matmul_fraction * self.matmul_flops_per_s.get(dtype, self.vector_flops_per_s)

    @property
    def memory_rate(self) -> float:
        """Attained bytes/s of the device memory."""
        return self.memory_fraction * self.memory_bytes_per_s


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
    # 450 GB/s each way (H100 data sheet), of which NCCL's tests reach 360 to 370 on a DGX H100 without NVLS; with it an
    # all-reduce has 476: https://github.com/NVIDIA/nccl-tests/issues/290
    nvlink_bytes_per_s: float = 360 * GIGA
    # LL128 protocol in NCCL's own model, github.com/NVIDIA/nccl src/graph/tuning.cc: baseLat and hwLat
    launch_s: float = 10.0 * MICRO
    nvlink_hop_s: float = 1.9 * MICRO
    nic_hop_s: float = 4.0 * MICRO

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

_HOPPER_FLOPS = {
    # H100 SXM data sheet, https://resources.nvidia.com/en-us-tensor-core; half of the figures "with sparsity"
    "bf16": 989.4 * TERA,
    "f16": 989.4 * TERA,
    "f32": 494.7 * TERA,
    "f32-highest": 66.9 * TERA,
    "f64": 66.9 * TERA,
    "s8": 1978.9 * TERA,
    "f8e4m3fn": 1978.9 * TERA,
    "f8e5m2": 1978.9 * TERA,
}

H100_SXM = Hardware(
    name="H100 SXM",
    matmul_flops_per_s=_HOPPER_FLOPS,
    vector_flops_per_s=66.9 * TERA,  # data sheet, FP32
    # 720 of 989 TFLOP/s for bf16 GEMMs of training, where the clock gives way at 700 W, less 3 % for their shapes:
    # https://semianalysis.com/2024/12/22/mi300x-vs-h100-vs-h200-benchmark-part-1-training
    matmul_fraction=0.70,
    memory_bytes=84_942_979_072,  # device_memory_size of lowering/gpus/h100_sxm.txtpb, as the driver reports it
    memory_bytes_per_s=3.35 * TERA,  # data sheet, HBM3
    memory_fraction=0.85,  # 84 % for coalesced loads: https://mikamirai.com/blog/gpu-memory-bandwidth
    # 3.8 us between short kernels of 2.9 us: https://developer.nvidia.com/blog/cuda-graphs
    kernel_launch_s=0.9 * MICRO,
    shortest_kernel_s=2.9 * MICRO,
    # PCIe 5 x16: 63 GB/s each way; bandwidthTest reaches 55 from pinned memory
    to_host_bytes_per_s=55 * GIGA,
    from_host_bytes_per_s=55 * GIGA,
    cudnn_version=91000,  # dnn_version of lowering/gpus/h100_sxm.txtpb, for which XLA compiles
)

H200_SXM = Hardware(
    name="H200 SXM",
    matmul_flops_per_s=_HOPPER_FLOPS,  # the same chip: https://www.nvidia.com/en-us/data-center/h200
    vector_flops_per_s=66.9 * TERA,
    matmul_fraction=0.70,  # these and the figures of kernels and copies: as of the H100, whose chip and board it has
    memory_bytes=151_397_597_184,  # device_memory_size of lowering/gpus/h200_sxm.txtpb
    memory_bytes_per_s=4.8 * TERA,  # data sheet, HBM3e
    memory_fraction=0.85,
    kernel_launch_s=0.9 * MICRO,
    shortest_kernel_s=2.9 * MICRO,
    to_host_bytes_per_s=55 * GIGA,
    from_host_bytes_per_s=55 * GIGA,
    cudnn_version=91000,  # dnn_version of lowering/gpus/h200_sxm.txtpb
)

CPU_HOST = Hardware(
    name="CPU host",
    # One core of a 3 GHz server CPU with two 512-bit FMA units: 3e9 * 2 * 2 * 16
    matmul_flops_per_s={"f32": 0.19 * TERA, "f32-highest": 0.19 * TERA, "bf16": 0.19 * TERA, "f64": 0.096 * TERA},
    vector_flops_per_s=0.19 * TERA,
    matmul_fraction=0.5,  # this and what follows but the bandwidth: assumed, for virtual devices that share a machine
    memory_bytes=16 * 2**30,
    memory_bytes_per_s=25.6 * GIGA,  # one channel of DDR4-3200: 3.2e9 transfers of 8 bytes
    memory_fraction=0.7,
    kernel_launch_s=1 * MICRO,
    shortest_kernel_s=1 * MICRO,
    to_host_bytes_per_s=10 * GIGA,
    from_host_bytes_per_s=10 * GIGA,
)
"""The machine that tests run on: its simulated seconds only rank programs, nothing was fitted to them."""

CPU_NETWORK = Network(nics_per_node=1, nic_gbps=80.0, nvlink_bytes_per_s=5 * GIGA, launch_s=20 * MICRO)
"""Virtual devices of one process, which exchange data through its memory; figures assumed, as those of ``CPU_HOST``."""
