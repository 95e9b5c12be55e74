"""An option that a command does not have, told with the nearest one wherever it stands on the line."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence

import tyro

from jax_deepcompile.runtime.modules import nearest_name

_OPTION = re.compile(r"-+[^\W\d_]")
_HELP = ("-h", "--help")


def unknown_option(command: Callable, words: Sequence[str]) -> str | None:
    """A sentence about the first of ``words`` that is written as an option of ``command`` and is none."""
    takes_value = dict(options_of(command))
    name = _unknown(words, takes_value)
    if name is None:
        return None
    nearest = nearest_name(name, takes_value)
    return f"there is no option {name}" + (f"; the nearest is {nearest}" if nearest else "")


def _unknown(words: Sequence[str], takes_value: Mapping[str, bool]) -> str | None:
    left = iter(words)
    for word in left:
        written, equals, _ = word.partition("=")
        name = written.replace("_", "-")
        if word in (*_HELP, "--"):
            return None
        if _OPTION.match(name) and name not in takes_value:
            return written
        if takes_value.get(name) and not equals:
            next(left, None)
    return None


def options_of(of: Callable) -> Iterator[tuple[str, bool]]:
    """Each by name, and whether a value follows."""
    for name, hint in typing.get_type_hints(of, include_extras=True).items():
        kind, *marks = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
        if dataclasses.is_dataclass(kind):
            yield from options_of(typing.cast(type, kind))
        elif name != "return" and not any(mark is tyro.conf.Positional for mark in marks):
            yield f"--{name.replace('_', '-')}", kind is not bool
