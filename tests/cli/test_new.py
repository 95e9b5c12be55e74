"""What ``deepcompile new`` writes works, and overwrites nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from jax_deepcompile.cli import main as cli

NAMES = {"README.md", "config.py", "first_run.ipynb", "step.py", "test_step.py"}
LINT = ["--select", "E,F,I,B,UP,SIM,RUF,C4,PIE,PT,RET", "--line-length", "120"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert cli.main(["new", str(tmp_path / "mine")]) == 0
    return tmp_path / "mine"


def run(folder: Path, *command: str) -> str:
    """In a process that is as the user's: it makes its devices itself."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.pure
def test_it_writes_its_files_well_formed_and_says_what_is_next(tmp_path: Path, capsys):
    folder = tmp_path / "new" / "mine"
    assert cli.main(["new", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == NAMES
    assert "deepcompile train config.py:CONFIG" in capsys.readouterr().out
    run(folder, "ruff", "check", "--isolated", *LINT, ".")
    run(folder, "ruff", "format", "--isolated", "--check", "--line-length", "120", ".")


@pytest.mark.pure
@pytest.mark.parametrize("there", ["step.py", "first_run.ipynb"])
def test_a_file_that_is_there_is_left_and_nothing_is_written(tmp_path: Path, capsys, there: str):
    (tmp_path / there).write_text("mine")
    assert cli.main(["new", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"deepcompile: {tmp_path / there} would be overwritten; name another folder.\n"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.pure
def test_a_folder_with_other_files_may_be_named(tmp_path: Path):
    (tmp_path / "LICENSE").write_text("mine")
    assert cli.main(["new", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == NAMES | {"LICENSE"}


@pytest.mark.slow
@pytest.mark.cpu_mesh
def test_its_test_passes(folder: Path):
    assert "1 passed" in run(folder, "pytest", "-q", "-p", "no:cacheprovider")


@pytest.mark.slow
@pytest.mark.cpu_mesh
def test_it_trains_and_is_explained(folder: Path):
    run(folder, "jax_deepcompile", "train", "config.py:CONFIG", "--out", "run")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["held_out_loss"] < summary["unigram_entropy"] - 0.3
    assert "train_step on fsdp=8" in run(folder, "jax_deepcompile", "explain", "step.py:make_step")


@pytest.mark.slow
@pytest.mark.cpu_mesh
def test_its_notebook_runs(folder: Path):
    notebook = nbformat.read(folder / "first_run.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    shown = [output.text for cell in notebook.cells for output in cell.get("outputs", ()) if output.name == "stdout"]
    assert "train_step on fsdp=8" in shown[-1]
    assert "loss 5." in shown[-2]
