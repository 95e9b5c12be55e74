"""How the compiler for GPUs that are not here is brought, and what other programs see of it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from jax_deepcompile.cli import main as cli
from jax_deepcompile.lowering import cuda_compiler

pytestmark = pytest.mark.pure

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def plugins_in(requirements: list[str]) -> list[str]:
    """Those packages that JAX finds a plugin in, by its folder or its entry point, in whatever program uses JAX."""
    found = map(Requirement, requirements)
    names = [each.name for each in found if each.marker is None or each.marker.evaluate()]
    return [
        name
        for name in names
        if any(str(file).startswith("jax_plugins/") for file in distribution(name).files or [])
        or distribution(name).entry_points.select(group="jax_plugins")
    ]


def test_what_users_install_has_no_plugin_that_every_jax_program_loads():
    extras = PROJECT["optional-dependencies"]
    assert plugins_in([*PROJECT["dependencies"], *extras["h100"]]) == []
    assert plugins_in(extras["test"]) == ["jax-cuda12-pjrt"], "what tests compile with would be found"


def test_what_users_install_moves_no_jax():
    assert not [each for each in PROJECT["optional-dependencies"]["h100"] if Requirement(each).name.startswith("jax")]


@pytest.fixture
def pip(monkeypatch):
    """The command lines that were run instead of pip."""
    asked: list[list[str]] = []
    monkeypatch.setattr(cuda_compiler.subprocess, "run", lambda command, check: _ended(asked, command))
    return asked


def _ended(asked: list[list[str]], command: list[str], code: int = 0) -> subprocess.CompletedProcess:
    asked.append(command)
    return subprocess.CompletedProcess(command, code)


def test_pip_brings_the_compiler_of_the_jax_that_is_installed(pip, capsys):
    assert cli.main(["install-compiler"]) == 0
    ((python, _, _, _, *options, package),) = pip
    assert python == sys.executable
    assert package == f"jax-cuda12-pjrt=={version('jaxlib')}"
    assert options == ["--no-deps", "--upgrade", "--target", str(cuda_compiler.folder())]
    assert package in capsys.readouterr().out


def test_the_folder_is_of_the_environment_and_nowhere_on_its_path():
    assert cuda_compiler.folder().is_relative_to(sys.prefix)
    assert str(cuda_compiler.folder()) not in sys.path


def test_what_pip_did_not_bring(monkeypatch, capsys):
    monkeypatch.setattr(cuda_compiler.subprocess, "run", lambda command, check: _ended([], command, code=1))
    assert cli.main(["install-compiler"]) == 2
    said = capsys.readouterr().err
    assert "pip did not install jax-cuda12-pjrt==" in said
    assert "run `uv pip install --no-deps --target" in said
