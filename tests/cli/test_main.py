import os
from pathlib import Path

import pytest

from experiments import command
from jax_deepcompile.cli import main as cli
from jax_deepcompile.runtime import interrupts

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def _flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])


@pytest.fixture
def asked(monkeypatch) -> dict:
    """What the command line asks of ``command.run``, instead of running it."""
    seen = {}

    def run(name, *, watch, **options):
        assert isinstance(watch, interrupts.Watch)
        seen.update(name=name, **options)
        return 0

    monkeypatch.setattr(command, "run", run)
    return seen


def test_the_documented_line(asked):
    line = "train tiny_llama --steps 40 --out DIR optimizer.learning_rate=1e-3 seed=2"
    assert cli.main(line.split()) == 0
    assert asked == {
        "name": "tiny_llama",
        "overrides": ["optimizer.learning_rate=1e-3", "seed=2"],
        "files": [],
        "steps": "40",
        "folder": Path("DIR"),
        "resume": False,
        "cluster": None,
        "list_only": False,
    }


@pytest.mark.parametrize(
    "line",
    [
        "train tiny_llama a=1 b=2 --data x.txt y.txt",
        "train tiny_llama a=1 --data x.txt y.txt b=2",
        "train tiny_llama --data x.txt --data y.txt a=1 b=2",
    ],
)
def test_overrides_stand_anywhere_even_after_files(asked, line):
    assert cli.main(line.split()) == 0
    assert asked["files"] == ["x.txt", "y.txt"]
    assert sorted(asked["overrides"]) == ["a=1", "b=2"]


def test_a_file_whose_name_has_an_equals_sign_is_a_file(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a=b").touch()
    cli.main(["train", "tiny_llama", "--data", "a=b"])
    assert asked["files"] == ["a=b"]


def test_other_processes_are_joined_when_any_option_says_so(asked):
    cli.main(["train", "tiny_llama", "--distributed"])
    assert asked["cluster"] == (None, None, None)
    cli.main(["train", "tiny_llama", "--coordinator", "host:1", "--processes", "2", "--process", "0"])
    assert asked["cluster"] == ("host:1", 2, 0)


@pytest.mark.parametrize(
    ("flags", "count", "expected"),
    [
        ("", None, "--xla_force_host_platform_device_count=8"),
        ("--a=1", None, "--a=1 --xla_force_host_platform_device_count=8"),
        ("--xla_force_host_platform_device_count=2 --a=1", None, "--xla_force_host_platform_device_count=2 --a=1"),
        ("--xla_force_host_platform_device_count=2 --a=1", 4, "--a=1 --xla_force_host_platform_device_count=4"),
    ],
)
def test_virtual_devices_are_eight_unless_the_user_said_otherwise(monkeypatch, flags, count, expected):
    monkeypatch.setenv("XLA_FLAGS", flags)
    cli.use_virtual_devices(count)
    assert os.environ["XLA_FLAGS"] == expected


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("train tiny_llama --resum", None),
        ("train tiny_llama --stpes 3", "there is no option --stpes; the nearest is --steps"),
        ("train tiny_llama --devices 0", "expected an integer, at least 1, not '0'"),
        ("trian", "invalid choice: 'trian'"),
        ("", "the following arguments are required: COMMAND"),
    ],
)
def test_a_mistake_on_the_line_is_named(asked, capsys, line, sentence):
    if sentence is None:
        assert cli.main(line.split()) == 0
        return
    with pytest.raises(SystemExit, match="2"):
        cli.main(line.split())
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("train tiny_lama", "there is no experiment 'tiny_lama'; the nearest is 'tiny_llama'; there are "),
        ("train tiny_llama learning_rt=1", "learning_rt=1: there is no key 'learning_rt'; the nearest is 'optimizer."),
        ("train tiny_llama --steps 4o", "train.steps=4o: expected an integer, for example 400"),
        ("train tiny_llama --steps -1", "train.steps=-1: must be at least 1; the nearest is 1"),
        ("train tiny_llama stray", "'stray' is not of the form key=value"),
        ("train", "say which experiment: "),
        ("train tiny_llama --resume", "say which run to resume: --out DIR"),
        ("train tiny_llama --distributed", "say where to write, the same place on every process: --out DIR"),
        ("train tiny_llama --out x --data nowhere.txt", "data.files=nowhere.txt: no such file"),
    ],
)
def test_a_config_error_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, line, sentence):
    monkeypatch.chdir(tmp_path)
    assert cli.main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"deepcompile: {sentence}")
    assert captured.err.count("\n") == 1
    assert not captured.out
    assert not list(tmp_path.iterdir())


def test_processes_that_cannot_be_joined_are_one_line(capsys, monkeypatch):
    def initialize(*_):
        raise ValueError("Number of processes must be defined.")

    monkeypatch.setattr("jax.distributed.initialize", initialize)
    assert cli.main(["train", "tiny_llama", "--out", "x", "--coordinator", "host:1"]) == 2
    message = "deepcompile: cannot join the other processes: Number of processes must be defined.\n"
    assert capsys.readouterr().err == message


def test_list_shows_the_experiments_and_the_settings_of_one(capsys):
    assert cli.main(["train", "--list"]) == 0
    assert "tiny_llama" in capsys.readouterr().out
    assert cli.main(["train", "--list", "tiny_llama"]) == 0
    settings = capsys.readouterr().out.splitlines()
    assert "model.d_model=64" in settings
    assert "train.steps=400" in settings


def test_an_experiment_takes_the_options_of_the_line():
    experiment = command.configure("tiny_llama", overrides=["steps=3"], files=["a,b"], steps="5")
    assert experiment.train.steps == 5
    assert experiment.data.files == ("a,b",)


def test_the_default_folder_is_a_new_one(monkeypatch):
    folder = command.new_folder("tiny_llama", resume=False, is_shared=False)
    assert folder.parent == Path("runs")
    assert folder.name.startswith("tiny_llama-")
