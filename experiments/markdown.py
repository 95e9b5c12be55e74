"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Its lines."""
    return [f"| {' | '.join(cells)} |" for cells in (heads, ("---",) * len(heads), *rows)]
