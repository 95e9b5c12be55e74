"""Where the command line finds experiments, and what it says where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from jax_deepcompile.cli import experiments
from jax_deepcompile.cli import main as cli

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]

MINE = '''"""A Llama of my own."""

import dataclasses

from experiments.config import Experiment, Train
from models.llama import LLAMA_TINY

CONFIG = Experiment(model=LLAMA_TINY, train=Train(steps={steps}))
'''


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Some user's project, with a package of the same name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("raise AssertionError('not ours')\n")
    return tmp_path


@pytest.fixture
def installed(monkeypatch, tmp_path_factory):
    """As if the package came from a wheel."""
    beside = tmp_path_factory.mktemp("site-packages") / "experiments"
    monkeypatch.setattr(experiments, "_beside_the_package", lambda: beside)
    return beside


def test_a_package_of_the_same_name_is_left_alone(folder, capsys):
    assert cli.main(["train", "--list"]) == 0
    assert "tiny_llama" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "bench"])
def test_without_the_repository_it_says_where_it_looked(folder, installed, capsys, command):
    assert cli.main([command, "--list"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"deepcompile: there are no experiments to {command}: they belong to the repository")
    assert f"Looked in {installed}, {folder / 'experiments'}. " in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_a_checkout_is_found_from_within_and_when_it_is_named(folder, installed, capsys, monkeypatch):
    assert cli.main(["train", "--list", "--experiments", str(ROOT / "experiments")]) == 0
    monkeypatch.chdir(ROOT)
    assert cli.main(["train", "--list"]) == 0
    assert capsys.readouterr().out.count("tiny_gpt2") == 2


def test_experiments_of_the_user_come_beside_the_repositorys(folder, capsys):
    own = folder / "mine"
    own.mkdir()
    (own / "own_llama_experiment.py").write_text(MINE.format(steps=7))
    (own / "wrong_experiment.py").write_text(MINE.format(steps=0))
    told = ["--experiments", str(own)]
    assert cli.main(["train", *told, "--list"]) == 0
    listed = capsys.readouterr().out
    assert "A Llama of my own." in listed
    assert "tiny_llama" in listed
    assert cli.main(["train", "own_llama_experiment", "--list", *told]) == 0
    assert "--train.steps 7" in capsys.readouterr().out.splitlines()
    assert cli.main(["train", "wrong_experiment", *told]) == 2
    assert capsys.readouterr().err == "deepcompile: train.steps=0: must be at least 1; the nearest is 1\n"


def test_a_folder_that_is_not_there_is_named(folder, capsys):
    assert cli.main(["train", "--experiments", "nowhere", "--list"]) == 2
    assert capsys.readouterr().err == "deepcompile: --experiments nowhere: there is no such folder\n"


def test_a_file_that_is_no_python_is_named(folder, capsys):
    (folder / "broken.py").write_text("def (\n")
    assert cli.main(["train", "--experiments", str(folder), "--list"]) == 2
    assert capsys.readouterr().err == f"deepcompile: {folder / 'broken.py'}: invalid syntax (<unknown>, line 1)\n"


@pytest.mark.parametrize(("name", "is_told"), [("orbax.checkpoint", True), ("of_the_user", False)])
def test_what_the_extra_brings_is_named(monkeypatch, capsys, name, is_told):
    def missing(*_):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("experiments.command.train", missing)
    if is_told:
        assert cli.main(["train", "tiny_llama"]) == 2
        assert capsys.readouterr().err == f"deepcompile: train needs {name}: pip install 'jax-deepcompile[train]'\n"
    else:
        with pytest.raises(ModuleNotFoundError):
            cli.main(["train", "tiny_llama"])
