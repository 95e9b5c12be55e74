"""What kernels, collectives and copies take from each other while they run side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Overlap:
    """Constants of one GPU and its host, each a physical thing. The defaults take nothing.

    Attributes:
      sustained: of the rate at which a matrix product runs alone, as tables have it, what it keeps among the kernels of
        a training step, where the GPU's power limit holds its clock down and caches hold other things.
      collective_sms: the share of the GPU's multiprocessors that a collective holds while it runs.
      collective_traffic: bytes read and written in device memory for each byte that a GPU sends.
      copy_traffic: likewise for each byte copied between device and host.
      both_ways: of its rate alone, what a copy between device and host keeps while one the other way runs.
      host_bytes_per_s: of a node's host memory, attained, which the copies of all its GPUs share.
    """

    sustained: float = 1.0
    collective_sms: float = 0.0
    collective_traffic: float = 0.0
    copy_traffic: float = 0.0
    both_ways: float = 1.0
    host_bytes_per_s: float = float("inf")


NOTHING_TAKEN = Overlap()

GPU = Overlap(
    # Fitted to the compiled runs of `deepcompile bench validation`, which also leaves each of them out in turn
    sustained=0.735,
    # NCCL keeps about 20 of 132 busy; it launches 16 blocks between nodes and 24 within one, each of which has one to
    # itself: https://github.com/NVIDIA/nccl/issues/1432, /1453, /689
    collective_sms=20 / 132,
    # 2 to 3 times what is sent, for it is stored, read again and copied to where it belongs:
    # https://github.com/NVIDIA/nccl/issues/1428
    collective_traffic=2.5,
    copy_traffic=1.0,  # each byte is read once, or written once
    # On A100s a copy to the device keeps a half, one to the host all; nobody published it of a later GPU:
    # https://github.com/NVIDIA/nvbandwidth/issues/11, /53
    both_ways=0.75,
    # Two sockets of eight channels of DDR5-4800, 614 GB/s, of which four fifths are assumed:
    # https://www.ai-hpc.org/en/guide/02-cluster/stream-benchmark. The hosts of H200s have the same CPUs:
    # https://docs.nvidia.com/dgx-basepod/reference-architecture-infrastructure-foundation-enterprise-ai/latest
    host_bytes_per_s=490e9,
)

B200 = replace(
    GPU,
    # Two Xeon 8570 with 32 modules of DDR5 (https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html),
    # which two in a channel slow down to 4400 (of the generation before: https://www.wwt.com/article/
    # memory-population-guidelines-for-intel-4th-gen-xeon-scalable-processors); of 563 GB/s four fifths
    host_bytes_per_s=450e9,
)

GH200 = replace(
    GPU,
    # A GB300's two directions of NVLink-C2C have a half each: stas00/ml-engineering compute/accelerator
    both_ways=0.5,
    # STREAM 486 GB/s on each of a node's four CPUs: https://arxiv.org/abs/2407.07850
    host_bytes_per_s=4 * 486e9,
)

_OF = {"CPU host": NOTHING_TAKEN, "H100 SXM": GPU, "H200 SXM": GPU, "GH200": GH200, "B200 SXM": B200}


def overlap_of(hardware_name: str) -> Overlap:
    """The constants of a device; virtual CPU devices share all they have, and take nothing beside that."""
    return _OF.get(hardware_name, GPU)


@dataclass(frozen=True)
class Taken:
    """What an operation beside the kernels takes from them.

    Attributes:
      sms: the share of the multiprocessors.
      memory: the share of the device memory's bandwidth.
    """

    sms: float = 0.0
    memory: float = 0.0

    def slowdown(self, is_memory_bound: bool) -> float:
        """How many times longer a kernel takes."""
        return 1 / (1 - min(self.memory if is_memory_bound else self.sms, _MOST))

    def __add__(self, other: Taken) -> Taken:
        return Taken(self.sms + other.sms, self.memory + other.memory)

    @property
    def least(self) -> float:
        """The share of its time by which kernels are delayed that are hurt least."""
        return min(self.sms, self.memory, _MOST)


NONE = Taken()

_MOST = 0.9
"""A share that nothing takes more of: what runs beside it would not run at all."""
