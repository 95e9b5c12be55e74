"""The ``deepcompile`` command: parsing only. What a subcommand does is imported when it is called.

A subcommand is a function that adds its parser and sets ``run``, a function of the parsed arguments that returns the
exit code; list it in ``_SUBCOMMANDS``. A parser that sets ``takes_overrides`` gets the ``key=value`` words in
``arguments.overrides``, wherever on the line they stand.
"""

import argparse
import difflib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_DEFAULT_VIRTUAL_DEVICES = 8
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (default: the process's) and returns the exit code: 2 for a mistake in it."""
    parser = _make_parser()
    arguments, extra = parser.parse_known_args(argv)
    if getattr(arguments, "takes_overrides", False):
        arguments.overrides = [word for word in extra if not word.startswith("-")]
        extra = [word for word in extra if word.startswith("-")]
    if extra:
        parser.error(_unrecognized(extra[0], [f"--{name}" for name in vars(arguments)]))
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return 130


def use_virtual_devices(count: int | None) -> None:
    """Makes the CPU backend ``count`` devices, if JAX has not started and an accelerator is not what it finds.

    Without a count, a number the user has put in ``XLA_FLAGS`` stays, and else there will be eight.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    if count is None and any(flag.startswith(_DEVICE_COUNT_FLAG) for flag in flags):
        return
    kept = [flag for flag in flags if not flag.startswith(_DEVICE_COUNT_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{_DEVICE_COUNT_FLAG}={count or _DEFAULT_VIRTUAL_DEVICES}"])


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deepcompile", description="Fully sharded training of JAX train steps.")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in _SUBCOMMANDS:
        add(subparsers)
    return parser


def _add_train(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train an experiment's model on text",
        usage="deepcompile train CONFIG [options] [key=value ...]",
        description="Trains an experiment's model on text. Any setting of its config can be overridden by key=value.",
        epilog="example: deepcompile train tiny_llama --steps 40 --out /tmp/run optimizer.learning_rate=3e-3",
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="name of the experiment")
    parser.add_argument("--list", action="store_true", help="list the experiments; with CONFIG, its settings")
    parser.add_argument("--steps", metavar="N", help="number of steps (train.steps)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="output folder (default: a new one in runs/)")
    parser.add_argument(
        "--data", nargs="+", action="extend", metavar="FILES", help="text files, directories or globs (data.files)"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the output folder")
    parser.add_argument(
        "--devices", type=_positive, metavar="N", help="virtual CPU devices where there is no accelerator (default: 8)"
    )
    group = parser.add_argument_group("several processes (each reads its own rows of every batch)")
    group.add_argument(
        "--distributed", action="store_true", help="join the others; Slurm, MPI, Kubernetes, TPU say how"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens, if nothing says it")
    group.add_argument("--processes", type=_positive, metavar="N", help="how many there are")
    group.add_argument("--process", type=int, metavar="INDEX", help="which this is, from 0")
    parser.set_defaults(run=_train, takes_overrides=True)


def _train(arguments: argparse.Namespace) -> int:
    use_virtual_devices(arguments.devices)
    from experiments import command

    cluster = (arguments.coordinator, arguments.processes, arguments.process)
    files = [word for word in arguments.data or [] if not _is_override(word)]
    return command.run(
        arguments.config,
        overrides=arguments.overrides + [word for word in arguments.data or [] if _is_override(word)],
        files=files,
        steps=arguments.steps,
        folder=arguments.out,
        resume=arguments.resume,
        cluster=cluster if arguments.distributed or any(part is not None for part in cluster) else None,
        list_only=arguments.list,
    )


def _is_override(word: str) -> bool:
    """Whether a word after ``--data`` is a ``key=value`` rather than one more file."""
    return bool(_OVERRIDE.match(word)) and not Path(word).exists()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer, at least 1, not {text!r}")
    return int(text)


def _unrecognized(option: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(option.partition("=")[0], known, n=1)
    return f"there is no option {option}" + (f"; the nearest is {nearest[0]}" if nearest else "")


_SUBCOMMANDS: tuple[Callable[..., None], ...] = (_add_train,)
