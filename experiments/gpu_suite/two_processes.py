"""Two processes that share one GPU train one Llama: the same losses three ways, and seconds a step side by side.

NCCL refuses two ranks on one GPU of one host; by ``NCCL_HOSTID`` each takes itself for a host of its own, and they talk
over the loopback interface. What that takes says nothing about a cluster; that it runs, and to the same losses, does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from experiments.gpu_suite import rank
from experiments.gpu_suite.cases import Row
from experiments.gpu_suite.processes import rows_of
from experiments.gpu_suite.sizes import PairSizes, Sizes


def cases(sizes: Sizes) -> list[Row]:
    return [{}]


def rows(case: Row, sizes: Sizes, seconds: float) -> Iterator[Row]:
    """What ``rank.rows`` yields in process 0, as far as the two got."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    arguments = [(index, port, sizes.pair) for index in range(2)]
    environments = [environment(index, sizes.pair) for index in range(2)]
    return rows_of(rank.rows, arguments, seconds, environments)


def environment(index: int, sizes: PairSizes) -> dict[str, str]:
    """What process ``index`` needs to share the GPU with the other."""
    # Sharded autotuning has each process wait for what the others tuned, and only process 0 compiles while it plans.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_shard_autotuning=false".strip()
    return {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(sizes.memory_fraction),
        "XLA_FLAGS": flags,
        "NCCL_HOSTID": f"host{index}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_DEBUG": "WARN",
    }
