"""The ``deepcompile`` command: its subcommands are functions, whose signatures and docstrings say what they take.

Nothing that takes a while to load is loaded with this module: a signal that comes before ``main`` watches for it would
end in a traceback, or in one of JAX's callbacks, which ignore it.
"""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from jax_deepcompile.runtime import interrupts
from jax_deepcompile.runtime.pipes import nobody_reads

_ABOUT = (
    "Trains JAX train steps fully sharded. `deepcompile COMMAND --help` says what a command takes, such as "
    "`deepcompile compare train.py:make_step --gpu h100 --nodes 4`; `deepcompile --version` says which version this "
    "is. Exit codes: 0 done, 1 failed, 2 refused, such as a mistake on the line, 130 stopped by Ctrl-C, 143 by "
    "SIGTERM, 141 nobody reads any more."
)

COMMANDS = (
    "new",
    "train",
    "bench",
    "trace",
    "plan",
    "explain",
    "profile",
    "compare",
    "fit",
    "validate",
    "install-compiler",
    "completion",
)

_READ_BY_EXPERIMENTS = (["train"], ["bench"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (default: the process's) and returns the exit code.

    Ctrl-C and SIGTERM end the process itself, here or in the watch's thread.

    Raises:
      SystemExit: help was asked for (0), or an option is wrong (2).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    watch = interrupts.Watch()
    watch.is_loading = True
    try:
        with watch.armed():
            try:
                return _run(words, watch)
            finally:
                print(end="", flush=True)
    except interrupts.StoppedBySignal as stopped:
        watch.end(stopped.number)
    except BrokenPipeError:
        if not nobody_reads(sys.stdout):
            raise
        return interrupts.exit_code(signal.SIGPIPE)


def _run(words: list[str], watch: interrupts.Watch) -> int:
    if words == ["--version"]:
        from importlib.metadata import version

        print(version("jax-deepcompile"))
        return 0
    if words[:1] == ["--complete"]:
        from jax_deepcompile.cli.completion import candidates

        print(*candidates(words[1], COMMANDS, lambda line: _printed(line, watch)), sep="\n")
        return 0
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        from jax_deepcompile.runtime.modules import nearest_name

        nearest = nearest_name(words[0], COMMANDS)
        hint = f"; the nearest is {nearest!r}" if nearest else ""
        print(f"deepcompile: there is no command {words[0]!r}{hint}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from jax_deepcompile.runtime.progress import Progress

    is_experiment = words[:1] in _READ_BY_EXPERIMENTS
    own = 1 if is_experiment else len(words)
    with Progress("loading JAX"):
        import tyro

        from jax_deepcompile import errors
        from jax_deepcompile.cli import users_errors
        from jax_deepcompile.cli.unknown import unknown_option
        from jax_deepcompile.training.config import REGISTRY

        commands = _commands(words[own:], watch)
    command, *given = words[:own] or [""]
    unknown = unknown_option(commands[command], given) if command in commands else None
    if unknown is not None:
        print(f"deepcompile: {unknown}; `deepcompile {command} --help` says which there are", file=sys.stderr)
        return 2
    mistakes = () if is_experiment else (errors.DeepCompileError, OSError)
    watch.is_loading = False
    config = (tyro.conf.OmitArgPrefixes,)
    try:
        if command in commands:
            prog = f"deepcompile {command}"
            made = tyro.cli(commands[command], args=given, prog=prog, config=config, registry=REGISTRY)
        else:
            made = tyro.extras.subcommand_cli_from_dict(
                commands, args=words[:own], prog="deepcompile", description=_ABOUT, config=config, registry=REGISTRY
            )
    except BrokenPipeError:
        raise
    except mistakes as error:
        print(f"deepcompile: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        unread = users_errors.syntax_error(error)
        said = unread or users_errors.users_traceback(error)
        if said is None:
            raise
        print(f"deepcompile: an error in your code:\n{said}", file=sys.stderr)
        return 2 if unread else 1
    if isinstance(made, int):
        return made
    print(made)
    return 0


def _printed(words: Sequence[str], watch: interrupts.Watch) -> str:
    """What a line prints, nothing where it fails."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            failed = _run([*words], watch)
        except SystemExit as ended:
            failed = ended.code
    return "" if failed else printed.getvalue()


def _commands(rest: Sequence[str], watch: interrupts.Watch) -> dict[str, Callable[..., int | str]]:
    """Each returns what to print, or the exit code; ``rest`` are the words that experiments read themselves."""
    import tyro

    from jax_deepcompile.cli import commands, experiments, fit, new, validate
    from jax_deepcompile.cli.completion import SCRIPTS

    def train() -> int:
        """Trains an experiment's model, or that of a config of yours."""
        return experiments.train(rest, watch)

    def bench() -> int:
        """Measures a benchmark, on GPUs that are not here or on one that is."""
        return experiments.bench(rest)

    def completion(shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]) -> str:
        """Prints the lines by which a shell completes commands, options, settings, experiments and benchmarks.

        Args:
          shell: whose start-up file they are for, such as `deepcompile completion bash >> ~/.bashrc`.
        """
        return SCRIPTS[shell]

    return {
        "new": new.new,
        "train": train,
        "bench": bench,
        "trace": commands.trace,
        "plan": commands.plan,
        "explain": commands.explain,
        "profile": commands.profile,
        "compare": commands.compare,
        "fit": fit.fit,
        "validate": validate.validate,
        "install-compiler": commands.install_compiler,
        "completion": completion,
    }
