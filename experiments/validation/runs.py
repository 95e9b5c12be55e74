"""Training runs that others measured on H100s and H200s, with the settings that they published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from experiments.bench.workload import Cluster
from jax_deepcompile.costs.network import Network

_TOOLBOX = "NVIDIA/JAX-Toolbox docs/frameworks/maxtext/README.md (bcbbfa57), measured 2024-05-01"
_A3 = "AI-Hypercomputer/maxtext MaxText/configs/a3/llama_2_7b/README.md (efb6d9e4), 2024-04-12"
_A3_ULTRA = "AI-Hypercomputer/gpu-recipes training/a3ultra/llama3-1-70b/maxtext-pretraining-gke (2e1fd5ef)"
_MOSAIC = "mosaicml/llm-foundry scripts/train/benchmarking/README.md (b2a43a14), 2023-10-19"
_FMS = "foundation-model-stack/fms-fsdp README.md (5a296afe), 2024-05-09"


@dataclass(frozen=True)
class PublishedRun:
    """One run.

    Attributes:
      number: of the run on the page.
      model: a name in ``programs.MODELS``.
      how: ``jit``, GSPMD with the source's flags; ``prefetch``, PyTorch's FSDP, which is this package's fully sharded
        step with prefetching alone.
      cluster: the GPUs and their network.
      replicas: of the sharded state, between which gradients are summed (HSDP).
      sequence: tokens an example.
      batch: examples a GPU and microbatch.
      microbatches: over which gradients are accumulated.
      attention: the kernels, as ``published_rates`` calls them.
      measured_s: seconds a step.
      source: who published it.
      is_network_known: whether the source says what connects the nodes, or there is only one.
      nic_fraction: of the cards' speed, attained.
      is_compiled: whether a compiler fused its kernels, as XLA does in what is rebuilt.
      reason: what of the run is not rebuilt, or not known.
    """

    number: int
    model: str
    how: Literal["jit", "prefetch"]
    cluster: Cluster
    replicas: int
    sequence: int
    batch: int
    microbatches: int
    attention: Literal["cudnn", "fa2", "triton"]
    measured_s: float
    source: str
    is_network_known: bool = True
    nic_fraction: float = Network.nic_fraction
    is_compiled: bool = True
    reason: str = ""

    @property
    def tokens_per_gpu(self) -> int:
        """Trained in a step."""
        return self.sequence * self.batch * self.microbatches


def _toolbox(number: int, batch: int, measured_s: float) -> PublishedRun:
    cluster = Cluster(nodes=1)
    return PublishedRun(number, "llama2_7b_dots", "jit", cluster, 1, 4096, batch, 1, "cudnn", measured_s, _TOOLBOX)


def _a3(number: int, nodes: int, tflops: float) -> PublishedRun:
    """TFLOP/s as MaxText counted then: six for each parameter and token, and causal attention."""
    tokens = 4 * 4096
    flops = 6 * 6_738_415_616 * tokens + 6 * 32 * 4096 * 4096 * tokens
    cluster = Cluster(nodes=nodes, nics_per_node=4, nic_gbps=200)
    reason = "" if nodes == 1 else "GPUDirect-TCPX, with which two such nodes attained half of their cards' speed"
    return PublishedRun(
        number,
        "llama2_7b_dots_tf32",
        "jit",
        cluster,
        nodes,
        4096,
        4,
        1,
        "cudnn",
        flops / tflops / 1e12,
        _A3,
        nodes == 1,
        0.5,
        reason=reason,
    )


def _mosaic(number: int, model: str, gpus: int, batch: int, microbatches: int, tokens_per_s: float) -> PublishedRun:
    tokens = 2048 * batch * microbatches
    return PublishedRun(
        number,
        model,
        "prefetch",
        Cluster(nodes=gpus // 8),
        1,
        2048,
        batch,
        microbatches,
        "triton",
        tokens / tokens_per_s,
        _MOSAIC,
        gpus == 8,
        is_compiled=False,
        reason="kernels between products, and AdamW's, are not fused; gradients are reduced in float32",
    )


def _fms(number: int, model: str, replicas: int, tokens_per_s: float) -> PublishedRun:
    cluster, tokens = Cluster(nodes=12, nics_per_node=2), 2 * 4096
    return PublishedRun(number, model, "prefetch", cluster, replicas, 4096, 2, 1, "fa2", tokens / tokens_per_s, _FMS)


RUNS: tuple[PublishedRun, ...] = (
    _toolbox(1, 2, 0.721),
    _a3(2, 1, 492),
    _a3(3, 2, 422),
    _a3(4, 4, 407),
    _a3(5, 8, 409),
    _a3(6, 16, 375),
    PublishedRun(7, "llama3_70b_context", "jit", Cluster("h200", nodes=32), 2, 8192, 2, 1, "cudnn", 15.516, _A3_ULTRA),
    _mosaic(8, "mpt_70b", 32, 2, 16, 882),
    _mosaic(9, "mpt_70b", 64, 8, 4, 1039),
    _mosaic(10, "mpt_70b", 128, 8, 1, 1058),
    _mosaic(11, "mpt_70b", 256, 8, 1, 1035),
    _mosaic(13, "mpt_7b", 8, 6, 1, 10643),
    _mosaic(14, "mpt_7b", 128, 6, 1, 10475),
    _mosaic(15, "mpt_7b", 256, 6, 1, 10119),
    _mosaic(17, "mpt_13b", 8, 2, 1, 4792),
    _mosaic(18, "mpt_13b", 16, 2, 1, 4767),
    _mosaic(19, "mpt_13b", 32, 2, 1, 4811),
    _mosaic(20, "mpt_13b", 64, 2, 1, 4800),
    _mosaic(22, "mpt_30b", 16, 10, 3, 2263),
    _mosaic(23, "mpt_30b", 32, 14, 3, 2308),
    _fms(25, "llama2_7b", 12, 9600),
)
