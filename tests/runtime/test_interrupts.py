"""Processes of their own, for these end; without JAX, so that each takes a moment only."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jax_deepcompile.runtime import interrupts

pytestmark = pytest.mark.pure

HEAD = f"""
import ctypes, importlib.util, signal, sys, time
spec = importlib.util.spec_from_file_location("interrupts", {interrupts.__file__!r})
interrupts = importlib.util.module_from_spec(spec)
sys.modules["interrupts"] = interrupts
spec.loader.exec_module(interrupts)
inside_xla = ctypes.CDLL(None).sleep  # no Python handler runs in it, either
def go_on(seconds):
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        inside_xla(1 if left > 1 else 0)
        time.sleep(0 if left > 1 else left)
def foreign():  # sleeps through signals, as XLA does
    libc = ctypes.CDLL(None)
    mask = (ctypes.c_ulong * 16)(*[2**64 - 1] * 16)
    libc.pthread_sigmask(0, mask, None)
    inside_xla(30)
watch = interrupts.Watch(patience_s=1.0)
def ready():
    print("ready", flush=True)
"""


def ended(body: str, *numbers: int, tmp_path: Path) -> tuple[int, float, str]:
    """Exit code, seconds from the first signal to the end, and what was said on stderr."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + body)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.3)
    _, said = process.communicate(timeout=20)
    return process.returncode, time.monotonic() - began, said


CTRL_C = (signal.SIGINT, 130, "deepcompile: Ctrl-C: stopped\n")
SIGTERM = (signal.SIGTERM, 143, "deepcompile: SIGTERM: stopped\n")


@pytest.mark.parametrize(
    ("busy", "number", "code", "said"),
    [
        ("foreign()", *CTRL_C),
        ("foreign()", *SIGTERM),
        ("time.sleep(30)", *SIGTERM),
        ("go_on(30)", *CTRL_C),
        ("while True: pass", *SIGTERM),
    ],
)
def test_the_process_is_gone_within_two_seconds(tmp_path, busy: str, number: int, code: int, said: str):
    body = f"""
try:
    with watch.armed():
        ready()
        {busy}
except interrupts.StoppedBySignal as stopped:
    watch.end(stopped.number)
"""
    found_code, seconds, found = ended(body, number, tmp_path=tmp_path)
    assert (found_code, found) == (code, said)
    assert seconds < 2


def test_clean_up_that_hangs_is_not_waited_for(tmp_path):
    body = """
with watch.armed():
    try:
        ready()
        time.sleep(30)
    finally:
        foreign()
"""
    code, seconds, said = ended(body, signal.SIGINT, tmp_path=tmp_path)
    assert (code, said) == (130, "deepcompile: Ctrl-C: stopped\n")
    assert seconds < 2


@pytest.mark.parametrize("then", ["raise ImportError", "pass", "sys.exit(3)"])
def test_what_a_signal_became_is_still_a_signal(tmp_path, then: str):
    """Loading an extension module makes another error of what is raised in it, and some code catches everything."""
    body = f"""
try:
    with watch.armed():
        try:
            ready()
            time.sleep(30)
        except BaseException:
            {then}
except interrupts.StoppedBySignal as stopped:
    watch.end(stopped.number)
"""
    code, _, said = ended(body, signal.SIGINT, tmp_path=tmp_path)
    assert (code, said) == (130, "deepcompile: Ctrl-C: stopped\n")


def test_while_it_loads_nothing_is_raised(tmp_path):
    body = """
watch.is_loading = True
with watch.armed():
    try:
        ready()
        time.sleep(30)
    finally:
        print("unwound", file=sys.stderr, flush=True)
"""
    code, seconds, said = ended(body, signal.SIGTERM, tmp_path=tmp_path)
    assert (code, said) == (143, "deepcompile: SIGTERM: stopped\n")
    assert seconds < 1


WAITING = """
with watch.armed():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    watch.waits_for = "the checkpoint after step 3"
    ready()
    go_on({seconds})
    watch.waits_for = None
sys.exit(7)
"""


def test_what_is_worth_waiting_for_is_waited_for(tmp_path):
    code, seconds, said = ended(WAITING.format(seconds=0.7), signal.SIGTERM, tmp_path=tmp_path)
    assert (code, said) == (7, "")
    assert 0.5 < seconds < 2


@pytest.mark.parametrize(
    ("numbers", "code", "said"),
    [
        ([signal.SIGINT, signal.SIGINT], 130, "deepcompile: Ctrl-C: stopped without the checkpoint after step 3\n"),
        ([signal.SIGINT, signal.SIGTERM], 143, "deepcompile: SIGTERM: stopped without the checkpoint after step 3\n"),
        (
            [signal.SIGTERM],
            143,
            "deepcompile: SIGTERM: stopped without the checkpoint after step 3, which took more than 1 s\n",
        ),
    ],
)
def test_but_not_past_a_second_signal_or_for_ever(tmp_path, numbers: list[int], code: int, said: str):
    found_code, seconds, found = ended(WAITING.format(seconds=30), *numbers, tmp_path=tmp_path)
    assert (found_code, found) == (code, said)
    assert seconds < 2


def test_outside_the_main_thread_signals_are_left_alone(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def arm():
        with interrupts.Watch().armed():
            found.extend(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))

    found: list = []
    thread = threading.Thread(target=arm)
    thread.start()
    thread.join()
    assert found == before


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with interrupts.Watch().armed():
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] != before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
