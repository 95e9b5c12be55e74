"""Values on the command line: numbers with their bounds, and one of several names.

>>> bounded(int, 1).instance_from_str(["1e3"])
1000
>>> bounded(int, 1).instance_from_str(["0"])
Traceback (most recent call last):
    ...
ValueError: must be at least 1; the nearest is 1
>>> one_of({"h100": 1, "b200": 2}).instance_from_str(["h101"])
Traceback (most recent call last):
    ...
ValueError: must be one of h100, b200, not 'h101'; the nearest is 'h100'
"""

import math
from collections.abc import Mapping
from typing import Any

from tyro.constructors import PrimitiveConstructorSpec

from jax_deepcompile.runtime.modules import nearest_name


def bounded(
    kind: type[int] | type[float], minimum: float = -math.inf, maximum: float = math.inf, *, or_none: bool = False
) -> PrimitiveConstructorSpec[Any]:
    """The annotation of a number that lies between two bounds, or is ``None`` where it may be."""
    expected, metavar = ("an integer", "INT") if kind is int else ("a number", "FLOAT")

    def read(words: list[str]) -> int | float | None:
        text = words[0]
        if or_none and text.lower() == "none":
            return None
        try:
            value = int(text) if text.lstrip("+-").isdecimal() else float(text)
        except ValueError:
            raise ValueError(f"expected {expected}, not {text!r}") from None
        if not math.isfinite(value) or kind(value) != value:
            raise ValueError(f"expected {expected}, not {text!r}")
        nearest = min(max(value, minimum), maximum)
        if nearest != value:
            raise ValueError(f"must be {_in_words(minimum, maximum)}; the nearest is {nearest}")
        return kind(value)

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{None}}|{metavar}" if or_none else metavar,
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, kind) or (or_none and value is None),
        str_from_instance=lambda value: [str(value)],
    )


def one_of(named: Mapping[str, Any]) -> PrimitiveConstructorSpec[Any]:
    """How a value is read that is said by its name."""

    def read(words: list[str]) -> Any:
        if words[0] not in named:
            nearest = nearest_name(words[0], named)
            hint = f"; the nearest is {nearest!r}" if nearest else ""
            raise ValueError(f"must be one of {', '.join(named)}, not {words[0]!r}{hint}")
        return named[words[0]]

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(named) + "}",
        instance_from_str=read,
        is_instance=lambda value: value in named.values(),
        str_from_instance=lambda value: [next((name for name, each in named.items() if each == value), str(value))],
    )


def _in_words(minimum: float, maximum: float) -> str:
    if maximum == math.inf:
        return f"at least {minimum}"
    return f"at most {maximum}" if minimum == -math.inf else f"between {minimum} and {maximum}"
