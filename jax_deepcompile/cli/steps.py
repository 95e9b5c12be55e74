"""Which step a command is about, and what is printed of it."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jax_deepcompile import errors
from jax_deepcompile.api import shard
from jax_deepcompile.cli.folders import experiment_folders
from jax_deepcompile.cli.options import NOTHING_SAID, Cluster, Options
from jax_deepcompile.costs.devices import as_if_here
from jax_deepcompile.runtime.modules import named_by
from jax_deepcompile.runtime.progress import Progress
from jax_deepcompile.runtime.quiet import start_backends
from jax_deepcompile.step import ShardedStep
from jax_deepcompile.training.config import Experiment
from jax_deepcompile.training.find import load

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_DEFAULT_VIRTUAL_DEVICES = 8


@dataclass(frozen=True)
class StepRequest:
    """A step, how it is to run, and how that is told.

    Attributes:
      step: FILE.py:NAME or package.module:NAME of a function that returns (step, state, batch), shapes will do; or an
        experiment, or such a name of a config, as `deepcompile train` takes them.
      experiments: folder with experiments of yours.
      json: print one JSON document instead of text.
      out: file for that document, whatever is printed.
    """

    step: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STEP")]
    sharding: Options = NOTHING_SAID
    experiments: Path | None = None
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    out: Path | None = None

    def answer(self, document: Callable[[], Mapping[str, Any]], text: str) -> str:
        """What is printed: the ``document``, which is written where that was asked for, or the ``text``."""
        if not self.json and self.out is None:
            return text
        as_json = json.dumps(document(), allow_nan=False, indent=1)
        if self.out is not None:
            self.out.write_text(as_json)
        return as_json if self.json else text


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
    """The step and its arguments. A step that is sharded already keeps what the request does not say otherwise.

    Args:
      options: of ``shard``, instead of those of the request.
    """
    said = request.sharding.of_shard() | options
    use_virtual_devices(request.sharding.devices)
    progress.say("loading it")
    start_backends()
    mesh = cluster.mesh
    with as_if_here(mesh):
        step, args = load_step(request.step, request.experiments)
    if not isinstance(step, ShardedStep):
        step = shard(step)
    progress.say("dividing it")
    return step.reshard(mesh, **said), args


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
    signature = inspect.signature(named)
    try:
        signature.bind()
    except TypeError as error:
        raise errors.StepSpecError(spec, f"it takes {', '.join(signature.parameters)}") from error
    made = named()
    if not isinstance(made, tuple) or len(made) < 2 or not callable(made[0]):
        raise errors.StepSpecError(spec, f"it returned {type(made).__name__}, not (step, state, batch)")
    _require_arguments(spec, *made)
    return made[0], made[1:]


def _require_arguments(spec: str, step: Callable, *args: Any) -> None:
    """Makes sure that ``step`` can be called with ``args``, as far as its signature is known."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name = getattr(step, "__name__", type(step).__name__)
        returned = ", ".join([name, *(type(arg).__name__ for arg in args)])
        takes = ", ".join(signature.parameters)
        problem = f"it returned ({returned}), and {name} takes ({takes}): {error}. Return ({name}, {takes})"
        raise errors.StepSpecError(spec, problem) from error
