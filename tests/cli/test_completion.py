"""What a TAB offers, by itself and in shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jax_deepcompile.cli import main as cli
from jax_deepcompile.cli.completion import SCRIPTS, candidates
from jax_deepcompile.cli.kept import printed_by
from jax_deepcompile.runtime.modules import from_file

pytestmark = pytest.mark.pure

STEP = """
def make_step(): ...
def two(n=3, *others, size=4, **more): ...
def helper(x): ...
def another(x, n=3): ...
def named(*, size): ...
def _hidden(): ...
"""
CONFIG = '''"""Mine."""
import dataclasses
from experiments.tiny_llama import CONFIG as theirs
mine = dataclasses.replace(theirs)
CONFIG = mine
'''


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def folder(cache, tmp_path, monkeypatch) -> Path:
    """A user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in {"step.py": STEP, "own_config.py": CONFIG, "broken.py": "def (", "test_it.py": STEP}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("deepcompile ex", {"explain"}),
        ("~/.venv/bin/deepcompile inst", {"install-compiler"}),
        ("deepcompile train tiny_ll", {"tiny_llama"}),
        ("deepcompile explain tiny_ll", {"tiny_llama"}),
        ("deepcompile train own", {"own_config.py:mine"}),
        ("deepcompile train --experiments . own", {"own_config", "own_config.py:mine"}),
        ("deepcompile plan ste", {"step.py:make_step", "step.py:two"}),
        ("deepcompile plan step.py:", {"step.py:make_step", "step.py:two"}),
        ("deepcompile train step.py:", set()),
        ("deepcompile train --li", {"--list"}),
        ("deepcompile train tiny_llama --model.d-", {"--model.d-model", "--model.d-ff"}),
        ("deepcompile train --steps 3 tiny_llama --resu", {"--resume"}),
        ("deepcompile train tiny_llama --model.attention ", {"xla", "cudnn"}),
        ("deepcompile train tiny_llama --out ", set()),
        ("deepcompile train own_config.py:mine --model.d-f", {"--model.d-ff"}),
        ("deepcompile plan --gpu ", {"h100", "h200", "gh200", "b200", "None"}),
        ("deepcompile plan --gpu h100 --measure tiny_ll", {"tiny_llama"}),
        ("deepcompile plan tiny_llama --json --nod", {"--nodes"}),
        ("deepcompile bench head", {"headline"}),
        ("deepcompile bench valid", {"validation"}),
        ("deepcompile bench --suite ", {"gpu", "offload", "None"}),
        ("deepcompile completion ", {"bash", "zsh"}),
        ("deepcompile new ", set()),
    ],
)
def test_a_tab_offers(capsys, line, offered):
    assert cli.main(["--complete", line]) == 0
    assert {*capsys.readouterr().out.split()} == offered


def test_every_experiment_and_setting_is_offered(capsys):
    for listed, line in (["--list"], "deepcompile train "), (["--list", "tiny_gpt2"], "deepcompile train tiny_gpt2 --"):
        cli.main(["train", *listed])
        names = {each.split()[0] for each in capsys.readouterr().out.splitlines()}
        cli.main(["--complete", line])
        assert names <= {*capsys.readouterr().out.split()}


def test_what_is_kept_is_good_until_a_file_changes(folder, capsys):
    asked = []

    def ask(words):
        asked.append(words)
        from_file(folder / "step.py")
        return f"said {len(asked)}"

    said = [printed_by(["one"], ask), printed_by(["one"], ask), printed_by(["two"], ask)]
    os.utime(folder / "step.py", (1, 1))
    assert [*said, printed_by(["one"], ask)] == ["said 1", "said 1", "said 2", "said 3"]
    assert (printed_by(["three"], lambda _: ""), printed_by(["three"], lambda _: "now")) == ("", "now")


def test_options_that_nobody_tells_are_left_to_the_shell(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert candidates("deepcompile plan --", ["plan"], lambda _: "") == []


COMMAND = """#!{python}
import sys
from jax_deepcompile.cli.main import main
main()
assert "jax" not in sys.modules and "tyro" not in sys.modules
"""
WORDS = ["expl", "explain tiny_ll", "explain step.py:ma", "explain step.py:", "explain nothing"]
AS_THE_SHELL_DOES = {
    "bash": """
{script}
typed() {{ COMP_LINE=$1 COMP_POINT=${{#1}}; _deepcompile deepcompile "${{1##*[ :]}}"; echo "${{COMPREPLY[@]}}"; }}
""",
    "zsh": """
compdef() {{}}; compadd() {{ print ${{(P)2}} }}; _files() {{ print files }}
{script}
typed() {{ words=(${{(z)1}}) CURRENT=$#words PREFIX=$words[-1]; _deepcompile }}
""",
}
COMPLETED = {
    "bash": ["explain", "tiny_llama", "make_step", "make_step two", ""],
    "zsh": ["explain", "tiny_llama", "step.py:make_step", "step.py:make_step step.py:two", "files"],
}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_shell_completes_without_loading_jax(folder, capsys, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    assert cli.main(["completion", shell]) == 0
    script = AS_THE_SHELL_DOES[shell].format(script=capsys.readouterr().out)
    script += "\n".join(f"typed 'deepcompile {words}'" for words in WORDS)
    command = folder / "bin" / "deepcompile"
    command.parent.mkdir()
    command.write_text(COMMAND.format(python=sys.executable))
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    done = subprocess.run([shell, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines(), done.stderr) == (COMPLETED[shell], "")
