"""Pictures of page, notebook and terminal for the documentation.

``python -m experiments.screenshots`` draws what ``--only`` names, and all three without it, into ``docs/images``:

* page: plans Llama-3-70B for 32 H100s that are not here, in two minutes or so, writes its page beside ``jax.jit``'s to
  ``--page FILE``, and takes pictures of it; ``--again`` takes them of the page that is there.
* notebook: as it is committed, by nbconvert (``pip install nbconvert``).
* terminal: what a command says, as an SVG.

Pictures are taken by a headless Chromium. ``experiments.screenshot_sources`` says what they are drawn from; a test
whether that has changed since.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from matplotlib import image

import jax_deepcompile as deepcompile
from experiments.bench.steps import MODELS, training_step
from experiments.bench.systems import CUBLAS_GEMMS, MEMORY_LIMIT, tokens_of
from experiments.bench.workload import Workload
from experiments.screenshot_sources import IMAGES, NOTEBOOK, TERMINAL, note_sources, terminal_svg, terminal_text

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


def main() -> int:
    """The exit code: 2 without Chromium."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=Path("page.html"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--only", nargs="+", choices=("page", "notebook", "terminal"))
    asked = parser.parse_args()
    wanted = asked.only or ("page", "notebook", "terminal")
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if chromium is None and set(wanted) != {"terminal"}:
        print("screenshots: no Chromium is installed; Debian has it as the package chromium", file=sys.stderr)
        return 2
    if "page" in wanted and not asked.again:
        write_page(Workload("llama3_70b_cudnn", 4096), asked.page)
    taken = [take(str(chromium), asked.page, name) for name in PICTURES if name.startswith("page") and "page" in wanted]
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


def as_html(notebook: Path, folder: Path) -> Path:
    """A notebook as it is committed, in a file of ``folder``."""
    line = ["jupyter-nbconvert", "--to", "html", "--log-level", "ERROR", "--output-dir", str(folder)]
    subprocess.run([*line, str(notebook)], check=True)
    return folder / f"{notebook.stem}.html"


def write_page(workload: Workload, page: Path) -> None:
    """The page of a workload as planned and as ``jax.jit`` runs it."""
    gradients, state = MODELS[workload.model](False)
    mesh = workload.cluster.make_mesh()
    step = deepcompile.shard(training_step(gradients), mesh, memory_limit=MEMORY_LIMIT)
    given = state, tokens_of(workload, mesh)
    jit = step.lower_gspmd(*given).compile(compiler_options={**CUBLAS_GEMMS})
    step.trace(*given).page({"jit": deepcompile.simulate(jit, mesh)}).write(page)


def take(chromium: str, page: Path, name: str) -> Path:
    """A picture of ``page``: in a frame, as a window is never as narrow as a phone."""
    width, height, scheme, done = PICTURES[name]
    with tempfile.TemporaryDirectory() as scratch:
        shown, frame = Path(scratch) / "page.html", Path(scratch) / "frame.html"
        script = f"<script>{done}</script></body>"
        shown.write_text(page.read_text(encoding="utf-8").replace("</body>", script), encoding="utf-8")
        style = f"border:0;width:{width}px;height:{height}px"
        frame.write_text(f"<body style='margin:0'><iframe src='page.html' style='{style}'></iframe>")
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--window-size={max(width, 500)},{height + 100}",
        ]
        flags += [f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=5000"]
        picture = Path(scratch) / "picture.png"
        subprocess.run(
            [chromium, *flags, f"--screenshot={picture}", frame.as_uri()], check=True, capture_output=True, timeout=120
        )
        return cut(picture, IMAGES / f"{name}.png", width, height)


def cut(picture: Path, to: Path, width: int, height: int) -> Path:
    """The upper left of ``picture``."""
    image.imsave(to, image.imread(picture)[:height, :width])
    return to


if __name__ == "__main__":
    sys.exit(main())
