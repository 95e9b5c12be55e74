"""What the pictures of the documentation are drawn from, which tests hold against what it is today."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
TERMINAL = IMAGES / "terminal.svg"
NOTEBOOK = ROOT / "experiments" / "notebooks" / "first_steps.ipynb"
DRAWN_FROM = IMAGES / "drawn_from.json"
PAGE_FIGURES = IMAGES / "page.json"
"""What the two steps of the pictured page take, in seconds and bytes."""

_HEADLINES = ("step_s", "exposed_communication_s", "exposed_copy_s", "peak_bytes")
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)

COMMAND = ("explain", "tiny_llama", "--gpu", "h100", "--nodes", "2")
_COLUMNS = 128
_FROM_ELSEWHERE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Fonts that a browser would load over the network."""


def terminal_text() -> str:
    """What the command of the picture says, up to the plan: from there on it says how long planning took."""
    line = [sys.executable, "-m", "jax_deepcompile", *COMMAND]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    return f"$ deepcompile {' '.join(COMMAND)}\n\n{done.stdout.partition('plan: ')[0].rstrip()}"


def terminal_svg(text: str) -> str:
    """``text`` as a terminal shows it; the title says by which jax it was compiled."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(text), soft_wrap=False)
    return _FROM_ELSEWHERE.sub("", console.export_svg(title=f"jax {jax.__version__}", unique_id="terminal"))


def page_figures(page: str) -> dict[str, dict[str, float]]:
    """What the steps that ``page`` shows at first take, in seconds and bytes, by what they are called."""
    found = _DATA.search(page)
    assert found is not None
    data = json.loads(found[1])
    shown = [data["runs"][place] for place in data["shown"]]
    return {run["name"]: {name: run["figures"][name] for name in _HEADLINES} for run in shown}


def sources() -> dict[str, str]:
    """Digests of what the pictures of the page, the trace and the notebook are drawn from."""
    report = ROOT / "jax_deepcompile" / "report"
    page = sorted((report / "page" / "static").iterdir())
    return {"page": _digest(*page), "trace": _digest(report / "chrome_trace.py"), "notebook": _digest(NOTEBOOK)}


def note_sources(*names: str) -> None:
    """Notes that the pictures called so were drawn just now."""
    before = json.loads(DRAWN_FROM.read_text()) if DRAWN_FROM.exists() else {}
    now = sources()
    DRAWN_FROM.write_text(json.dumps(before | {name: now[name] for name in names}, indent=1) + "\n")


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
