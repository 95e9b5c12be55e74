"""GPUs that are not here: devices to compile for, without any attached.

The CUDA plugin of JAX compiles for a described GPU (``jax.experimental.topologies``); executables cannot run here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jax_deepcompile import errors


@dataclass(frozen=True)
class Target:
    """A cluster of GPUs to compile for.

    Attributes:
      name: the kind of GPU.
      config: XLA's description of the GPU, a text ``GpuTargetConfigProto``.
      nodes: machines.
      gpus_per_node: GPUs in each.
    """

    name: str
    config: str
    nodes: int
    gpus_per_node: int

    @property
    def devices(self) -> Sequence[Any]:
        """The GPUs, node by node."""
        try:
            return topologies.get_topology_desc(
                topology_name=self.name,
                platform="cuda",
                target_config=self.config,
                topology=f"1x{self.nodes}x{self.gpus_per_node}",
            ).devices
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise errors.TargetUnavailableError(self.name, str(error)) from error

    def make_mesh(self, shape: Sequence[int], names: Sequence[str]) -> Mesh:
        """A mesh of all the GPUs, its minor axes within a node.

        Args:
          shape: size of each axis; their product is the number of GPUs.
          names: name of each axis.
        """
        count = self.nodes * self.gpus_per_node
        if math.prod(shape) != count:
            raise errors.MeshTooLargeError(dict(zip(names, shape, strict=True)), math.prod(shape), count, self.name)
        devices = np.array(self.devices).reshape(tuple(shape))
        return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(shape))


def h100(nodes: int = 1, gpus_per_node: int = 8) -> Target:
    """H100 SXM GPUs with 80 GB, as in a DGX H100."""
    config = resources.files("jax_deepcompile.lowering").joinpath("h100_sxm.txtpb").read_text()
    return Target("h100", config, nodes, gpus_per_node)
