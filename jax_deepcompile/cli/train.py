"""``deepcompile train``: from the words of the line to an exit code."""

import dataclasses
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jax_deepcompile import errors
from jax_deepcompile.cli.options import NOTHING_SAID, Options
from jax_deepcompile.cli.steps import use_virtual_devices
from jax_deepcompile.runtime.interrupts import Watch, exit_code
from jax_deepcompile.runtime.progress import Progress
from jax_deepcompile.training.config import (
    REGISTRY,
    AtLeastOneOrNone,
    ConfigError,
    Experiment,
    settings,
)
from jax_deepcompile.training.find import load, names

_SPEC = re.compile(r"(?!-)[^:]+:[^\W\d]\w*")
"""``FILE.py:NAME`` or ``package.module:NAME``; not ``HOST:PORT``."""

_USAGE = """usage: deepcompile train NAME [options]; deepcompile train NAME --help says which. NAME is an experiment, or
FILE.py:NAME or package.module:NAME of a config of yours. --list names the experiments, --list NAME shows the settings
of one; --experiments DIR adds those in a folder of yours. There are:
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """Trains an experiment's model.

    Ctrl-C and SIGTERM stop the run after the step under way, and save it for --resume; a second one ends it at once.

    Attributes:
        experiment: what to train, and how.
        sharding: of the step, as every command takes it.
        out: output folder; a new one in runs/ where it is not said.
        resume: continue the run in the output folder.
        distributed: join the other processes, of which each reads its own rows of every batch; Slurm, MPI, Kubernetes
            and TPUs say how.
        coordinator: HOST:PORT where process 0 listens, if nothing says it.
        processes: how many there are.
        process: which this is, from 0.
    """

    experiment: Annotated[Experiment, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    sharding: Annotated[Options, tyro.conf.arg(name="")] = NOTHING_SAID
    out: Path | None = None
    resume: bool = False
    distributed: bool = False
    coordinator: str | None = None
    processes: AtLeastOneOrNone = None
    process: int | None = None

    @property
    def is_shared(self) -> bool:
        """Whether other processes take part."""
        return self.distributed or any(part is not None for part in self.cluster)

    @property
    def cluster(self) -> tuple[str | None, int | None, int | None]:
        """What JAX is told of the other processes; it finds out what is None."""
        return self.coordinator, self.processes, self.process


def train(words: Sequence[str], folders: Sequence[Path] = (), watch: Watch | None = None) -> int:
    """Trains, or lists.

    Args:
        words: of the command line.
        folders: where experiments are.
        watch: who ends the process where a signal is not answered in time.

    Returns:
        The exit code: 2 after printing one line about a mistake of the user's, 128 and the signal's number (130 for
        Ctrl-C, 143 for SIGTERM) after a run that was asked to stop.

    Raises:
        SystemExit: help was asked for (0), or an option is wrong (2).
    """
    try:
        known = names(folders)
        name = next(iter([*filter(known.__contains__, words), *filter(_SPEC.fullmatch, words), *words]), None)
        if "--list" in words:
            print(listing(folders, *(word for word in words if word != "--list")))
            return 0
        if name in ("-h", "--help"):
            print(_USAGE + listing(folders))
            return 0
        if name is None or name.startswith("-"):
            raise ConfigError(f"say which experiment: {', '.join([*known, 'FILE.py:NAME or package.module:NAME'])}")
        place = list(words).index(name)
        run = parse(name, [*words[:place], *words[place + 1 :]], folders)
        return start(run, run.out or new_folder(name, run), watch)
    except (ConfigError, errors.SpecError) as error:
        print(f"deepcompile: {error}", file=sys.stderr)
        return 2


def parse(name: str, words: Sequence[str], folders: Sequence[Path] = ()) -> Run:
    """The experiment called ``name`` with all that the command line says about it."""
    prog = f"deepcompile train {name}"
    try:
        return tyro.cli(
            Run,
            default=Run(load(name, folders)),
            args=words,
            prog=prog,
            registry=REGISTRY,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except ValueError as error:  # from a config's __post_init__
        raise ConfigError(str(error)) from error


def listing(folders: Sequence[Path], *chosen: str) -> str:
    """The experiments, or the settings of one as options, with values, what may be given, and what they mean."""
    if not chosen:
        return "\n".join(f"{experiment:<16}{summary}" for experiment, summary in names(folders).items())
    rows = [(f"{each.option} {each.value}", each.kind, each.meaning) for each in settings(load(chosen[0], folders))]
    width, kinds = (min(max(len(row[column]) for row in rows), 40) for column in (0, 1))
    return "\n".join(f"{said:<{width}}  {kind:<{kinds}}  {meaning}".rstrip() for said, kind, meaning in rows)


def new_folder(name: str, run: Run) -> Path:
    """The output folder where none is given: one of its own for every run."""
    if run.resume:
        raise ConfigError("say which run to resume: --out DIR")
    if run.is_shared:
        raise ConfigError("say where to write, the same place on every process: --out DIR")
    return Path("runs") / f"{name.rpartition(':')[2]}-{time.strftime('%Y%m%d-%H%M%S')}"


def start(run: Run, folder: Path, watch: Watch | None) -> int:
    """Brings JAX up, with the other processes where there are any, and trains; returns the exit code."""
    use_virtual_devices(run.sharding.devices)
    try:
        options = run.sharding.of_shard()
    except (OSError, errors.PlanError, errors.ProfileFormatError) as error:
        raise ConfigError(str(error)) from error
    with Progress("loading JAX"):
        import jax

        from jax_deepcompile.runtime.quiet import start_backends
        from jax_deepcompile.training.train import train

    if run.is_shared:
        try:
            jax.distributed.initialize(*run.cluster)
        except ValueError as error:
            raise ConfigError(f"cannot join the other processes: {error}") from error
    with Progress("starting JAX"):
        start_backends()
    summary = train(run.experiment, folder, resume=run.resume, watch=watch, options=options)
    return 0 if summary.stopped_by is None else exit_code(signal.Signals[summary.stopped_by])
