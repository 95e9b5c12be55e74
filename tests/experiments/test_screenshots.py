"""The pictures of the documentation are of what there is today; ``python -m experiments.screenshots`` takes them."""

from __future__ import annotations

import json

import jax
import pytest

from experiments import screenshot_sources, screenshots


@pytest.mark.pure
def test_pictures_of_page_and_notebook_are_of_those_that_there_are():
    known = json.loads(screenshot_sources.DRAWN_FROM.read_text())
    assert known == screenshot_sources.sources(), "python -m experiments.screenshots --only page notebook"
    assert all((screenshot_sources.IMAGES / name).is_file() for name in ("page_light.png", "notebook.png"))


@pytest.mark.pure
def test_a_terminal_shows_text_as_text_and_loads_nothing():
    drawn = screenshot_sources.terminal_svg("$ explain <script>\n\n  [bold]a[/bold] & b")
    assert "&lt;script&gt;" in drawn
    assert "[bold]a[/bold]&#160;&amp;&#160;b" in drawn
    assert "url(http" not in drawn


@pytest.mark.slow
@pytest.mark.h100_aot
def test_the_picture_of_the_terminal_is_what_the_command_says():
    committed = screenshot_sources.TERMINAL.read_text()
    if f"jax&#160;{jax.__version__}" not in committed and f"jax {jax.__version__}" not in committed:
        pytest.skip("it was drawn by another jax, whose compiler makes other schedules")
    assert screenshot_sources.terminal_svg(screenshot_sources.terminal_text()) == committed, (
        "python -m experiments.screenshots"
    )


@pytest.mark.slow
@pytest.mark.h100_aot
def test_pictures_of_the_page_show_what_planning_finds():
    drawn = json.loads(screenshot_sources.PAGE_FIGURES.read_text())
    found = screenshot_sources.page_figures(screenshots.pictured_page().html())
    assert list(found) == list(drawn)
    for name, figures in found.items():
        assert figures == pytest.approx(drawn[name], rel=0.01), "python -m experiments.screenshots --only page"
