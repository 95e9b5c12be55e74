"""Frozen dataclasses as JSON, read back strictly.

Fields may be ``str``, ``int``, ``float``, ``bool``, string enums, frozen dataclasses, tuples of these, and any of them
or None. Nothing is guessed: an unknown key, a missing one or a value of another type is an error that says where it is.
So is what Python reads and cannot write, send or compute with: numbers beyond 64 bits, half a character, or JSON too
deep.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import reprlib
import types
from enum import StrEnum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from jax_deepcompile import errors

T = TypeVar("T")


def dump(value: Any) -> str:
    """The dataclass ``value`` as JSON text; infinities and NaN are refused."""
    return json.dumps(dataclasses.asdict(value), allow_nan=False, indent=1)


def parse(text: str) -> Any:
    """The JSON value that ``text`` is.

    Raises:
      ValueError: it is none, or holds a number that JSON does not have.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_int=_whole, parse_float=_real)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None


def document_in(data: Any, name: str) -> Any:
    """What ``data`` holds by ``name``, if it has no format of its own: such are the answers of the command line."""
    holds_one = isinstance(data, dict) and "format" not in data and name in data
    return data[name] if holds_one else data


def read(kind: type[T], data: Any) -> T:
    """The value of the dataclass ``kind`` that ``dump`` made JSON of.

    Args:
      kind: a frozen dataclass.
      data: what ``parse`` made of the text.

    Raises:
      ValueError: it is another; says which field, what was expected and what was found.
    """
    return _read(kind, data, "")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number that JSON has")


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"{digits[:_MOST_DIGITS]}... does not fit 64 bits")
    return int(digits)


def _real(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse_constant(digits[:_MOST_DIGITS])


_MOST_DIGITS = 20
"""Of a whole number of 64 bits, its sign among them."""


def _read(kind: Any, data: Any, path: str) -> Any:
    """``data`` as a value of the type ``kind``; ``path`` says where it stands."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if data is None and type(None) in get_args(kind):
            return None
        kinds = [arg for arg in get_args(kind) if arg is not type(None)]
        return _read(type(data) if type(data) in kinds else kinds[0], data, path)
    if origin is tuple:
        return _read_tuple(get_args(kind), data, path)
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, data, path)
    if issubclass(kind, StrEnum):
        known = [member.value for member in kind]
        return kind(data) if data in known else _refuse(path, f"one of {', '.join(known)}", data)
    if kind is float and type(data) is int:
        return float(data)
    if kind is str and type(data) is str and not _is_encodable(data):
        _refuse(path, "text", data)
    return data if type(data) is kind else _refuse(path, kind.__name__, data)


def _read_fields(kind: Any, data: Any, path: str) -> Any:
    hints = _field_types(kind)
    if not isinstance(data, dict):
        _refuse(path, f"an object with {', '.join(hints)}", data)
    for name in data:
        if name not in hints:
            raise ValueError(f"{_join(path, repr(name)[1:-1])}: an unknown key; there are {', '.join(hints)}")
    for name in hints:
        if name not in data:
            raise ValueError(f"{_join(path, name)}: missing")
    values = {name: _read(hint, data[name], _join(path, name)) for name, hint in hints.items()}
    try:
        return kind(**values)
    except errors.DeepCompileError:
        raise
    except ValueError as error:
        raise ValueError(f"{path or kind.__name__}: {error}") from error


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _read_tuple(kinds: tuple, data: Any, path: str) -> tuple:
    if not isinstance(data, list):
        _refuse(path, "a list", data)
    each = [kinds[0]] * len(data) if kinds[-1] is Ellipsis else kinds
    if len(each) != len(data):
        _refuse(path, f"{len(each)} values", data)
    return tuple(
        _read(kind, item, f"{path}[{index}]") for index, (kind, item) in enumerate(zip(each, data, strict=True))
    )


def _is_encodable(text: str) -> bool:
    """Whether no half of a character, a lone surrogate, stands in ``text``: JSON can name one, and UTF-8 has none."""
    return text.encode(errors="replace").decode() == text


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refuse(path: str, expected: str, found: Any) -> Any:
    raise ValueError(f"{path or 'the whole'}: expected {expected}, found {reprlib.repr(found)[:60]}")
