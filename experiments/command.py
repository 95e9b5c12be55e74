"""``deepcompile train`` behind its parser: from words to an experiment, a folder and an exit code."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.config import Experiment, load, names
from experiments.settings import flatten, spell
from experiments.values import ConfigError


def run(
    name: str | None,
    *,
    overrides: Sequence[str] = (),
    files: Sequence[str] = (),
    steps: str | None = None,
    folder: Path | None = None,
    resume: bool = False,
    distributed: bool = False,
    list_only: bool = False,
) -> int:
    """Trains, or lists; returns the exit code, 2 after printing one line about a mistake of the user's."""
    try:
        if list_only:
            print(listing(name))
            return 0
        if name is None:
            raise ConfigError(f"say which experiment: {', '.join(names())}")
        experiment = configure(name, overrides=overrides, files=files, steps=steps)
        if folder is None:
            folder = new_folder(name, resume=resume, distributed=distributed)
        start(experiment, folder, resume=resume, distributed=distributed)
    except ConfigError as error:
        print(f"deepcompile: {error}", file=sys.stderr)
        return 2
    return 0


def configure(
    name: str, *, overrides: Sequence[str] = (), files: Sequence[str] = (), steps: str | None = None
) -> Experiment:
    """The experiment called ``name`` with all that the command line says about it."""
    assignments = [*overrides, f"train.steps={steps}"] if steps is not None else list(overrides)
    experiment = load(name, assignments)
    if files:  # not as an assignment, where a comma in a file's name would end it
        experiment = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, files=tuple(files)))
    return experiment


def listing(name: str | None) -> str:
    """The experiments with what they are, or the settings of one with their values."""
    if name is None:
        return "\n".join(f"{experiment:<16}{summary}" for experiment, summary in names().items())
    return "\n".join(f"{key}={spell(value)}" for key, value in flatten(load(name)).items())


def new_folder(name: str, *, resume: bool, distributed: bool) -> Path:
    """The output folder where none is given: one of its own for every run."""
    if resume:
        raise ConfigError("say which run to resume: --out DIR")
    if distributed:
        raise ConfigError("say where to write, the same place on every process: --out DIR")
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def start(experiment: Experiment, folder: Path, *, resume: bool, distributed: bool) -> None:
    """Brings JAX up and trains."""
    import jax

    from experiments.train import train

    if distributed:
        jax.distributed.initialize()
    train(experiment, folder, resume=resume)
