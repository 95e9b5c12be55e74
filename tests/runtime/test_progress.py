"""What long work says: on a terminal a line, after a while; nothing anywhere else."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time

import pytest

from jax_deepcompile.runtime import progress
from jax_deepcompile.runtime.progress import Progress

pytestmark = pytest.mark.pure


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch) -> Terminal:
    """Called by the tests themselves: pytest has its own standard error for each phase of one."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "PATIENCE_S", 0.05)
    monkeypatch.setenv("TERM", "xterm")
    return shown


def wait_for(text: str, shown: Terminal) -> None:
    until = time.monotonic() + 10
    while text not in shown.getvalue():
        assert time.monotonic() < until, shown.getvalue()
        time.sleep(0.01)


def test_work_that_says_nothing_for_long_is_named(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    with Progress("plan it"):
        wait_for("plan it", terminal)
    assert "\x1b[?25h" in terminal.getvalue(), "the cursor is back"


def test_work_within_work_shares_its_line_and_names_are_text(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    with Progress("fit it") as outer:
        outer.say("tracing")
        with Progress("8 examples") as inner:
            inner.say("[bold]x[/bold]")
            wait_for("fit it: 8 examples: [bold]x[/bold]", terminal)
        wait_for("fit it: tracing", terminal)
    assert sum(isinstance(each, threading.Timer) for each in threading.enumerate()) == 0


def test_what_is_quick_leaves_no_trace(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    monkeypatch.setattr(progress, "PATIENCE_S", 60.0)
    with Progress("plan it") as quick:
        quick.say("tracing")
    assert "plan" not in terminal.getvalue()


def test_a_file_is_told_nothing_and_the_log_all(capfd, caplog, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with caplog.at_level(logging.INFO, "jax_deepcompile"), Progress("plan it") as told:
        told.say("tracing")
        time.sleep(0.1)
    assert "plan it: tracing" in caplog.text
    assert capfd.readouterr().err == ""
