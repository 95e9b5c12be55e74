"""What GPUs can do: published peaks, and the part of them that programs attain.

Attained fractions are those of large, well-shaped operations; a measured profile replaces them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

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
      host_bytes: memory of the host, for each GPU of a node.
      nvlink_bytes_per_s: bus bandwidth that collectives attain within a node, as NCCL's tests count it.
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
    nvlink_bytes_per_s: float
    host_bytes: int = 0
    cudnn_version: int = 0

    def matmul_rate(self, dtype: str) -> float:
        """Attained FLOP/s of a matrix product of elements of ``dtype``; the vector rate where it has no unit."""
        return self.matmul_fraction * self.matmul_flops_per_s.get(dtype, self.vector_flops_per_s)

    @property
    def memory_rate(self) -> float:
        """Attained bytes/s of the device memory."""
        return self.memory_fraction * self.memory_bytes_per_s


H100_SXM = Hardware(
    name="H100 SXM",
    matmul_flops_per_s={
        # H100 SXM data sheet, https://resources.nvidia.com/en-us-tensor-core; half of the figures "with sparsity"
        "bf16": 989.4 * TERA,
        "f16": 989.4 * TERA,
        "f32": 494.7 * TERA,
        "f32-highest": 66.9 * TERA,
        "f64": 66.9 * TERA,
        "s8": 1978.9 * TERA,
        "f8e4m3fn": 1978.9 * TERA,
        "f8e5m2": 1978.9 * TERA,
    },
    vector_flops_per_s=66.9 * TERA,  # data sheet, FP32
    # 720 of 989 TFLOP/s for bf16 GEMMs of training, where the clock gives way at 700 W, less 3 % for their shapes:
    # https://semianalysis.com/2024/12/22/mi300x-vs-h100-vs-h200-benchmark-part-1-training
    matmul_fraction=0.70,
    memory_bytes=84_942_979_072,  # device_memory_size of lowering/gpus/h100_sxm.txtpb, as the driver reports it
    memory_bytes_per_s=3.35 * TERA,  # data sheet, HBM3
    # BabelStream: copy 2.90, triad 2.97, dot 3.18 TB/s: https://github.com/Azure/AI-benchmarking-guide
    memory_fraction=0.87,
    # 3.8 us between short kernels of 2.9 us: https://developer.nvidia.com/blog/cuda-graphs
    kernel_launch_s=0.9 * MICRO,
    shortest_kernel_s=2.9 * MICRO,
    # PCIe 5 x16: 63 GB/s each way; bandwidthTest reaches 55 from pinned memory
    to_host_bytes_per_s=55 * GIGA,
    from_host_bytes_per_s=55 * GIGA,
    # 450 GB/s each way (data sheet), of which NCCL's tests reach 360 to 370 on a DGX H100 without NVLS; with it an
    # all-reduce has 476: https://github.com/NVIDIA/nccl-tests/issues/290
    nvlink_bytes_per_s=360 * GIGA,
    # A DGX H100 has 2 TB for eight: https://resources.nvidia.com/en-us-dgx-systems/ai-enterprise-dgx
    host_bytes=250_000_000_000,
    cudnn_version=91000,  # dnn_version_info of lowering/gpus/h100_sxm.txtpb, for which XLA compiles
)

H200_SXM = replace(
    H100_SXM,  # whose chip and board it has: https://www.nvidia.com/en-us/data-center/h200
    name="H200 SXM",
    memory_bytes=151_397_597_184,  # device_memory_size of lowering/gpus/h200_sxm.txtpb
    memory_bytes_per_s=4.8 * TERA,  # data sheet, HBM3e
    memory_fraction=0.85,  # the same benchmark: copy 4.01, triad 4.15, dot 4.48 TB/s
)

GH200 = replace(
    H100_SXM,  # whose chip it has
    name="GH200",
    memory_bytes=96_000_000_000,  # device_memory_size of lowering/gpus/gh200_sxm.txtpb: 96 GB HBM3
    memory_bytes_per_s=4.0 * TERA,  # data sheet, https://www.nvidia.com/en-us/data-center/grace-hopper-superchip
    # STREAM 3.4 TB/s, copies over NVLink-C2C 297 GB/s to the host's LPDDR5X and 375 from it: Schieffer et al. 2024,
    # Harnessing Integrated CPU-GPU System Memory for HPC, https://arxiv.org/abs/2407.07850
    memory_fraction=0.85,
    to_host_bytes_per_s=297 * GIGA,
    from_host_bytes_per_s=375 * GIGA,
    host_bytes=480_000_000_000,  # LPDDR5X, the data sheet
)

B200_SXM = Hardware(
    name="B200 SXM",
    # As in an HGX B200, at 1000 W, without sparsity: https://glennklockwood.com/garden/processors/B200
    matmul_flops_per_s={
        "bf16": 2250 * TERA,
        "f16": 2250 * TERA,
        "f32": 1100 * TERA,
        "f32-highest": 80 * TERA,
        "f64": 40 * TERA,
        "s8": 4500 * TERA,
        "f8e4m3fn": 4500 * TERA,
        "f8e5m2": 4500 * TERA,
    },
    vector_flops_per_s=80 * TERA,  # the same page, FP32
    # The H100's 70 % times what the best matrix product attains on each, 77.6 % and 80.3 %: stas00/ml-engineering
    # insights/when-to-upgrade-gpus/README.md
    matmul_fraction=0.68,
    memory_bytes=191_514_411_008,  # device_memory_size of lowering/gpus/b200_sxm.txtpb
    memory_bytes_per_s=7.672 * TERA,  # 7680 bits at 2 x 3996 MHz: https://github.com/pytorch/ao/pull/4002
    memory_fraction=0.80,  # copies within the device exceed 6 TB/s: https://www.newmind.ai/journal/18
    kernel_launch_s=0.9 * MICRO,  # this and the shortest kernel: as of the H100, for want of figures
    shortest_kernel_s=2.9 * MICRO,
    # As of the H100: the CPUs of a DGX B200 have PCIe 5
    to_host_bytes_per_s=55 * GIGA,
    from_host_bytes_per_s=55 * GIGA,
    # 97 % of the 722 GB/s in NCCL's own model, as an H100 of its 371: https://github.com/NVIDIA/nccl/issues/1807
    nvlink_bytes_per_s=700 * GIGA,
    host_bytes=250_000_000_000,  # a DGX B200 has at least 2 TB for eight: its data sheet
    cudnn_version=90700,  # dnn_version_info of lowering/gpus/b200_sxm.txtpb
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
    # Of each of 8 devices on 2 cores, all at once: copies within the memory that they share, and collectives of 512 KiB
    to_host_bytes_per_s=1.1 * GIGA,
    from_host_bytes_per_s=1.1 * GIGA,
    nvlink_bytes_per_s=1.6 * GIGA,
)
"""The machine that tests run on: its simulated seconds only rank programs."""

HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {"cpu": CPU_HOST, "h100": H100_SXM, "h200": H200_SXM, "gh200": GH200, "b200": B200_SXM}
)
"""What is known, by a word of what JAX calls the kind of device, such as ``NVIDIA H100 80GB HBM3``."""


def known_hardware(device_kind: str) -> Hardware | None:
    """The entry for a device; None if there is none. A ``GH200`` is no ``H200``."""
    return next((HARDWARE[word] for word in device_kind.lower().split() if word in HARDWARE), None)
