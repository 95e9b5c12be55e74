import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from jax_deepcompile.cli import main as cli
from jax_deepcompile.cli import train as command
from jax_deepcompile.runtime import interrupts
from jax_deepcompile.training.find import load

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def _flags(monkeypatch):
    for name in ("XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.fixture
def asked(monkeypatch) -> dict:
    """What the command line asks of ``command.start``, instead of starting it."""
    seen = {}

    def start(run, folder, watch):
        assert isinstance(watch, interrupts.Watch)
        seen.update(run=run, folder=str(folder))
        return 0

    monkeypatch.setattr(command, "start", start)
    return seen


def test_the_version_is_printed(capsys, monkeypatch):
    assert cli.main(["--version"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(".") == 2
    monkeypatch.setattr("sys.argv", ["jax_deepcompile", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("jax_deepcompile", run_name="__main__")
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("place", [1, 3, 5])
def test_the_documented_line(asked, place):
    words = ["--steps", "40", "--out", "DIR", "--optimizer.learning-rate", "1e-3", "--train.seed=2"]
    assert cli.main(["train", *words[: place - 1], "tiny_llama", *words[place - 1 :]]) == 0
    run, before = asked["run"], load("tiny_llama", [Path(__file__).parents[2] / "experiments"])
    assert asked["folder"] == "DIR"
    assert (run.experiment.train.steps, run.experiment.train.seed) == (40, 2)
    assert run.experiment.optimizer.learning_rate == 1e-3
    assert (run.experiment.model, run.experiment.data) == (before.model, before.data)
    assert (run.resume, run.sharding.devices, run.is_shared) == (False, None, False)


def test_files_with_any_name_are_files(asked):
    assert cli.main(["train", "tiny_llama", "--data", "a=b", "c,d", "--resume", "--out", "x"]) == 0
    assert asked["run"].experiment.data.files == ("a=b", "c,d")
    assert asked["run"].resume


def test_dtypes_policies_and_none_are_set_by_name(asked):
    line = "--model.dtype bfloat16 --model.remat_policy None --mesh.fsdp none --train.explain False"
    assert cli.main(["train", "tiny_llama", *line.split()]) == 0
    experiment = asked["run"].experiment
    assert (experiment.model.dtype.__name__, experiment.model.remat_policy) == ("bfloat16", None)
    assert (experiment.mesh.fsdp, experiment.train.explain) == (None, False)


def test_other_processes_are_joined_when_any_option_says_so(asked):
    cli.main(["train", "tiny_llama", "--distributed", "--out", "x"])
    assert (asked["run"].is_shared, asked["run"].cluster) == (True, (None, None, None))
    cli.main(["train", "tiny_llama", "--coordinator", "host:1", "--processes", "2", "--process", "0", "--out", "x"])
    assert (asked["run"].is_shared, asked["run"].cluster) == (True, ("host:1", 2, 0))


def unboxed(text: str) -> str:
    """What a box of tyro's says, on one line."""
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("line", "sentences"),
    [
        ("train tiny_llama --stpes 3", ("--stpes", "Perhaps you meant", "--steps")),
        ("train tiny_llama --learning-rate 1", ("Perhaps you meant", "--optimizer.learning-rate")),
        ("train tiny_llama --optimizer.learning-rt 1", ("Perhaps you meant", "--optimizer.learning-rate")),
        ("train tiny_llama --devices 0", ("--devices", "must be at least 1; the nearest is 1")),
        ("train tiny_llama --steps 4o", ("--steps", "expected an integer, not '4o'")),
        ("train tiny_llama --model.dtype bf16", ("--model.dtype", "not 'bf16'", "the nearest is 'bfloat16'")),
        ("train tiny_llama stray", ("stray",)),
        ("bench --suite gpus", ("--suite", "'gpus'", "the nearest is 'gpu'")),
        ("plan a.py:b --gpu h101", ("--gpu", "one of h100, h200, gh200, b200, None, not 'h101'", "nearest is 'h100'")),
        ("explain a.py:b --gpu h10", ("For full helptext, see deepcompile explain --help",)),
        ("explain a.py:b stray", ("For full helptext, run deepcompile explain --help",)),
        ("trace a.py:b --nodes 0", ("--nodes", "must be at least 1; the nearest is 1")),
        ("trace a.py:b --passes -unshard", ("Missing value for argument '--passes'",)),
        ("explain", ("STEP",)),
        ("", ("Missing subcommand", "train")),
    ],
)
def test_a_mistake_in_an_option_is_named_with_the_nearest(asked, capsys, line, sentences):
    with pytest.raises(SystemExit, match="2"):
        cli.main(line.split())
    printed = capsys.readouterr()
    assert not printed.out
    assert all(sentence in unboxed(printed.err) for sentence in sentences), printed.err
    assert "Traceback" not in printed.err


ENUMERATED = re.compile(r"(--[\w.-]+) \{(\w+,[\w,]+)\}")


def test_every_option_of_several_names_lists_them_in_their_order(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    tried = set()
    for name in cli.COMMANDS:
        line = [name] if name in ("new", "bench", "install-compiler", "completion") else [name, "tiny_llama"]
        with pytest.raises(SystemExit, match="0"):
            cli.main([*line, "--help"])
        for option, names in ENUMERATED.findall(capsys.readouterr().out):
            with pytest.raises(SystemExit, match="2"):
                cli.main([*line, option, "another"])
            expected = f"{option}: must be one of {names.replace(',', ', ')}, not 'another'"
            assert expected in unboxed(capsys.readouterr().err)
            tried.add(option)
    assert {"--gpu", "--suite", "--model.dtype", "--model.attention", "--train.explain"} <= tried


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("expalin", "there is no command 'expalin'; the nearest is 'explain'; there are new, train, "),
        ("xyz train.py:make", "there is no command 'xyz'; there are new, train, "),
        (
            "trace a.py:b --gpus h100",
            "there is no option --gpus; the nearest is --gpu; `deepcompile trace --help",
        ),
        ("explain --memory_limt=3 a.py:b", "there is no option --memory_limt; the nearest is --memory-limit; "),
        ("explain --json --memory-limt 3 a.py:b", "there is no option --memory-limt; the nearest is --memory-limit; "),
        ("new --force mine", "there is no option --force; `deepcompile new --help` says which there are"),
        ("train tiny_lama", "there is no experiment 'tiny_lama'; the nearest is 'tiny_llama'; there are "),
        ("train --list tiny_lama", "there is no experiment 'tiny_lama'; the nearest is 'tiny_llama'; there are "),
        (
            "train config.py",
            "there is no experiment 'config.py'; say which name of the file, config.py:NAME; there are ",
        ),
        ("train", "say which experiment: "),
        ("train --steps 3", "say which experiment: "),
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
    said = [re.split(r"  +", line) for line in settings]
    assert ["--train.steps 400", "INT", "in all, those of the run that is resumed included."] in said
    assert [
        "--mesh.fsdp None",
        "{None}|INT",
        "devices over which the state is divided; all that replicas leave where it is none.",
    ] in said
    assert ["--model.dtype float32", "float32|bfloat16|float16"] in [line[:2] for line in said]
    assert ["--model.attention xla", "xla|cudnn"] in [line[:2] for line in said]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--help", ("train", "bench", "install-compiler", "130 stopped by Ctrl-C")),
        ("train --help", ("tiny_gpt2", "--experiments DIR")),
        ("train tiny_llama --help", ("--optimizer.learning-rate FLOAT", "(default: 0.01)", "--resume")),
        ("bench --help", ("--suite", "--again")),
        ("plan --help", ("--gpus-per-node", "72GiB", "--out")),
    ],
)
def test_help_says_what_there_is(capsys, line, words):
    with pytest.raises(SystemExit, match="0"):
        sys.exit(cli.main(line.split()))
    printed = capsys.readouterr().out
    assert all(word in printed for word in words), printed


def test_the_default_folder_is_a_new_one(asked):
    assert cli.main(["train", "tiny_llama"]) == 0
    assert asked["folder"].startswith("runs/tiny_llama-")


@pytest.mark.parametrize("words", [["train", "--list", "tiny_llama"], ["explain", "--help"], ["--version"]])
def test_a_reader_that_goes_away_ends_a_command_without_a_word(monkeypatch, capfd, words):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(words) == 141
    assert capfd.readouterr().err == ""


def test_another_pipe_that_breaks_is_an_error(monkeypatch):
    def broken(words, watch):
        raise BrokenPipeError("the data's")

    monkeypatch.setattr(cli, "_run", broken)
    with pytest.raises(BrokenPipeError, match="the data's"):
        cli.main([])
