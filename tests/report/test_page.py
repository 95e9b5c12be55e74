"""The page: what it draws adds up, whatever names hold is text, and nothing is loaded from elsewhere."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from jax_deepcompile.costs.held import Holds, held_at_peak
from jax_deepcompile.costs.simulation import Event, Simulation
from jax_deepcompile.costs.simulator import simulate
from jax_deepcompile.costs.streams import Part, Stream
from jax_deepcompile.planner.plan import Plan, Prediction, Record
from jax_deepcompile.planner.session import Planned
from jax_deepcompile.profilers.measured_run import measured_run
from jax_deepcompile.report.page.memory import blocks, live_bytes, position_times
from jax_deepcompile.report.page.page import Page, page_of, ways
from jax_deepcompile.report.page.placements import leaves
from jax_deepcompile.report.page.runs import ARGUMENTS, NO_LINE, REST, Run, category, line_seconds, run_data
from jax_deepcompile.report.peak import batch_of, role_of, vocabularies
from tests.costs.snippets import COSTS, module
from tests.costs.test_simulator import BODY, START, WHILE
from tests.report.pages import SHAPES, data_of, step, traced

pytestmark = pytest.mark.pure

SHAPES_OF_LAYERS = {"embed": (64,), "layers": (64, 64)}

HOSTILE = "</script><script>alert(1)</script><!-- ' \" & \u2028"
LINE = 'metadata={op_name="step/dot_general" source_file="train.py" source_line=7}'


@pytest.fixture(scope="module")
def run() -> Simulation:
    """Ten trips of a copy, 0.5 s, beside a gather of 0.75 s at line 7."""
    return simulate(module(WHILE, BODY.replace(START, f"{START}, {LINE}")), COSTS)


@pytest.fixture(scope="module")
def page(run) -> Page:
    """A planned step, before and after one change, with names that nobody expects."""
    found = traced(plan=Plan(""))
    prediction = Prediction(run.step_s, run.compute_s, 0.0, 0.0, run.peak_bytes)
    record = Record("prefetch", HOSTILE, prediction, prediction, True, "7 s to 7 s", 0.1)
    (first, *others) = run.timeline
    named = replace(run, timeline=(replace(first, op_name=HOSTILE, source=f"{HOSTILE}:1"), *others))
    plan = Plan("", prediction=prediction, records=(record,))
    program, way = replace(found.sharded, name=HOSTILE), (("", run), ("prefetch", named))
    planned = Planned(plan, program, way=way, limit_bytes=10**6, origin=HOSTILE)
    runs = {name: Run(step, found.sharded) for name, step in ways(planned).items()}
    return page_of(planned, found.sharded, runs, HOSTILE, "device")


def test_lines_add_up_to_the_step(run):
    lines = line_seconds(Run(run, traced(plan=Plan("")).sharded))
    assert lines == {NO_LINE: [5.0, 0.0], "train.py:7": [0.0, 2.5], REST: [0.0, 0.0]}
    assert sum(map(sum, lines.values())) == pytest.approx(run.step_s)


def test_what_no_line_has_is_said(run):
    lines = line_seconds(Run(replace(run, step_s=8.0, waits=()), traced(plan=Plan("")).sharded))
    assert lines == {NO_LINE: [5.0, 0.0], REST: [0.0, 3.0]}


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (Event(Stream.COMPUTE, "fusion.remat", 0, 1, op_name="layers/dot_general", part=Part.AGAIN), "computed again"),
        (Event(Stream.ALL_GATHER, "gather", 0, 1, op_name="dot_general"), "all-gather"),
        (Event(Stream.ALL_GATHER, "gather", 0, 1, is_within_node=True), "all-gather in a node"),
        (Event(Stream.TO_HOST, "copy", 0, 1), "to host"),
    ],
)
def test_categories(event, expected):
    assert category(event) == expected


def test_a_loop_is_in_the_data_once_with_its_trips(run):
    data = run_data("planned", Run(run, traced(plan=Plan("")).sharded))
    assert data["loops"] == [["loop", -1, 10, 0, 0, 750_000_000]]
    assert [event[:4] for event in data["events"]] == [[0, 750_000_000, 0, 10], [0, 500_000_000, 0, 10]]
    assert data["waits"] == [[500_000_000, 750_000_000, 0, 0, "all-gather"]]
    assert data["collectives"] == [["all-gather in a node", 10, 7.5, 2.5, 10 * 75_000]]
    assert "mfu" not in data["figures"]


def test_memory_is_where_the_schedule_is(run):
    times = dict(zip(run.memory.names, position_times(run), strict=True))
    assert (times["copy"], times["done"], times["init"]) == (0.0, 0.75, 0.0)
    assert max(size for _, _, size in live_bytes(run)) == run.memory.live_peak_bytes
    found = list(blocks(run, (), frozenset()))
    assert {each.loop for each in found} <= {"", "loop"}
    assert all(0 <= each.begin_s < each.end_s <= run.step_s for each in found)
    assert any(each.made_by == "start" and each.role == Holds.GATHERED and each.loop == "loop" for each in found)


@pytest.mark.cpu_mesh
def test_blocks_are_for_what_explain_says_at_the_peak_of_unrolled_layers():
    def step(params, tokens):
        def loss(params):
            x = params["embed"][tokens]
            for w in params["layers"]:
                x = x + jnp.tanh(x @ w)
            return jnp.mean(jax.nn.logsumexp(x @ params["embed"].T, -1))

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    params = {"embed": jax.ShapeDtypeStruct((512, 64), jnp.float32)}
    params["layers"] = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6
    tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    found = deepcompile.shard(step, {"fsdp": 8}, state_argnums=0).trace(params, tokens)
    run = deepcompile.simulate(found.lower().compile(), found.compilation.context.use.mesh)
    batch, words = batch_of(found.program), vocabularies(found.program)
    peak = position_times(run)[run.memory.live_bytes.index(run.memory.live_peak_bytes)]
    said, drawn = Counter(), Counter()
    for each in held_at_peak(run.module, run.memory, batch):
        said[role_of(each, words)] += each.bytes * (each.bytes > 100)
    for block in blocks(run, batch, words):
        drawn[block.role] += block.bytes * (block.begin_s <= peak < block.end_s)
    assert +drawn == +said
    assert {"logits", "kept for the backward pass", "gathered from other devices"} <= (+drawn).keys()


@pytest.mark.cpu_mesh
def test_what_layers_begin_with_is_of_the_layers_which_make_all_but_the_first():
    def step(params, tokens):
        def layer(x, w):
            return x + jnp.tanh(x @ w), None

        def loss(params):
            x = params["embed"][tokens]
            return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params["layers"])[0] ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    params = {name: jax.ShapeDtypeStruct((64, *shape), jnp.float32) for name, shape in SHAPES_OF_LAYERS.items()}
    found = deepcompile.shard(step, {"fsdp": 8}, state_argnums=0).trace(params, jax.ShapeDtypeStruct((16, 512), int))
    run = deepcompile.simulate(found.lower().compile(), found.compilation.context.use.mesh)
    kept = [each for each in held_at_peak(run.module, run.memory, batch_of(found.program)) if each.holds == Holds.KEPT]
    assert kept[0].dims == (64, 2, 512, 64)
    assert "/while/body/" in kept[0].op_name


def test_a_program_that_is_not_compiled_has_no_blocks(run):
    played = replace(run, memory=replace(run.memory, loops=(), held=()), module=None)
    assert (list(blocks(played, (), frozenset())), list(live_bytes(played))) == ([], [])


def test_leaves_say_where_they_are_and_what_gathers_them():
    found = traced().sharded
    (parameter, batch) = leaves(found, found)
    assert parameter == {
        "name": "w",
        "role": "param",
        "type": "float32[4,16,16]",
        "placement": "shard(1: fsdp)",
        "bytes": 4 * 2 * 16 * 4,
        "memory": "device",
        "gathered": ["w @forward", "w @backward"],
    }
    assert (batch["role"], batch["gathered"]) == ("batch", [])


def test_ways_are_named_by_what_made_them(run):
    planned = Planned(Plan(""), traced(plan=Plan("")).sharded)
    made = replace(planned, way=(("", run), ("prefetch", run), ("unshard", run)))
    assert list(ways(made)) == ["as divided", "after 1. prefetch", "planned"]
    assert ways(planned) == {}
    assert list(ways(replace(planned, way=(("", run),)))) == ["planned"]


def test_nothing_is_loaded_from_elsewhere(page):
    html = page.html()
    assert "default-src 'none'" in html
    assert not re.search(r"\b(src|href)\s*=|url\(|@import|\bimport\b[\s(]|\bfetch\(|XMLHttpRequest|WebSocket", html)
    assert "Copyright (c) 2022 Leon Sorokin" in html
    assert len(html) < 200_000


def test_names_are_text_whatever_they_hold(page):
    html = page.html()
    assert html.count("<script") == html.count("</script>") == 3
    assert "alert(1)</script>" not in html
    data = data_of(html)
    assert data["origin"] == data["records"][0]["decision"] == HOSTILE
    assert HOSTILE in data["runs"][1]["words"]


def test_a_page_is_written_and_has_a_short_repr(page, tmp_path):
    path = page.write(tmp_path / "page.html")
    assert path.read_text(encoding="utf-8") == page.html()
    assert len(repr(page)) < 400
    with pytest.raises(OSError, match="nowhere"):
        page.write(tmp_path / "nowhere" / "page.html")


@pytest.mark.cpu_mesh
def test_a_plan_that_was_not_made_here_is_compiled_for_its_page(run):
    found = traced(plan=Plan("")).page({"jit": run})
    assert [each["name"] for each in found.data["runs"]] == ["jit", "as divided", "planned"]
    planned = found.data["runs"][-1]
    assert planned["figures"]["step_s"] > 0
    assert (
        sum(planned["line_bytes"].values()) == planned["figures"]["peak_bytes"] > planned["line_bytes"][ARGUMENTS] > 0
    )
    assert min(planned["line_bytes"].values()) >= 0
    assert any("tests/report/pages.py:" in line for line in planned["line_bytes"])
    alone = traced(plan=Plan("")).page().data
    assert ([each["name"] for each in alone["runs"]], alone["shown"]) == (["as divided", "planned"], [1, 0])
    assert alone["device"] == "device"


@pytest.mark.cpu_mesh
def test_what_is_not_compiled_may_stand_beside_it():
    found = traced(plan=Plan(""))
    before = deepcompile.simulate(found, found.compilation.context.use.mesh)
    first, *_ = found.page({"before compilation": before}).data["runs"]
    assert (first["scheduled"], first["memory"]["live"], first["memory"]["blocks"]) == (False, [], [])
    assert first["line_bytes"] == {}
    assert sum(map(sum, first["lines"].values())) == pytest.approx(first["figures"]["step_s"], abs=1e-8)


@pytest.mark.cpu_mesh
def test_another_step_beside_it_has_figures_of_its_own():
    """Twice the batch, as long a step: twice the examples."""
    found, (params, batch) = traced(plan=Plan("")), SHAPES
    twice = jax.ShapeDtypeStruct((2 * batch.shape[0], *batch.shape[1:]), batch.dtype)
    larger = deepcompile.shard(step, {"fsdp": 8}, state_argnums=0, plan=Plan("")).trace(params, twice)
    other, _, own = found.page({"larger": larger}).data["runs"]
    examples = [each["figures"]["examples_per_s"] * each["figures"]["step_s"] for each in (other, own)]
    assert examples[0] == pytest.approx(2 * examples[1])


def test_without_devices_there_is_nothing_to_simulate():
    found = deepcompile.shard(step, AbstractMesh((8,), ("fsdp",)), state_argnums=0).trace(*SHAPES)
    with pytest.raises(errors.ArgumentError, match="page"):
        found.page()


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

USE = """<script>
addEventListener("error", (event) => { document.title = `failed: ${event.message}`; });
const said = [];
for (const key of ["ArrowDown", "ArrowDown", ".", "+", "ArrowRight", "0"]) {
  document.getElementById("timeline").dispatchEvent(new KeyboardEvent("keydown", { key }));
  said.push(document.getElementById("details").textContent.split("\\n")[0]);
}
for (const key of [".", ".", ",", "ArrowUp", "ArrowDown"]) {
  document.getElementById("memory").dispatchEvent(new KeyboardEvent("keydown", { key }));
  said.push(document.getElementById("details").textContent.split("\\n").slice(0, 2).join(": "));
}
const [, memory] = view.charts;
said.push(memory.find(view.step / 2, 1).text.split("\\n")[0], `${view.from} ${view.to} ${view.step}`);
document.body.append(element("pre", said.join("\\n"), { id: "said" }));
</script></body>"""


IN_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed; Debian has it as the package chromium"
)


def drawn(page: Page, use: str, tmp_path: Path) -> str:
    """The document after ``use`` has run in it."""
    return drawn_text(page.html().replace("</body>", use), tmp_path)


def drawn_text(text: str, tmp_path: Path) -> str:
    path = tmp_path / "page.html"
    path.write_text(text, encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        [str(CHROMIUM), *flags, path.as_uri()], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    return done.stdout


@pytest.mark.slow
@IN_CHROMIUM
def test_without_a_limit_none_is_drawn_and_what_was_not_measured_is_a_dash(run, tmp_path):
    found, ran = traced(plan=Plan("")), measured_run(run.timeline, run)
    planned = Planned(Plan(""), found.sharded, way=(("", run),))
    runs = {"on CPUs": Run(ran, found.sharded), "planned": Run(run, found.sharded)}
    use = """<script>
    addEventListener("error", (event) => { document.title = `failed: ${event.message}`; });
    const both = page.runs.map(prepare);
    document.body.append(element("pre", `${isLimitDrawn(both)} ${both[0].blocks.starts.length}`, { id: "said" }));
    document.getElementById("run-a").value = 0;
    document.getElementById("run-b").value = -1;
    draw();
    document.getElementById("run-a").value = 1;
    document.getElementById("run-b").value = 0;
    draw();
    </script></body>"""
    assert not {"peak_bytes", "sent_bytes", "bound_s"} & run_data("on CPUs", runs["on CPUs"])["figures"].keys()
    dom = drawn(page_of(planned, found.sharded, runs, "CPU", "device"), use, tmp_path)
    assert "<title>failed: " not in dom
    assert '<pre id="said">false 0</pre>' in dom
    assert "run on CPUs: its seconds are measured · all other seconds are simulated from XLA's schedule" in dom
    assert re.search(
        r"<td class=\"\">peak memory</td><td class=\"number\">[^<]*iB</td><td class=\"number\">—</td>", dom
    )
    assert re.search(r"<td class=\"line\">peak</td><td class=\"number\">[^<]*iB</td><td class=\"number\">—</td>", dom)


@pytest.mark.slow
@IN_CHROMIUM
def test_it_draws_in_headless_chromium(page, tmp_path):
    dom = drawn(page, USE, tmp_path)
    assert "<title>failed: " not in dom
    assert dom.count("<canvas") == 2
    assert "<script>alert(1)" not in dom
    (said,) = re.findall(r'<pre id="said">(.*?)</pre>', dom, re.DOTALL)
    compute, exposed, next_exposed, _, _, _, *walked, argument, shown = said.split("\n")
    assert compute.startswith("planned: elementwise and other: copy")
    assert exposed == next_exposed == "planned: compute waits for all-gather in a node start"
    assert [each.rpartition(": ")[0] for each in walked] == [
        *4 * ["planned: gathered from other devices, 97.7 KiB, by start"],
        "planned: results with memory of their own, 24 B",
    ]
    assert [each.rpartition(" from ")[2] for each in walked] == ["3.75 s", "4.5 s", "3.75 s", "3.75 s", "0 s"]
    assert argument.startswith("planned: ")
    assert shown == "0 7500000000 7500000000"
    assert '<td class="line">step</td>' in dom
    assert '<td class="line">peak</td>' in dom


@pytest.mark.slow
@IN_CHROMIUM
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_but_what_scrolls_by_itself_is_wider_than_the_screen(page, width, tmp_path):
    frame = f"""<iframe id="shown" width="{width}" height="900" srcdoc="{html.escape(page.html())}"></iframe>
    <script>document.getElementById("shown").onload = (event) => {{
      const shown = event.target.contentDocument.documentElement;
      document.title = `${{shown.scrollWidth}} of ${{shown.clientWidth}}`;
    }};</script></body>"""
    (wide,) = re.findall("<title>(.*?) of", drawn_text(f"<body>{frame}", tmp_path))
    assert 0 < int(wide) <= width
