"""Typed values: text to value, value against annotation, and a sentence with the nearest right value when it fails.

The annotation of a field is its whole contract. Understood are ``bool``, ``int``, ``float``, ``str``, ``Literal[...]``,
``tuple[T, ...]``, ``T | None`` and ``Annotated[T, Range(...)]``. A field of any other type is set by name where its
value is a dtype (``bfloat16``), and otherwise only in Python.

>>> parse("3e-4", Annotated[float, Range(0)], 1e-3, "learning_rate=3e-4")
0.0003
>>> parse("0", Annotated[int, Range(1)], 16, "batch_size=0")
Traceback (most recent call last):
    ...
experiments.values.ConfigError: batch_size=0: must be at least 1; the nearest is 1
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_DTYPES = ("float32", "bfloat16", "float16")


class ConfigError(ValueError):
    """A setting, file or name the user gave cannot be used; the sentence says which, why, and what would be right."""


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number, both included; ``None`` is no bound."""

    minimum: float | None = None
    maximum: float | None = None

    def nearest(self, value: float) -> float:
        """The number in the range that lies closest to ``value``."""
        if self.minimum is not None and value < self.minimum:
            return self.minimum
        if self.maximum is not None and value > self.maximum:
            return self.maximum
        return value

    def __str__(self) -> str:
        if self.maximum is None:
            return f"at least {self.minimum}"
        if self.minimum is None:
            return f"at most {self.maximum}"
        return f"between {self.minimum} and {self.maximum}"


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that looks most like ``name``, or None where nothing does."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)), None)


def parse(text: str, annotation: Any, current: Any, where: str) -> Any:
    """The value that ``text`` spells, checked against ``annotation``.

    Args:
        text: what the user wrote after the equals sign.
        annotation: the annotation of the field, ``Annotated`` included.
        current: the value it replaces: the example in an error, and what tells a dtype.
        where: how an error's sentence begins, usually the whole ``key=value``.

    Raises:
        ConfigError: the text spells no value of that type, or one out of its bounds.
    """
    value = _read(text, annotation, current, where)
    check_value(value, annotation, where)
    return value


def check_value(value: Any, annotation: Any, where: str) -> None:
    """Raises a ``ConfigError`` that begins with ``where`` unless ``value`` is of the annotated type and in bounds."""
    base, bounds, optional = _unwrap(annotation)
    if value is None and optional:
        return
    if typing.get_origin(base) is Literal:
        _check_choice(value, typing.get_args(base), where)
    elif typing.get_origin(base) is tuple:
        if not isinstance(value, tuple):
            raise ConfigError(f"{where}: expected a tuple, not {type(value).__name__}")
        for part in value:
            check_value(part, typing.get_args(base)[0], where)
    elif base in (bool, int, float, str):
        accepted = (int, float) if base is float else base
        if not isinstance(value, accepted) or (isinstance(value, bool) and base is not bool):
            raise ConfigError(f"{where}: expected {base.__name__}, not {type(value).__name__}")
    if bounds is not None and isinstance(value, int | float) and bounds.nearest(value) != value:
        raise ConfigError(f"{where}: must be {bounds}; the nearest is {bounds.nearest(value)}")


def _check_choice(value: Any, choices: tuple[Any, ...], where: str) -> None:
    if value in choices:
        return
    found = nearest_name(str(value), map(str, choices))
    remedy = f"the nearest is {found!r}, of " if found else "the choices are "
    raise ConfigError(f"{where}: not a choice; {remedy}{', '.join(map(str, choices))}")


def _read(text: str, annotation: Any, current: Any, where: str) -> Any:
    base, _, optional = _unwrap(annotation)
    if optional and text.lower() in ("none", ""):
        return None
    if typing.get_origin(base) is Literal:
        return {str(choice): choice for choice in typing.get_args(base)}.get(text, text)  # check_value refuses the rest
    if typing.get_origin(base) is tuple:
        inner = typing.get_args(base)[0]
        return tuple(_read(part.strip(), inner, None, where) for part in text.split(",") if part.strip())
    if base is bool:
        if text.lower() not in _BOOLEANS:
            nearest = nearest_name(text.lower(), _BOOLEANS) or "true"
            raise ConfigError(f"{where}: expected true or false; the nearest is {nearest!r}")
        return _BOOLEANS[text.lower()]
    if base in (int, float):
        return _read_number(text, base, current, where)
    if base is str:
        return text
    if _is_dtype(current):
        return _read_dtype(text, current, where)
    raise ConfigError(f"{where}: this setting holds a {type(current).__name__}; set it in the experiment's file")


def _read_number(text: str, base: type, current: Any, where: str) -> int | float:
    kind = "an integer" if base is int else "a number"
    example = f", for example {current}" if current is not None else ""
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"{where}: expected {kind}{example}") from None
    if not math.isfinite(number):
        raise ConfigError(f"{where}: expected {kind} that is finite{example}")
    if base is float:
        return number
    if number != round(number):
        raise ConfigError(f"{where}: expected an integer; the nearest is {round(number)}")
    return int(number)


def _is_dtype(value: Any) -> bool:
    if value is None:  # NumPy reads None as float64
        return False
    try:
        np.dtype(value)
    except TypeError:
        return False
    return True


def _read_dtype(text: str, current: Any, where: str) -> Any:
    if text not in _DTYPES:
        nearest = nearest_name(text, _DTYPES) or np.dtype(current).name
        raise ConfigError(f"{where}: expected a dtype, one of {', '.join(_DTYPES)}; the nearest is {nearest!r}")
    return jnp.dtype(text) if isinstance(current, np.dtype) else getattr(jnp, text)


def _unwrap(annotation: Any) -> tuple[Any, Range | None, bool]:
    """Splits an annotation into the bare type, its bounds, and whether None is allowed."""
    bounds, optional = None, False
    if typing.get_origin(annotation) is Annotated:
        bounds = next((extra for extra in annotation.__metadata__ if isinstance(extra, Range)), None)
        annotation = annotation.__origin__
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        optional = len(parts) < len(typing.get_args(annotation))
        if len(parts) == 1:
            base, inner_bounds, _ = _unwrap(parts[0])
            return base, bounds or inner_bounds, optional
    return annotation, bounds, optional
