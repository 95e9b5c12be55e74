"""The simulated benchmarks, by name: which workloads, on which systems."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from experiments.bench.simulated import Published, Simulated
from experiments.bench.systems import (
    ALL,
    ALL_24,
    ALL_32,
    ALL_60,
    ALL_64,
    ALL_FOR_400,
    ALL_FOR_KNOWN_COPIES,
    CONSTRAINED_EVERYTHING_AWAY,
    CONSTRAINED_MOMENTS_AWAY,
    FULLY_SHARDED,
    JIT,
    JIT_BY_HAND,
    JIT_CONSTRAINED,
    JIT_EVERYTHING_AWAY,
    JIT_FLAGS,
    JIT_MOMENTS_AWAY,
    ON_DEVICE,
    ON_DEVICE_64,
    PREFETCH,
    UNSHARD,
    Ours,
)
from experiments.bench.workload import Cluster, Workload

_EVERY_PASS = (JIT, JIT_FLAGS, JIT_CONSTRAINED, FULLY_SHARDED, PREFETCH, UNSHARD, ALL)

_HEADLINE = (
    Workload("llama3_70b", 512),
    Workload("llama3_70b", 1024),
    Workload("llama3_70b", 2048),
    Workload("llama3_70b", 1024, batch=4),
    Workload("llama3_70b", 1024, microbatches=16),
    Workload("mixtral_8x7b", 2048),
    Workload("mixtral_8x7b", 1024, microbatches=16),
    Workload("llama3_70b_cudnn", 512),
    Workload("llama3_70b_cudnn", 1024),
    Workload("llama3_70b_cudnn", 2048),
    Workload("llama3_70b_cudnn", 4096),
    Workload("llama3_70b_cudnn", 8192),
    Workload("llama3_70b_cudnn", 1024, microbatches=16),
    Workload("mixtral_8x7b_cudnn", 2048),
    Workload("mixtral_8x7b_cudnn", 4096),
)

_WITH_HOST_MEMORY = (
    Workload("llama3_70b", 1024, batch=4),
    Workload("llama3_70b_cudnn", 1024),
    Workload("llama3_70b_cudnn", 4096),
    Workload("llama3_70b_cudnn", 8192),
    Workload("llama3_70b_cudnn", 1024, microbatches=16),
)
"""Those of the headline whose plans have something on the host."""

_PUBLISHED = {
    Workload("llama3_70b", 512): Published(225, 215, 251),
    Workload("llama3_70b", 1024): Published(395, 371, 466),
    Workload("llama3_70b", 2048): Published(564, 522, 646),
    Workload("llama3_70b", 1024, batch=4): Published(729, 686, 837),
    Workload("llama3_70b", 1024, microbatches=16): Published(426, None, 547),
    Workload("mixtral_8x7b", 1024): Published(480, 570, 625),
    Workload("mixtral_8x7b", 2048): Published(923, 991, 1101),
    Workload("mixtral_8x7b", 2048, batch=4): Published(2318, 2335, 2479),
    Workload("mixtral_8x7b", 1024, microbatches=16): Published(508, None, 780),
}

_ONE_CARD = Cluster(nics_per_node=1)


def _paper(model: str) -> tuple[Workload, ...]:
    """The paper's settings on both networks: batch, sequence, then accumulation."""
    settings = [(sequence, batch, 1) for batch in (1, 2, 4) for sequence in (512, 1024, 2048)]
    settings += [(1024, 1, count) for count in (2, 4, 8, 16)]
    return tuple(
        Workload(model, sequence, batch, count, cluster)
        for cluster in (Cluster(), _ONE_CARD)
        for sequence, batch, count in settings
    )


def _planned_for_others(
    title: str, workloads: Sequence[Workload], clusters: Sequence[Cluster], ours: Ours
) -> Simulated:
    """``workloads`` on other ``clusters`` than ``ours`` plans for, beside plans for those."""
    rows = (dataclasses.replace(workload, cluster=cluster) for workload in workloads for cluster in clusters)
    return Simulated(title, tuple(rows), (JIT, ours, ALL))


