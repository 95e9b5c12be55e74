"""What a row of a benchmark trains, and on which GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax.sharding import Mesh

import jax_deepcompile as deepcompile
from jax_deepcompile.runtime.quiet import silenced, start_backends


@dataclasses.dataclass(frozen=True)
class Cluster:
    """GPUs that are not here.

    Attributes:
      gpu: ``h100`` or ``h200``.
      nodes: machines.
      gpus_per_node: GPUs in each.
      nics_per_node: network cards in each.
      nic_gbps: speed of each card, in Gbit/s.
      copies_take: of what copies between a GPU and its host are known to take, what they take here.
    """

    gpu: str = "h100"
    nodes: int = 4
    gpus_per_node: int = 8
    nics_per_node: int = 8
    nic_gbps: float = 400.0
    copies_take: float = 1.0

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def network(self) -> str:
        copies = f", copies take {self.copies_take:g}" * (self.copies_take != 1)
        return f"{self.nics_per_node} x {self.nic_gbps:g} Gb/s{copies}"

    def target(self) -> deepcompile.targets.Target:
        """The cluster to compile for."""
        make = getattr(deepcompile.targets, self.gpu)
        return make(self.nodes, self.gpus_per_node, nics_per_node=self.nics_per_node, nic_gbps=self.nic_gbps)

    def make_mesh(self, axes: Mapping[str, int] | None = None) -> Mesh:
        """All GPUs along ``axes``, by default along one "fsdp"."""
        axes = axes or {"fsdp": self.gpus}
        start_backends()
        with silenced():
            return self.target().make_mesh(tuple(axes.values()), tuple(axes))


@dataclasses.dataclass(frozen=True)
class Workload:
    """What one row trains.

    Attributes:
      model: a name in ``experiments.bench.steps.MODELS``.
      sequence: tokens an example.
      batch: examples a GPU and microbatch.
      microbatches: over which gradients are accumulated.
      cluster: the GPUs.
    """

    model: str
    sequence: int
    batch: int = 1
    microbatches: int = 1
    cluster: Cluster = Cluster()

    def __str__(self) -> str:
        return f"{self.model}, {self.sequence}, {self.batch}, {self.microbatches}"

    @property
    def tokens_per_gpu(self) -> int:
        """Trained in a step."""
        return self.sequence * self.batch * self.microbatches
