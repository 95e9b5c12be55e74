"""Where the command line finds experiments, and what it says where there are none."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_deepcompile.cli import folders
from jax_deepcompile.cli import main as cli

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]

MINE = '''"""A Llama of my own."""

import dataclasses

from experiments.language_models import llama
from jax_deepcompile.training import Experiment, Train

CONFIG = Experiment(model=llama.LLAMA_TINY, train=Train(steps={steps}))
'''


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


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
    monkeypatch.setattr(folders, "_beside_the_package", lambda: beside)
    return beside


def test_a_package_of_the_same_name_is_left_alone(folder, capsys):
    assert cli.main(["train", "--list"]) == 0
    assert "tiny_llama" in capsys.readouterr().out


def test_without_the_repository_bench_says_where_it_looked(folder, installed, capsys):
    assert cli.main(["bench", "--list"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("deepcompile: there are no benchmarks to run: they belong to the repository and are ")
    assert f"Looked in {installed}, {folder / 'experiments'}. " in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


CONFIGS = """
from experiments import STEPS
from models import Mine

from jax_deepcompile.training import Experiment, Train

mine = Experiment(model=Mine(), train=Train(steps=STEPS))
number = 3
"""


MODELS = """
import dataclasses


@dataclasses.dataclass(frozen=True)
class Mine:
    width: int = 5
"""


@pytest.fixture
def project(tmp_path) -> Path:
    """A package of the user's, beside folders that are named as the repository's are."""
    for name, text in {
        "experiments/__init__.py": "STEPS = 7",
        "models/__init__.py": MODELS,
        "my_package/__init__.py": "",
        "my_package/configs.py": CONFIGS,
        "configs/from_a_file.py": f"{CONFIGS}CONFIG = mine",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


LINES = {
    "my_package.configs:mine --list": (0, "--model.width 5"),
    "configs/from_a_file.py:mine --list": (0, "--train.steps 7"),
    "from_a_file --experiments configs --list": (0, "--train.steps 7"),
    "my_package.configs:mime --list": (2, "my_package.configs has no mime; the nearest is mine"),
    "my_package.configs:number --list": (2, "is a int, not an Experiment of jax_deepcompile.training"),
    "my_package.config:mine --list": (2, "there is no module my_package.config"),
    "config/from_a_file.py:mine": (2, "there is no file config/from_a_file.py"),
    "my_package.configs:mine --out run": (2, "no model is registered for a Mine: decorate a function"),
}
IN_TURN = """
import sys
from jax_deepcompile.cli.main import main

for line in sys.argv[1:]:
    print("code", main(["train", *line.split()]))
"""


def test_configs_of_the_user_are_theirs_whatever_else_is_named_so(project):
    """In a process of its own, for the repository's packages are imported in this one."""
    command = [sys.executable, "-c", IN_TURN, *LINES]
    done = subprocess.run(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    printed = re.findall(r"(.*?)^code (\d)$", done.stdout, re.MULTILINE | re.DOTALL)
    for (line, (code, said)), (text, got) in zip(LINES.items(), printed, strict=True):
        assert (said in text, int(got)) == (True, code), (line, text)


def test_a_checkout_is_found_from_within_and_when_it_is_named(folder, installed, capsys, monkeypatch):
    assert cli.main(["train", "--list", "--experiments", str(ROOT / "experiments")]) == 0
    monkeypatch.chdir(ROOT)
    assert cli.main(["train", "--list"]) == 0
    assert capsys.readouterr().out.count("tiny_gpt2") == 2


def test_experiments_of_the_user_come_beside_the_repositorys(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "mine"
    own.mkdir()
    (own / "own_llama_experiment.py").write_text(MINE.format(steps=7))
    (own / "wrong_experiment.py").write_text(MINE.format(steps=0))
    told = ["--experiments", str(own)]
    assert cli.main(["train", *told, "--list"]) == 0
    listed = capsys.readouterr().out
    assert "A Llama of my own." in listed
    assert "tiny_llama" in listed
    assert cli.main(["train", "own_llama_experiment", "--list", *told]) == 0
    assert "--train.steps 7 " in capsys.readouterr().out
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

    monkeypatch.setattr("jax_deepcompile.cli.train.train", missing)
    if is_told:
        assert cli.main(["train", "tiny_llama"]) == 2
        assert capsys.readouterr().err == f"deepcompile: train needs {name}: pip install 'jax-deepcompile[train]'\n"
    else:
        assert cli.main(["train", "tiny_llama"]) == 1
        assert capsys.readouterr().err.startswith("deepcompile: an error in your code:\n  File ")
