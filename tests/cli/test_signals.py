"""Signals while the command loads what it needs: in a process of its own each, for they end it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

SCRIPT = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Ignoring:
    def __del__(self):  # errors in here are ignored, as in JAX's callback of the garbage collector
        os.kill(os.getpid(), signal.{signal})
        for _ in range(3): pass

class Sends(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            print("sent", flush=True)
            {send}

sys.meta_path.insert(0, Sends())
from jax_deepcompile.cli.main import main
sys.exit(main(["explain", "slow.py:make"]))
"""
IN_PYTHON = "os.kill(os.getpid(), signal.{signal})"
IGNORED = "Ignoring()"


CTRL_C = (signal.SIGINT, 130, "deepcompile: Ctrl-C: stopped\n")
SIGTERM = (signal.SIGTERM, 143, "deepcompile: SIGTERM: stopped\n")


@pytest.mark.parametrize(
    ("module", "send", "number", "code", "said"),
    [
        ("tyro", IN_PYTHON, *CTRL_C),
        ("jax", IN_PYTHON, *SIGTERM),
        ("jax._src.lib", IGNORED, *CTRL_C),
        ("jax_deepcompile.api", IGNORED, *SIGTERM),
    ],
)
def test_a_signal_while_it_loads_ends_it(tmp_path: Path, module: str, send: str, number: int, code: int, said: str):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)\n")
    script = tmp_path / "script.py"
    named = {"signal": signal.Signals(number).name}
    script.write_text(SCRIPT.format(module=module, send=send.format(**named), **named))
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "sent\n"
    began = time.monotonic()
    _, found = process.communicate(timeout=30)
    assert (process.returncode, found) == (code, said)
    assert time.monotonic() - began < 2