def _grid() -> tuple[Workload, ...]:
    """Llama-3-70B, whose state eight H100s cannot hold: there it is the 8B model."""
    return tuple(
        Workload("llama3_8b" if nodes == 1 else "llama3_70b", sequence, 1, count, Cluster(nodes=nodes))
        for nodes in (1, 4, 32)
        for sequence in (512, 1024, 2048, 4096)
        for count in (1, 4, 16)
    )


_BY_MEMORY_KIND = (
    JIT_EVERYTHING_AWAY,
    JIT_MOMENTS_AWAY,
    CONSTRAINED_EVERYTHING_AWAY,
    CONSTRAINED_MOMENTS_AWAY,
    JIT,
    JIT_CONSTRAINED,
    ON_DEVICE,
    ALL,
)

_WHAT_IS_OFFLOADED = (
    "`everything offloaded`: the moments and all activations that layers name are in the host's memory, by "
    "memory kind and by JAX's checkpoint policy; moments are copied in when all gradients are ready. `moments "
    "by memory kind`: the moments alone, and XLA's scheduler begins their copies when it likes. `jit` and `all "
    "but host memory` copy nothing."
)

_NODES = (1, 2, 4, 8, 16, 32, 64, 128)
_GLOBAL_BATCH = 1024

BENCHMARKS: Mapping[str, Simulated] = {
    "smoke": Simulated(
        "One row, to see that all works", (Workload("llama3_8b", 512, cluster=Cluster(nodes=1)),), (JIT, ALL)
    ),
    "headline": Simulated(
        "Llama-3-70B and Mixtral-8x7B on 32 H100s",
        _HEADLINE,
        (JIT, JIT_FLAGS, JIT_BY_HAND, JIT_CONSTRAINED, FULLY_SHARDED, ALL),
        published=_PUBLISHED,
    ),
    "memory": Simulated(
        "Activations and moments on the host, and what is computed again",
        (
            Workload("llama3_70b_cudnn", 8192),
            Workload("llama3_70b_cudnn", 16384),
            Workload("llama3_70b_cudnn", 4096),
            Workload("llama3_70b", 1024, batch=4),
            Workload("llama3_70b_cudnn", 512),
            Workload("llama3_70b", 1024, microbatches=16),
            Workload("llama3_70b_cudnn", 1024, microbatches=16),
            Workload("llama2_7b_cudnn_saved", 4096, batch=2, cluster=Cluster(nodes=1)),
            Workload("llama2_7b_cudnn_saved_unrolled", 4096, batch=2, cluster=Cluster(nodes=1)),
            Workload("llama3_70b_cudnn", 2048, microbatches=4, cluster=Cluster(nodes=2)),
            Workload("llama3_70b_cudnn", 2048, microbatches=8, cluster=Cluster(nodes=1)),
        ),
        (JIT, ON_DEVICE, ALL),
    ),
    "offload": Simulated(
        "Llama-3-70B on 16 H100s, where state and activations are on the host",
        tuple(Workload("llama3_70b_cudnn", sequence, cluster=Cluster(nodes=2)) for sequence in (512, 1024, 2048, 4096)),
        (*_BY_MEMORY_KIND, ON_DEVICE_64, ALL_64, ALL_60),
        notes=(
            _WHAT_IS_OFFLOADED,
            "The DeepCompile paper measured its offload of optimizer state on 16 H100s with Llama-3-70B and sequences "
            "of 512 to 4096 tokens against ZeRO-3's offload, which updates on the host: 5.3 to 7.0 times as fast.",
        ),
    ),
    "offload_qwen3_14b": Simulated(
        "A Llama of Qwen3-14B's sizes on 8 H200s, where state and activations are on the host",
        (Workload("qwen3_14b_cudnn", 2048, batch=4, cluster=Cluster("h200", nodes=1)),),
        (*_BY_MEMORY_KIND, ALL_32, ALL_24),
        notes=(
            _WHAT_IS_OFFLOADED,
            "DeepSpeed measured its DeepCompile with Qwen3-14B on 8 H200s, 4 x 2048 tokens a GPU (DeepSpeed pull "
            "request 8186): 1.82 s without offload, 2.01 s with planned offload of optimizer state, 10.11 s with "
            "ZeRO-Offload. This model has no norms of queries and keys, and its "
            "layers are rematerialised.",
        ),
    ),
    "offload_one_h100": Simulated(
        "Llama-3-8B on one H100, where state and activations are on the host",
        tuple(
            Workload(model, 2048, batch, cluster=Cluster(nodes=1, gpus_per_node=1, nics_per_node=1))
            for model in ("llama3_8b_cudnn", "llama3_8b_cudnn_unclipped")
            for batch in (1, 4, 16)
        ),
        (JIT_EVERYTHING_AWAY, JIT_MOMENTS_AWAY, JIT, ALL),
        notes=(
            _WHAT_IS_OFFLOADED,
            "Parameters and two moments in float32 are 90 GiB, gradients 30 more: without the host's memory no row "
            "fits. All is copied over one GPU's PCIe. Unclipped, with no norm of all gradients before the update, a "
            "layer is updated as soon as its own are there; clipped, in a second run of the backward pass where that "
            "takes less time than copies after the first.",
        ),
    ),
    "sensitivity": _planned_for_others(
        "The headline's plans on networks 20 % slower and 25 % faster than they were made for",
        _HEADLINE,
        (Cluster(nic_gbps=320.0), Cluster(nic_gbps=500.0)),
        ALL_FOR_400,
    ),
    "sensitivity_copies": _planned_for_others(
        "The headline's plans that use the host's memory, where copies take 25 % longer and 20 % less than they were "
        "made for",
        _WITH_HOST_MEMORY,
        (Cluster(copies_take=1.25), Cluster(copies_take=0.8)),
        ALL_FOR_KNOWN_COPIES,
    ),
    "paper_llama3_70b": Simulated(
        "Llama-3-70B in the settings of the DeepCompile paper", _paper("llama3_70b"), _EVERY_PASS, published=_PUBLISHED
    ),
    "paper_mixtral_8x7b": Simulated(
        "Mixtral-8x7B in the settings of the DeepCompile paper",
        _paper("mixtral_8x7b"),
        _EVERY_PASS,
        published=_PUBLISHED,
    ),
    "grid": Simulated("Llama-3 by GPUs, sequence and accumulation", _grid(), _EVERY_PASS),
    "unrolled": Simulated(
        "Eight layers of Llama-3-8B, written one by one and not rematerialised",
        tuple(
            Workload("llama3_8b_8_unrolled", sequence, 1, count, Cluster(nodes=nodes))
            for nodes in (1, 4)
            for sequence, count in ((512, 1), (1024, 1), (2048, 1), (1024, 4))
        ),
        (JIT, JIT_FLAGS, JIT_CONSTRAINED, FULLY_SHARDED, ALL),
    ),
    "weak_scaling": Simulated(
        "Llama-3-70B, one example of 2048 tokens a GPU",
        tuple(Workload("llama3_70b", 2048, cluster=Cluster(nodes=nodes)) for nodes in _NODES),
        (JIT, JIT_FLAGS, JIT_CONSTRAINED, ALL),
    ),
    "strong_scaling": Simulated(
        f"Llama-3-70B, {_GLOBAL_BATCH} examples of 2048 tokens a step",
        tuple(Workload("llama3_70b", 2048, 1, _GLOBAL_BATCH // (8 * nodes), Cluster(nodes=nodes)) for nodes in _NODES),
        (JIT, JIT_FLAGS, JIT_CONSTRAINED, ALL),
    ),
}
