"""How ``explain()`` says seconds, counts, operations and lines."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from jax_deepcompile.analysis.names import scopes
from jax_deepcompile.costs.streams import AGAIN
from jax_deepcompile.summary import size_text

LINES = 8
"""How many lines a list may take before it is cut."""

_CELL = re.compile(r"ipykernel_\d+/\d+\.py$")
"""The file that a kernel compiles a cell as."""

_SEVERAL = re.compile(r"^(.*?/|)\((.*:.*)\)$")
"""The ``op_name`` of collectives that XLA has joined."""

_OUTSIDE = re.compile(r"^jit\([^()]*\)/(shard_map/)?")


def seconds_text(seconds: float) -> str:
    """Seconds in the unit that suits them.

    >>> seconds_text(1.2345), seconds_text(0.2310148), seconds_text(12e-6), seconds_text(0.0)
    ('1.234 s', '231 ms', '12 us', '0 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{1e6 * seconds:.2g} us" if seconds else "0 s"


def count_text(count: float) -> str:
    """A count in words, if it is large.

    >>> count_text(7_986_000_000), count_text(1_235_000), count_text(512)
    ('7.986 billion', '1.235 million', '512')
    """
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:,}"


def percent_text(share: float) -> str:
    """A share with one decimal; a small one with two digits.

    >>> percent_text(0.4321), percent_text(0.01), percent_text(0.000123), percent_text(0.0)
    ('43.2%', '1.0%', '0.012%', '0%')
    """
    return f"{share:.1%}" if share >= 0.01 else f"{100 * share:.2g}%"


def bytes_text(count: float) -> str:
    """As limits are given: whole GiB with two digits.

    >>> bytes_text(13892930024), bytes_text(5 << 20)
    ('12.94 GiB', '5.0 MiB')
    """
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else size_text(count)


def line_text(line: str) -> str:
    """``file:line`` of the user's, the file as seen from here if that is shorter; a notebook's cell has no file."""
    path, colon, rest = line.partition(":")
    if _CELL.search(path):
        return f"a cell's line {rest}"
    return min(path, os.path.relpath(path), key=len) + colon + rest if colon and path else path


def operation_text(op_name: str) -> str:
    """What an instruction does, as plans call it, from the path that it came from.

    >>> operation_text("jit(step)/shard_map/while/body/closed_call/layers/mlp/up/dot_general")
    'layers/mlp/up dot_general'
    >>> operation_text("jit(step)/shard_map/transpose(jvp(Net))/(a/all_gather:b/all_gather:c/all_gather)")
    'Net/a @backward and 2 more all_gather'
    """
    stack = _OUTSIDE.sub("", op_name.partition(";")[0])
    joined = _SEVERAL.match(stack)
    each = [f"{joined[1]}{part}" for part in joined[2].split(":")] if joined else [stack]
    scope, _, primitive = max(each, key=lambda path: "/" in path).rpartition("/")
    name = scopes(scope)
    if "transpose(" in scope or AGAIN in scope:
        name += " @backward" if name else ""
    more = f"and {len(each) - 1} more" if name else str(len(each))
    return " ".join(filter(None, (name, more * (len(each) > 1), primitive)))


def cut(lines: Sequence[str], most: int = LINES, names: bool = False) -> list[str]:
    """The first lines, and how many others there are; with the different ``names`` that those begin with."""
    if len(lines) <= most:
        return list(lines)
    shown, rest = lines[: most - 1], lines[most - 1 :]
    listed = f": {', '.join(dict.fromkeys(line.split()[0] for line in rest))}" if names else ""
    return [*shown, f"  … and {len(rest)} more{listed}"]


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows in columns: numbers to the right, the last column as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent + "  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)) + f"  {row[-1]}"
        for row in rows
    ]
