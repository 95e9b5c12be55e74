"""The pictures of ``docs/concepts.md`` draw what planning finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import pictures

DRAWN = json.loads((Path(__file__).parents[2] / "docs" / "images" / "pictures.json").read_text())


AGAIN = "python -m experiments.pictures; python -m experiments.screenshots --only trace"


@pytest.mark.slow
@pytest.mark.h100_aot
@pytest.mark.parametrize("name", ["sharded only", "planned", "planned for 9 GiB"])
def test_pictures_draw_what_planning_finds(name: str):
    step, given = pictures.example()
    found = pictures.figures(pictures.simulated(step, given, name))
    assert found == pytest.approx(DRAWN[name], rel=0.01), AGAIN


@pytest.mark.slow
@pytest.mark.h100_aot
def test_the_picture_of_limits_draws_what_planning_finds():
    step, given = pictures.example()
    found = pictures.curve_figures(step.trace(*given).memory_curve(pictures.LIMITS))
    assert found == pytest.approx(DRAWN["step_s by GiB"], rel=0.01), AGAIN
