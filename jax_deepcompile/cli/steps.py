"""Which step a command is about, how it is to run, and on which devices: said alike on every line."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile.api import shard
from jax_deepcompile.cli.folders import experiment_folders
from jax_deepcompile.costs.devices import as_if_here
from jax_deepcompile.lowering import targets
from jax_deepcompile.runtime.modules import named_by
from jax_deepcompile.runtime.progress import Progress
from jax_deepcompile.runtime.quiet import silenced, start_backends
from jax_deepcompile.step import ShardedStep
from jax_deepcompile.training.config import AtLeastOne, AtLeastOneOrNone, Experiment
from jax_deepcompile.training.find import load

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_DEFAULT_VIRTUAL_DEVICES = 8


@dataclass(frozen=True)
class Cluster:
    """GPUs that are not here; by default the devices of this process are used.

    Attributes:
      gpu: kind of GPU.
      nodes: machines.
      gpus_per_node: in each; eight, of gh200 four, where it is not said.
      nics_per_node: network cards in each; one a GPU where it is not said.
      nic_gbps: speed of each card.
    """

    gpu: Literal["h100", "h200", "gh200", "b200"] | None = None
    nodes: AtLeastOne = 1
    gpus_per_node: AtLeastOneOrNone = None
    nics_per_node: AtLeastOneOrNone = None
    nic_gbps: float = 400.0

    @property
    def mesh(self) -> Mesh | None:
        """All devices along one axis; None for those of this process."""
        if self.gpu is None:
            return None
        make: Callable[..., targets.Target] = getattr(targets, self.gpu)
        in_each = {} if self.gpus_per_node is None else {"gpus_per_node": self.gpus_per_node}
        target = make(self.nodes, **in_each, nics_per_node=self.nics_per_node, nic_gbps=self.nic_gbps)
        with silenced():
            return target.make_mesh((target.size,), ("fsdp",))


HERE = Cluster()


@dataclass(frozen=True)
class StepRequest:
    """A step, and how it is to run.

    Attributes:
      step: FILE.py:NAME or package.module:NAME of a function that returns (step, state, batch), shapes will do; or an
        experiment, or such a name of a config, as `deepcompile train` takes them.
      experiments: folder with experiments of yours.
      microbatches: parts of each batch.
      memory_limit: of each device, such as 72GiB or 0.9.
      host_memory_limit: of the host's memory for each device, such as 100GiB; 0 is none.
      cache_dir: where plans are kept between runs.
      devices: virtual CPU devices where there is no accelerator; 8 where it is not said.
      json: print one JSON document instead of text.
    """

    step: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STEP")]
    experiments: Path | None = None
    microbatches: AtLeastOne = 1
    memory_limit: str | None = None
    host_memory_limit: str | None = None
    cache_dir: Path | None = None
    devices: AtLeastOneOrNone = None
    json: tyro.conf.FlagCreatePairsOff[bool] = False


def use_virtual_devices(count: int | None) -> None:
    """Makes the CPU backend ``count`` devices, if JAX has not started and an accelerator is not what it finds.

    Without a count, a number the user has put in ``XLA_FLAGS`` stays, and else there will be eight.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    if count is None and any(flag.startswith(_DEVICE_COUNT_FLAG) for flag in flags):
        return
    kept = [flag for flag in flags if not flag.startswith(_DEVICE_COUNT_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{_DEVICE_COUNT_FLAG}={count or _DEFAULT_VIRTUAL_DEVICES}"])


def sharded_step(
    request: StepRequest, cluster: Cluster, progress: Progress, **options: Any
) -> tuple[ShardedStep, tuple]:
    """The step and its arguments. A step that is sharded already keeps what the request does not say otherwise."""
    use_virtual_devices(request.devices)
    progress.say("loading it")
    start_backends()
    mesh = cluster.mesh
    with as_if_here(mesh):
        step, args = load_step(request.step, request.experiments)
    if not isinstance(step, ShardedStep):
        step = shard(step)
    silent = StepRequest(request.step)
    for name in ("microbatches", "memory_limit", "host_memory_limit", "cache_dir"):
        if getattr(request, name) != getattr(silent, name):
            options[name] = getattr(request, name)
    progress.say("dividing it")
    return step.reshard(mesh, **options), args


def load_step(spec: str, own: Path | None = None) -> tuple[Any, tuple]:
    """``(step, arguments)`` of a specification; see ``StepRequest``.

    Args:
      spec: which step.
      own: a folder of the user's with experiments.

    Raises:
      StepSpecError: there is no such function, or it returns something else.
      ConfigError: there is no such experiment.
      MissingExtraError: it is an experiment, and what trains those is not installed.
    """
    try:
        named = named_by(spec) if ":" in spec else load(spec, experiment_folders(own))
    except errors.SpecError as error:
        raise errors.StepSpecError(spec, error.problem) from error
    if isinstance(named, Experiment):
        try:
            from jax_deepcompile.training.train import abstract_step
        except ModuleNotFoundError as error:
            raise errors.MissingExtraError("an experiment", error.name or "", "train") from error
        step, *args = abstract_step(named)
        return step, tuple(args)
    if not callable(named):
        raise errors.StepSpecError(spec, f"it is {type(named).__name__}, not a function")
    made = named()
    if not isinstance(made, tuple) or len(made) < 2 or not callable(made[0]):
        raise errors.StepSpecError(spec, f"it returned {type(made).__name__}, not (step, state, batch)")
    return made[0], made[1:]
