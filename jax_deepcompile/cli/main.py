"""The ``deepcompile`` command: parsing only. What a subcommand does is imported when it is called.

A function that adds parsers sets ``run`` of each, a function of the parsed arguments that returns the exit code; list
it in ``_SUBCOMMANDS``. A parser that sets ``takes_overrides`` gets the ``key=value`` words in ``arguments.overrides``,
wherever on the line they stand.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax_deepcompile.runtime import interrupts

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_DEFAULT_VIRTUAL_DEVICES = 8
_EXIT_CODES = (
    "exit codes: 0 done, 1 failed, 2 a mistake on the line or in a file, 130 stopped by Ctrl-C, 143 by SIGTERM"
)
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (default: the process's) and returns the exit code: 2 for a mistake in it.

    Ctrl-C and SIGTERM end the process itself, here or in the watch's thread.
    """
    parser = _make_parser()
    arguments, extra = parser.parse_known_args(argv)
    if getattr(arguments, "takes_overrides", False):
        arguments.overrides = [word for word in extra if not word.startswith("-")]
        extra = [word for word in extra if word.startswith("-")]
    if extra:
        parser.error(_unrecognized(extra[0], [f"--{name}" for name in vars(arguments)]))
    arguments.watch = interrupts.Watch()
    try:
        with arguments.watch.armed():
            return arguments.run(arguments)
    except interrupts.StoppedBySignal as stopped:
        arguments.watch.end(stopped.number)


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
    parser = argparse.ArgumentParser(
        prog="deepcompile", description="Fully sharded training of JAX train steps.", epilog=_EXIT_CODES
    )
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
        epilog="example: deepcompile train tiny_llama --steps 40 --out /tmp/run optimizer.learning_rate=3e-3. "
        "Ctrl-C and SIGTERM stop the run after the step under way, and save it for --resume; a second one ends it at "
        f"once. {_EXIT_CODES}",
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
        watch=arguments.watch,
    )


def _add_bench(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure a benchmark, on GPUs that are not here or on one that is",
        description="Compiles and simulates whole train steps for GPUs that are not here; with --suite gpu, measures "
        "the GPU that is.",
        epilog="example: deepcompile bench headline --rows 0 2 --out results/headline.json",
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="name of the benchmark")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("--suite", choices=["gpu"], help="measure the attached GPU instead: under 8 minutes, one JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON results; a Markdown table is written beside it")
    parser.add_argument("--rows", type=int, nargs="+", default=[], metavar="N", help="rows to measure, from 0")
    parser.add_argument("--resume", action="store_true", help="keep what the output file holds already")
    parser.add_argument(
        "--again", nargs="+", default=[], metavar="SYSTEM", help="and measure these systems anew, such as all"
    )
    parser.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if arguments.suite == "gpu":
        from experiments import gpu_suite

        return gpu_suite.run(arguments.out or Path("gpu.json"))
    from experiments.bench import command

    return command.run(
        arguments.config,
        out=arguments.out,
        rows=arguments.rows,
        resume=arguments.resume,
        again=arguments.again,
        list_only=arguments.list,
    )


def _add_step_commands(subparsers: Any) -> None:
    for name, about, add_options in (
        ("trace", "print a step as each device runs it, before planning", None),
        ("plan", "plan a step, and print or write the plan", _add_plan_options),
        ("explain", "say what is decided for a step, and why", _add_explain_options),
        ("profile", "measure a step on the devices of this process", _add_profile_options),
        ("compare", "judge jax.jit's FSDP and this package's side by side", None),
    ):
        parser = subparsers.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            epilog=f"example: deepcompile {name} train.py:make_step --gpu h100 --nodes 4"
            if name != "profile"
            else "example: deepcompile profile train.py:make_step --out profile.json",
        )
        parser.add_argument(
            "spec",
            metavar="STEP",
            help="FILE.py:NAME or package.module:NAME of a function that returns (step, state, batch); shapes will do",
        )
        if name != "profile":
            _add_cluster_options(parser)
        parser.add_argument("--microbatches", type=_positive, default=1, metavar="N", help="parts of each batch")
        parser.add_argument("--memory-limit", metavar="SIZE", help="of each device, such as 72GiB or 0.9")
        parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="where plans are kept between runs")
        parser.add_argument(
            "--devices", type=_positive, metavar="N", help="virtual CPU devices where there is no accelerator"
        )
        if add_options is not None:
            add_options(parser)
        parser.set_defaults(run=_run_step_command, command=name)


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("GPUs that are not here (by default, the devices of this process)")
    group.add_argument("--gpu", choices=["h100", "h200"], help="kind of GPU")
    group.add_argument("--nodes", type=_positive, default=1, metavar="N", help="machines (default: 1)")
    group.add_argument("--gpus-per-node", type=_positive, default=8, metavar="N", help="in each (default: 8)")
    group.add_argument("--nics-per-node", type=_positive, metavar="N", help="network cards (default: one a GPU)")
    group.add_argument("--nic-gbps", type=float, default=400.0, metavar="G", help="speed of each (default: 400)")


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the plan as JSON")


def _add_explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", type=Path, metavar="FILE", help="a plan to carry out instead of making one")


def _add_profile_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("profile.json"), metavar="FILE", help="where to write it")
    parser.add_argument("--runs", type=_positive, default=5, metavar="N", help="measurements of everything")


def _run_step_command(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    use_virtual_devices(arguments.devices)
    from jax_deepcompile import errors
    from jax_deepcompile.cli import commands

    known = {field for field in commands.StepRequest.__dataclass_fields__ if hasattr(arguments, field)}
    request = commands.StepRequest(**{field: getattr(arguments, field) for field in known})
    run: dict[str, Callable[[], str]] = {
        "trace": lambda: commands.trace(request),
        "plan": lambda: commands.plan(request, arguments.out),
        "explain": lambda: commands.explain(request, arguments.plan),
        "profile": lambda: commands.profile(request, arguments.out, arguments.runs),
        "compare": lambda: commands.compare(request),
    }
    try:
        print(run[arguments.command]())
    except errors.DeepCompileError as error:
        print(f"deepcompile: {error}", file=sys.stderr)
        return 2
    return 0


def _add_install_compiler(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "install-compiler",
        help="bring XLA's compiler for GPUs that are not here, once for each version of jax",
        description="Downloads XLA's compiler for GPUs that are not here, for the jax that is installed: some 180 MB, "
        "by pip, into a folder of its own, so that other JAX programs do not find it.",
    )
    parser.set_defaults(run=_install_compiler)


def _install_compiler(arguments: argparse.Namespace) -> int:
    from jax_deepcompile import errors
    from jax_deepcompile.lowering import cuda_compiler

    try:
        print(cuda_compiler.install())
    except errors.DeepCompileError as error:
        print(f"deepcompile: {error}", file=sys.stderr)
        return 2
    return 0


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


_SUBCOMMANDS: tuple[Callable[..., None], ...] = (_add_train, _add_bench, _add_step_commands, _add_install_compiler)
