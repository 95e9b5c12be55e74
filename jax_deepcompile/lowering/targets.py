"""GPUs that are not here: clusters to plan and compile for, without any GPU attached.

The CUDA plugin of JAX compiles for a described GPU (``jax.experimental.topologies``); executables cannot run here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import cuda_topology_devices
from jax_deepcompile.costs.hardware import HARDWARE, Hardware
from jax_deepcompile.costs.network import Network, describe_network
from jax_deepcompile.costs.overlap import Overlap, overlap_of
from jax_deepcompile.lowering import cuda_compiler
from jax_deepcompile.summary import Summarized, Summary, size_text


@dataclass(frozen=True, repr=False)
class Target(Summarized):
    """A cluster of GPUs to compile for.

    Attributes:
      name: the kind of GPU.
      config: XLA's description of the GPU, a text ``GpuTargetConfigProto``.
      nodes: machines.
      hardware: what one GPU can do.
      network: what connects the GPUs; ``network.gpus_per_node`` are in each machine.
    """

    name: str
    config: str
    nodes: int
    hardware: Hardware
    network: Network

    def _summary(self) -> Summary:
        network, hardware = self.network, self.hardware
        rows = (
            ("GPUs", f"{self.nodes} nodes of {network.gpus_per_node} {hardware.name}"),
            ("memory", f"{size_text(hardware.memory_bytes)} a GPU"),
            ("network", f"{network.nics_per_node} cards of {network.nic_gbps:g} Gbit/s a node"),
            ("use", "shard(step, target), or make_mesh(shape, names)"),
        )
        return Summary(f"Target {self.name}", rows)

    @property
    def overlap(self) -> Overlap:
        """What kernels, collectives and copies are taken to cost each other."""
        return overlap_of(self.hardware.name)

    @property
    def size(self) -> int:
        """How many GPUs there are."""
        return self.nodes * self.network.gpus_per_node

    @property
    def devices(self) -> Sequence[Any]:
        """The GPUs, node by node. What is simulated on them knows their network.

        Raises:
          TargetUnavailableError: JAX's CUDA compiler plugin is not installed, or does not start.
        """
        topology = f"1x{self.nodes}x{self.network.gpus_per_node}"
        try:
            devices = cuda_topology_devices(self.name, self.config, topology, cuda_compiler.folder())
        except (ImportError, RuntimeError, NotImplementedError, ValueError) as error:
            raise errors.TargetUnavailableError(self.name, str(error)) from error
        describe_network(devices[0].client, self.network)
        return devices

    def make_mesh(self, shape: Sequence[int], names: Sequence[str]) -> Mesh:
        """A mesh of all the GPUs, its minor axes within a node.

        Args:
          shape: size of each axis; their product is the number of GPUs.
          names: name of each axis.

        Raises:
          ArgumentError: these are no sizes, or not as many names.
          TargetMeshError: the axes ask for another number of GPUs than there are.
          TargetUnavailableError: see ``devices``.
        """
        if not _are(shape, lambda size: isinstance(size, int) and size > 0):
            raise errors.ArgumentError("make_mesh", "shape", shape, f"a tuple of axis sizes such as ({self.size},)")
        if not _are(names, lambda name: isinstance(name, str)) or len(names) != len(shape):
            expected = f"a tuple of {len(shape)} axis names, one for each size in {tuple(shape)}"
            raise errors.ArgumentError("make_mesh", "names", names, expected)
        if math.prod(shape) != self.size:
            axes = dict(zip(names, shape, strict=True))
            raise errors.TargetMeshError(self.name, axes, math.prod(shape), self.size)
        devices = np.array(self.devices).reshape(tuple(shape))
        return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(shape))


def _are(values: object, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(map(is_one, values))


def h100(
    nodes: int = 1, gpus_per_node: int = 8, *, nics_per_node: int | None = None, nic_gbps: float = 400.0
) -> Target:
    """H100 SXM GPUs with 80 GB, as in a DGX H100.

    Args:
      nodes: machines.
      gpus_per_node: GPUs in each, connected by NVLink.
      nics_per_node: network cards in each; by default one a GPU.
      nic_gbps: speed of each card, in Gbit/s each way.

    Raises:
      TargetError: a figure that no cluster has.
    """
    return _target("h100", nodes, gpus_per_node, nics_per_node, nic_gbps)


def h200(
    nodes: int = 1, gpus_per_node: int = 8, *, nics_per_node: int | None = None, nic_gbps: float = 400.0
) -> Target:
    """H200 SXM GPUs with 141 GB, as in a DGX H200; arguments as of ``h100``."""
    return _target("h200", nodes, gpus_per_node, nics_per_node, nic_gbps)


def gh200(
    nodes: int = 1, gpus_per_node: int = 4, *, nics_per_node: int | None = None, nic_gbps: float = 400.0
) -> Target:
    """GH200 superchips with 96 GB of HBM3, whose hosts' memory is at the other end of NVLink-C2C; as of ``h100``."""
    return _target("gh200", nodes, gpus_per_node, nics_per_node, nic_gbps)


def b200(
    nodes: int = 1, gpus_per_node: int = 8, *, nics_per_node: int | None = None, nic_gbps: float = 400.0
) -> Target:
    """B200 SXM GPUs with 180 GB, as in a DGX B200; arguments as of ``h100``."""
    return _target("b200", nodes, gpus_per_node, nics_per_node, nic_gbps)


def _target(name: str, nodes: int, gpus_per_node: int, nics_per_node: int | None, nic_gbps: float) -> Target:
    cards = gpus_per_node if nics_per_node is None else nics_per_node
    counts = {"nodes": nodes, "gpus_per_node": gpus_per_node, "nics_per_node": cards}
    for field, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise errors.TargetError(name, field, value, "a whole number, at least 1")
    if not (isinstance(nic_gbps, int | float) and 0 < nic_gbps < math.inf):
        raise errors.TargetError(name, "nic_gbps", nic_gbps, "a speed in Gbit/s, more than 0")
    config = resources.files("jax_deepcompile.lowering").joinpath("gpus", f"{name}_sxm.txtpb").read_text()
    hardware = HARDWARE[name]
    network = Network(gpus_per_node, cards, float(nic_gbps), nvlink_bytes_per_s=hardware.nvlink_bytes_per_s)
    return Target(name, config, nodes, hardware, network)
