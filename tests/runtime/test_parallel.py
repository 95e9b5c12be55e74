import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jax_deepcompile.runtime import parallel
from jax_deepcompile.runtime.parallel import in_parallel, results_of

pytestmark = pytest.mark.pure


def test_results_come_in_the_order_of_the_works():
    def slow_then(value):
        yield value
        time.sleep(0.05 / (value + 1))
        yield -value

    assert in_parallel([slow_then(value) for value in range(9)]) == [[value, -value] for value in range(9)]
    assert in_parallel([]) == []
    assert results_of([lambda value=value: value for value in range(5)]) == list(range(5))


def test_as_many_at_a_time_as_there_are_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    together = threading.Barrier(3)
    assert results_of([lambda: together.wait(5) >= 0] * 6) == [True] * 6


def test_the_first_error_is_raised_and_what_waits_never_begins(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    begun = []

    def fails():
        begun.append("fails")
        raise ValueError("the first")

    with pytest.raises(ValueError, match=r"^the first$"):
        results_of([fails, lambda: time.sleep(0.2), *[lambda: begun.append("later")] * 3])
    time.sleep(0.4)
    assert begun == ["fails"]


def test_work_under_way_ends_with_the_item_it_is_at(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    begun, failed = [], threading.Event()

    def items():
        for item in range(100):
            begun.append(item)
            yield item
            failed.wait(0.5)

    def fails():
        while not begun:
            time.sleep(0.01)
        raise ValueError("at once")
        yield

    with pytest.raises(ValueError, match="at once"):
        in_parallel([items(), fails()])
    failed.set()
    time.sleep(0.2)
    assert len(begun) <= 3


@pytest.mark.parametrize(("caught", "code"), [(False, -signal.SIGINT), (True, 5)], ids=["uncaught", "caught"])
def test_ctrl_c_is_heard_while_workers_are_inside_native_code(tmp_path, caught: bool, code: int):
    """A program that was started where Ctrl-C is ignored, as in the background of a shell, would ignore it, too."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import ctypes, importlib.util, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
spec = importlib.util.spec_from_file_location("parallel", {str(Path(parallel.__file__))!r})
parallel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(parallel)
def compiles():
    until = time.monotonic() + {4.0 if caught else 30.0}
    while time.monotonic() < until:
        ctypes.CDLL(None).usleep(500_000)
def waits():
    try:
        print("ready", flush=True)
        parallel.results_of([compiles] * 8)
    except KeyboardInterrupt:
        print("heard", time.monotonic(), flush=True)
        {"sys.exit(5)" if caught else "raise"}
waits()
""")
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    word, heard_at = process.stdout.readline().split()
    process.communicate(timeout=20)
    assert process.returncode == code
    assert word == "heard"
    assert float(heard_at) - began < 0.5
    assert time.monotonic() - began < (8 if caught else 2)
