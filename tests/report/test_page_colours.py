"""Colours that stand for different things in one chart of the page differ, to the colour-blind too."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import combinations

import numpy as np
import pytest

pytestmark = pytest.mark.pure

CSS = (files("jax_deepcompile.report.page") / "static" / "page.css").read_text(encoding="utf-8")
LIGHT, DARK = (dict(re.findall(r"--([\w-]+): (#\w{6});", part)) for part in CSS.split("@media"))
KERNELS = ("products", "attention", "again", "other")
TIMELINE = (*KERNELS, "exposed", "gather", "reduce", "moved", "to-host", "from-host")
MEMORY = ("kept", "computed", "gather", "reduce", "from-host", "moved", "arguments", "limit")
LEAST = 12
"""Of CIE 1976; about 2 is seen side by side."""

SEEN = {
    "normally": np.eye(3),
    "without red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "without green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
"""Of linear RGB; Machado, Oliveira and Fernandes 2009, of severity 1."""

XYZ = np.array([[0.412456, 0.357576, 0.180438], [0.212673, 0.715152, 0.072175], [0.019334, 0.119192, 0.950304]])


def lab(colour: str, seen: str) -> np.ndarray:
    """A colour of CSS in CIE L*a*b*, as it is ``seen``."""
    rgb = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    share = XYZ @ np.clip(SEEN[seen] @ linear, 0, 1) / XYZ.sum(axis=1)
    x, y, z = np.where(share > 216 / 24389, np.cbrt(share), (24389 / 27 * share + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("colours", [LIGHT, LIGHT | DARK], ids=["light", "dark"])
@pytest.mark.parametrize("chart", [TIMELINE, MEMORY], ids=["timeline", "memory"])
def test_colours_of_one_chart_are_told_apart(chart: tuple[str, ...], colours: dict[str, str], seen: str):
    labs = {name: lab(colours[name], seen) for name in chart}
    apart = {(a, b): round(np.linalg.norm(labs[a] - labs[b]), 1) for a, b in combinations(chart, 2)}
    assert {pair: distance for pair, distance in apart.items() if distance < LEAST} == {}
