"""What may come next on a line of ``deepcompile``, as the shell asks at every TAB.

Names are found in the source of what lies there, without JAX. Options, settings and benchmarks are known only to what
imports it, so that is asked once and kept.
"""

import ast
import glob
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from jax_deepcompile.cli.experiments import own_folder
from jax_deepcompile.cli.folders import experiment_folders
from jax_deepcompile.cli.kept import Ask, printed_by
from jax_deepcompile.runtime.sources import assigned, called_with_nothing, source

SCRIPTS = {
    "bash": """\
_deepcompile() {
    local IFS=$'\\n' line=${COMP_LINE:0:COMP_POINT}
    local word=${line##*[[:space:]]}
    COMPREPLY=($("$1" --complete "$line" 2> /dev/null))
    COMPREPLY=("${COMPREPLY[@]#"${word%"$2"}"}")  # what follows a colon is a word to bash
}
complete -o default -F _deepcompile deepcompile
""",
    "zsh": """\
_deepcompile() {
    local -a found=(${(f)"$($words[1] --complete "$words[1,CURRENT-1] $PREFIX" 2> /dev/null)"})
    if (( $#found )); then compadd -a found; else _files; fi
}
compdef _deepcompile deepcompile
""",
}
"""What makes a shell ask, by its name."""

_Options = dict[str, list[str] | None]
"""What each takes: nothing, or a value, of which those that have names are listed."""

_WITHOUT_A_NAME: _Options = {"--experiments": [], "--list": None, "--help": None}
"""What ``train`` takes whatever it is to train."""


def candidates(line: str, commands: Iterable[str], ask: Ask) -> list[str]:
    """What the last word of a line, whose first is the program, may become."""
    _, *before, word = [*shlex.split(line), *([""] if line[-1:].isspace() else [])]
    return [each for each in _next(before, word, commands, ask) if each.startswith(word)]


def _next(before: Sequence[str], word: str, commands: Iterable[str], ask: Ask) -> Iterable[str]:
    if not before:
        return commands
    command, *given = before
    options = _options(command, given, ask) if given or word.startswith("-") else {}
    if given and (values := options.get(given[-1])) is not None:
        return values
    is_named = any(not each.startswith("-") and options.get(last) is None for last, each in pairwise(["", *given]))
    return options if is_named or word.startswith("-") else _names(command, given, word, ask)


def _names(command: str, given: Sequence[str], word: str, ask: Ask) -> Iterator[str]:
    """What a command may be about."""
    if command == "bench":
        yield from re.findall(r"^\S+", printed_by(["bench", "--list"], ask), re.MULTILINE)
    elif command == "completion":
        yield from SCRIPTS
    elif command not in ("new", "install-compiler"):
        yield from _experiments(own_folder(given)[0])
        yield from _in_files(word, are_steps=command != "train")


def _experiments(own: Path | None) -> list[str]:
    paths = [path for folder in experiment_folders(own) for path in sorted(folder.glob("*.py"))]
    return [path.stem for path in paths if "CONFIG" in assigned(_source(path))]


def _in_files(word: str, are_steps: bool) -> Iterator[str]:
    """``FILE.py:NAME`` of files that begin like ``word``: experiments, and functions that may give a step."""
    file, colon, _ = word.partition(":")
    for path in [file] if colon else sorted(glob.glob(f"{glob.escape(file)}*.py")):
        module = _source(Path(path))
        names = [name for name, value in assigned(module).items() if _is_experiment(value)]
        names += called_with_nothing(module) if are_steps else []
        yield from (f"{path}:{name}" for name in names if not name.startswith(("_", "test_")))


def _is_experiment(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in ("Experiment", "replace")


def _source(path: Path) -> ast.Module:
    """What can be read of it."""
    with suppress(OSError, SyntaxError, UnicodeDecodeError):
        return source(path)
    return ast.Module([], [])


def _options(command: str, given: Sequence[str], ask: Ask) -> _Options:
    if command != "train":
        return _spec(["bench"], ask) if command == "bench" else _spec([], ask, command)
    own = own_folder(given)[0]
    known = _experiments(own)
    name = next((each for each in given if each in known or ":" in each), None)
    if name is None:
        return _WITHOUT_A_NAME
    return _WITHOUT_A_NAME | _spec(["train", name, *([] if own is None else [f"--experiments={own}"])], ask)


def _spec(words: Sequence[str], ask: Ask, *commands: str) -> _Options:
    """The options that tyro writes into a script of its own."""
    script = printed_by([*words, "--tyro-write-completion", "bash", "-"], ask)
    written = re.search(r"^COMPLETION_SPEC = (.*)$", script, re.MULTILINE)
    spec = ast.literal_eval(written[1]) if written else {"options": [], "subcommands": {}}
    for command in commands:
        spec = spec["subcommands"].get(command, spec)
    options = {}
    for option in spec["options"]:
        named = re.match(r"\{([^}]*)\} ", option["description"])
        values = None if option["type"] in ("flag", "boolean") else named[1].split(",") if named else []
        options |= dict.fromkeys(option["flags"], values)
    return options
