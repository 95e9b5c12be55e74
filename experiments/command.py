"""``deepcompile train`` behind its parser: from words to an experiment, a folder and an exit code."""

import dataclasses
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.config import Experiment, load, names
from experiments.settings import flatten, spell
from experiments.values import ConfigError

if TYPE_CHECKING:
    from experiments.stopping import Watch

# Coordinator's address, number of processes, index of this one; None is for JAX to find out.
Cluster = tuple[str | None, int | None, int | None]


def run(
    name: str | None,
    *,
    overrides: Sequence[str] = (),
    files: Sequence[str] = (),
    steps: str | None = None,
    folder: Path | None = None,
    resume: bool = False,
    cluster: Cluster | None = None,
    list_only: bool = False,
    watch: "Watch | None" = None,
) -> int:
    """Trains, or lists.

    Returns:
        The exit code: 2 after printing one line about a mistake of the user's, 128 and the signal's number (130 for
        Ctrl-C, 143 for SIGTERM) after a run that was asked to stop.
    """
    try:
        if list_only:
            print(listing(name))
            return 0
        if name is None:
            raise ConfigError(f"say which experiment: {', '.join(names())}")
        experiment = configure(name, overrides=overrides, files=files, steps=steps)
        if folder is None:
            folder = new_folder(name, resume=resume, is_shared=cluster is not None)
        return start(experiment, folder, resume=resume, cluster=cluster, watch=watch)
    except ConfigError as error:
        print(f"deepcompile: {error}", file=sys.stderr)
        return 2


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


def new_folder(name: str, *, resume: bool, is_shared: bool) -> Path:
    """The output folder where none is given: one of its own for every run."""
    if resume:
        raise ConfigError("say which run to resume: --out DIR")
    if is_shared:
        raise ConfigError("say where to write, the same place on every process: --out DIR")
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def start(experiment: Experiment, folder: Path, *, resume: bool, cluster: Cluster | None, watch: "Watch | None") -> int:
    """Brings JAX up, with the other processes where there are any, and trains; returns the exit code."""
    import jax

    from experiments.train import train

    if cluster is not None:
        try:
            jax.distributed.initialize(*cluster)
        except ValueError as error:
            raise ConfigError(f"cannot join the other processes: {error}") from error
    summary = train(experiment, folder, resume=resume, watch=watch)
    return 0 if summary.stopped_by is None else 128 + signal.Signals[summary.stopped_by]
