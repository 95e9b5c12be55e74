"""``deepcompile train`` and ``bench``: from the words of the line to an exit code."""

import dataclasses
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from experiments.config import REGISTRY, AtLeastOneOrNone, ConfigError, Experiment, flatten, load, names, spell
from jax_deepcompile.cli.commands import use_virtual_devices

if TYPE_CHECKING:
    from experiments.stopping import Watch

_USAGE = """usage: deepcompile train NAME [options]; deepcompile train NAME --help says which. --list names the
experiments, --list NAME shows the settings of one; --experiments DIR adds those in a folder of yours. There are:
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """Trains an experiment's model on text.

    Ctrl-C and SIGTERM stop the run after the step under way, and save it for --resume; a second one ends it at once.

    Attributes:
        experiment: what to train, and how.
        out: output folder; a new one in runs/ where it is not said.
        resume: continue the run in the output folder.
        devices: virtual CPU devices where there is no accelerator; 8 where it is not said.
        distributed: join the other processes, of which each reads its own rows of every batch; Slurm, MPI, Kubernetes
            and TPUs say how.
        coordinator: HOST:PORT where process 0 listens, if nothing says it.
        processes: how many there are.
        process: which this is, from 0.
    """

    experiment: Annotated[Experiment, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    out: Path | None = None
    resume: bool = False
    devices: AtLeastOneOrNone = None
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


def train(words: Sequence[str], own: Path | None = None, watch: "Watch | None" = None) -> int:
    """Trains, or lists.

    Args:
        words: of the command line.
        own: a folder with experiments of the user's.
        watch: who ends the process where a signal is not answered in time.

    Returns:
        The exit code: 2 after printing one line about a mistake of the user's, 128 and the signal's number (130 for
        Ctrl-C, 143 for SIGTERM) after a run that was asked to stop.

    Raises:
        SystemExit: help was asked for (0), or an option is wrong (2).
    """
    try:
        known = names(own)
        name = next((word for word in words if word in known), next(iter(words), None))
        if "--list" in words:
            print(listing(own, *(word for word in words if word != "--list")))
            return 0
        if name in ("-h", "--help"):
            print(_USAGE + listing(own))
            return 0
        if name is None or name.startswith("-"):
            raise ConfigError(f"say which experiment: {', '.join(known)}")
        place = list(words).index(name)
        run = parse(name, [*words[:place], *words[place + 1 :]], own)
        return start(run, run.out or new_folder(name, run), watch)
    except ConfigError as error:
        print(f"deepcompile: {error}", file=sys.stderr)
        return 2


def parse(name: str, words: Sequence[str], own: Path | None = None) -> Run:
    """The experiment called ``name`` with all that the command line says about it."""
    prog = f"deepcompile train {name}"
    try:
        return tyro.cli(
            Run,
            default=Run(load(name, own)),
            args=words,
            prog=prog,
            registry=REGISTRY,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except ValueError as error:  # from a config's __post_init__
        raise ConfigError(str(error)) from error


def listing(own: Path | None, *chosen: str) -> str:
    """The experiments with what they are, or the settings of one as options with their values."""
    if not chosen:
        return "\n".join(f"{experiment:<16}{summary}" for experiment, summary in names(own).items())
    settings = flatten(load(chosen[0], own)).items()
    return "\n".join(
        f"--{name.replace('_', '-')} {'None' if value is None else spell(value)}" for name, value in settings
    )


def new_folder(name: str, run: Run) -> Path:
    """The output folder where none is given: one of its own for every run."""
    if run.resume:
        raise ConfigError("say which run to resume: --out DIR")
    if run.is_shared:
        raise ConfigError("say where to write, the same place on every process: --out DIR")
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def start(run: Run, folder: Path, watch: "Watch | None") -> int:
    """Brings JAX up, with the other processes where there are any, and trains; returns the exit code."""
    use_virtual_devices(run.devices)
    import jax

    from experiments.train import train

    if run.is_shared:
        try:
            jax.distributed.initialize(*run.cluster)
        except ValueError as error:
            raise ConfigError(f"cannot join the other processes: {error}") from error
    summary = train(run.experiment, folder, resume=run.resume, watch=watch)
    return 0 if summary.stopped_by is None else 128 + signal.Signals[summary.stopped_by]


def bench(words: Sequence[str], own: Path | None = None, watch: "Watch | None" = None) -> int:
    """Measures a benchmark; returns the exit code."""
    from experiments.bench.command import run

    try:
        return tyro.cli(run, args=words, prog="deepcompile bench", config=(tyro.conf.FlagCreatePairsOff,))
    except OSError as error:  # of the file that is read or written
        print(f"deepcompile: {error}", file=sys.stderr)
        return 2
