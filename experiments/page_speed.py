"""How fast a page of `deepcompile explain --html FILE` opens and pans in headless Chromium, drawn without a GPU.

``python -m experiments.page_speed page.html`` prints its bytes, how many operations it draws, milliseconds until they
are drawn, and of a frame that pans the timeline at several widths: frames of up to 33 ms are 30 a second.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.screenshots import found_chromium

SHOWN = (0.5, 0.1, 0.02)
"""Shares of the step that are seen at a time."""

FRAMES = 40

_MEASURED = """
(async () => {
  const opened_ms = performance.now();
  const drawn = async () => {
    for (let turn = 0; turn < 6; turn++) await null;
    document.querySelectorAll("canvas").forEach((each) => each.getContext("2d").getImageData(0, 0, 1, 1));
  };
  const frames_ms = {};
  for (const share of SHOWN) {
    const width = view.step * share;
    show(0.3 * (view.step - width), 0.3 * (view.step - width) + width);
    await drawn();
    frames_ms[share] = [];
    for (let frame = 0; frame < FRAMES; frame++) {
      const began = performance.now();
      pan(0.02);
      await drawn();
      frames_ms[share].push(performance.now() - began);
    }
  }
  const operations = view.charts[0].lanes.reduce((sum, each) => sum + each.lane.starts.length, 0);
  document.body.append(element("pre", JSON.stringify({opened_ms, operations, frames_ms}), {id: "measured"}));
})()
"""


def main() -> int:
    """The exit code: 2 without Chromium."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    page = parser.parse_args().page
    chromium = found_chromium()
    if chromium is None:
        print("page_speed: no Chromium is installed; Debian has it as the package chromium", file=sys.stderr)
        return 2
    measured = measure(chromium, page.read_text(encoding="utf-8"))
    print(f"{page}: {page.stat().st_size / 1024:.0f} KiB, {measured['operations']:,} operations")
    print(f"opened in {measured['opened_ms']:.0f} ms")
    for share, frames_ms in measured["frames_ms"].items():
        median, late = sorted(frames_ms)[FRAMES // 2], sorted(frames_ms)[FRAMES * 19 // 20]
        print(f"pans {float(share):.0%} of the step in {median:.1f} ms a frame, 95 % of them in {late:.1f} ms")
    return 0


def measure(chromium: str, page: str) -> dict:
    """What the script on ``page`` measured, in milliseconds."""
    script = _MEASURED.replace("SHOWN", json.dumps(SHOWN)).replace("FRAMES", str(FRAMES))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
        line = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,1100", "--dump-dom"]
        shown = subprocess.run([*line, file.as_uri()], capture_output=True, text=True, check=True, timeout=300).stdout
    found = re.search(r'<pre id="measured">(.*?)</pre>', shown, re.S)
    assert found is not None, "the page did not get to its end"
    return json.loads(html.unescape(found[1]))


if __name__ == "__main__":
    sys.exit(main())
