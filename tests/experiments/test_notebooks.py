"""The notebooks run from their first cell to their last, and say little: as committed, and now."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "experiments" / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
MOST_CHARACTERS = 8000
MOST_FOLDED_CHARACTERS = 20_000
MOST_IMAGE_CHARACTERS = 60_000
OF_A_MACHINE = re.compile(r"/(tmp|home|root|work|usr|Users)/|site-packages|0x[0-9a-f]{6}|Warning|WARNING")


OF_THE_PLUGIN = re.compile("WARNING: All log messages before absl|.* Could not find cuda drivers|$")
"""What JAX's CUDA plugin says, before anybody can silence it, where there is no GPU."""


FEW_PROPOSALS = "keep_activations,unshard,deepen_loops"
"""What planning is told to leave out, where that it is planned is what matters."""


def texts(notebook) -> list[str]:
    """What the cells print and end with; each image is only looked at for its size."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert output.output_type != "error", output
            if output.get("name") == "stderr":
                assert all(OF_THE_PLUGIN.match(line) for line in output.text.splitlines()), output.text
                continue
            data = output.get("data", {})
            assert len(data.get("image/png", "")) < MOST_IMAGE_CHARACTERS
            assert len(data.get("text/html", "")) < MOST_FOLDED_CHARACTERS
            found += [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
    return [text for text in found if text]


def require_short(notebook) -> str:
    shown = texts(notebook)
    assert all(len(text) < MOST_CHARACTERS for text in shown if "</details>" not in text)
    return "\n".join(shown)


def run(name: str) -> str:
    notebook = nbformat.read(FOLDER / name, as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(FOLDER)}}).execute()
    return require_short(notebook)


@pytest.mark.pure
@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_is_a_whole_run_that_names_no_machine(name: str):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    shown = require_short(notebook)
    assert not OF_A_MACHINE.search(shown), OF_A_MACHINE.search(shown)
    assert "\\n" not in shown.replace("\\n'", "")


@pytest.mark.cpu_mesh
def test_first_steps(monkeypatch):
    monkeypatch.setenv("STEPS", "6")
    shown = run("first_steps.ipynb")
    assert "train_step on fsdp=8" in shown
    assert "gradient accumulation: 4 microbatches" in shown
    assert "True" in shown.splitlines()


@pytest.mark.h100_aot
def test_seventy_billion_on_a_laptop(monkeypatch):
    """With two layers on 8 GPUs, and few proposals; the whole model is what is committed."""
    for name, value in {"LAYERS": "2", "NODES": "1", "MORE_NODES": "2", "LIMITS_GIB": "72", "SEQUENCES": "256"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DEEPCOMPILE_DISABLE", FEW_PROPOSALS)
    shown = run("seventy_billion.ipynb")
    assert "ShardedStep" not in shown
    assert "expected step  not simulated" not in shown
    assert "Simulation of XLA's schedule" in shown
    assert "Simulation before compilation" in shown
    assert "tokens/s/GPU, simulated" in shown


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param(
            "my_own_pass", ["metrics_last: metrics are computed last, accepted: ", "[True, True]"],
            marks=pytest.mark.cpu_mesh,
        ),
        pytest.param(
            "anatomy_of_a_plan", ["as planned, simulated", "loop layers @backward: ", "pipeline_loops accepted"],
            marks=pytest.mark.h100_aot,
        ),
        pytest.param("what_my_gpu_says", ["ms measured", "trace.rank7.json"], marks=pytest.mark.cpu_mesh),
    ],
)  # fmt: skip
def test_a_notebook_says_what_it_is_about(name: str, says: list[str], monkeypatch):
    if name == "anatomy_of_a_plan":
        monkeypatch.setenv("DEEPCOMPILE_DISABLE", FEW_PROPOSALS)
    shown = run(f"{name}.ipynb")
    assert [each for each in says if each not in shown] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "what_my_gpu_says.ipynb"])
def test_what_is_committed_is_what_a_run_says(name: str):
    """In words: figures that are measured differ from run to run, and so may what a profile finds."""
    committed = "\n".join(texts(nbformat.read(FOLDER / name, as_version=4)))
    words = re.compile("[A-Za-z_]{3,}")
    assert set(words.findall(run(name))) == set(words.findall(committed))
