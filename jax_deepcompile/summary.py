"""What ends a notebook's cell: an object's title and a few rows, as text and as a small table with parts to unfold."""

import html
import textwrap
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH = 110
"""Characters that a line of a row may have."""

_LINES = 6
"""And lines."""


_TREE_CHARACTERS = 120_000
"""What all labels of a tree may take together."""


@dataclass(frozen=True)
class Branch:
    """A part of a tree that folds.

    Attributes:
      name: what it is.
      facts: what there is to say of it.
      parts: what is in it.
    """

    name: str
    facts: tuple[str, ...] = ()
    parts: tuple["Branch", ...] = ()

    def html(self) -> str:
        """Folded, and cut where it would get too long, the deepest parts first."""
        shown, left = {}, _TREE_CHARACTERS
        waiting: deque[Branch] = deque([self])
        while waiting and left > 0:
            branch = waiting.popleft()
            shown[id(branch)] = branch._label()
            left -= len(shown[id(branch)]) + _TAGS
            waiting.extend(branch.parts)
        return self._html(shown)

    def _html(self, labels: dict[int, str]) -> str:
        label = labels[id(self)]
        if not self.parts:
            return f"<div style='margin-left:1em'>{label}</div>"
        inside = "".join(part._html(labels) for part in self.parts if id(part) in labels)
        cut_off = sum(id(part) not in labels for part in self.parts)
        more = f"<div style='margin-left:1em'>… and {cut_off} more</div>" if cut_off else ""
        return f"<details style='margin-left:1em'><summary>{label}</summary>{inside}{more}</details>"

    def _label(self) -> str:
        name, *facts = (html.escape(_shortened(text)) for text in (self.name, *self.facts))
        return f"<b>{name}</b> <small>{' · '.join(facts)}</small>"


_TAGS = len("<details style='margin-left:1em'><summary></summary></details>")


@dataclass(frozen=True)
class Summary:
    """A few facts about an object.

    Attributes:
      title: what it is.
      rows: pairs (label, value); a value may have several lines, and an empty one is left out.
      trees: what a notebook may unfold besides.
    """

    title: str
    rows: tuple[tuple[str, str], ...]
    trees: tuple[Branch, ...] = ()

    def __str__(self) -> str:
        rows = self._shown()
        width = max((len(label) for label, _ in rows), default=0)
        indent = " " * (width + 4)
        lines = [f"  {label:<{width}}  " + f"\n{indent}".join(value) for label, value in rows]
        return "\n".join([self.title, *lines])

    def html(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(label)}</th>"
            f"<td style='text-align:left'>{'<br>'.join(map(html.escape, value))}</td></tr>"
            for label, value in self._shown()
        )
        trees = "".join(tree.html() for tree in self.trees)
        return f"<table><caption>{html.escape(self.title)}</caption>{rows}</table>{trees}"

    def _shown(self) -> list[tuple[str, list[str]]]:
        wrapped = {
            label: [part for line in value.splitlines() for part in textwrap.wrap(line, _WIDTH)]
            for label, value in self.rows
        }
        return [(label, cut(lines)) for label, lines in wrapped.items() if lines]


class Summarized:
    """Shows itself, last in a cell or in a debugger, by its ``_summary``: no array is read for that."""

    def _summary(self) -> Summary:
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self._summary())

    def _repr_html_(self) -> str:
        return self._summary().html()


class Text(str):
    """A text of several lines that reads the same printed and last in a cell."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def cut(lines: Sequence[str]) -> list[str]:
    """As many ``lines`` as a row may have, each shortened to what it may have, and how many more there are."""
    shown = [_shortened(line) for line in lines[:_LINES]]
    return [*shown, f"… and {len(lines) - _LINES} more"] if len(lines) > _LINES else shown


def _shortened(line: str) -> str:
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"


def size_text(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def axes_text(names: Sequence[str], sizes: Sequence[int]) -> str:
    """Mesh axes, such as ``data=2 x fsdp=4``."""
    return " x ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
