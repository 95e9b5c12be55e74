"""The subcommands that take a step of the user's, and how they are told which."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import textwrap
import typing
from functools import partial
from pathlib import Path

import jax
import pytest
import tyro

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from jax_deepcompile.cli import commands, fit
from jax_deepcompile.cli import main as cli
from jax_deepcompile.cli.against import Difference
from jax_deepcompile.cli.files import Files
from jax_deepcompile.cli.options import Cluster, Options
from jax_deepcompile.cli.steps import StepRequest, load_step, use_virtual_devices
from jax_deepcompile.cli.unknown import options_of
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.lowering.xla_options import DOUBLE_BUFFERING
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.runtime.interrupts import Watch
from jax_deepcompile.step import ShardedStep
from jax_deepcompile.training.config import ConfigError
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from tests.report.pages import data_of

STEP = """
import jax
import jax.numpy as jnp

def make():
    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state)
        return state - 0.1 * grads, loss

    return step, jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((16, 64), jnp.float32)

def decorated():
    import jax_deepcompile as deepcompile

    step, *args = make()
    return deepcompile.shard(step, {"data": 2, "fsdp": 4}), *args

def cudnn():
    step, *args = make()
    attend = jax.nn.dot_product_attention

    def attending(state, batch):
        x = (batch @ state).reshape(16, 2, 4, 8).astype(jnp.bfloat16)
        return state, attend(x, x, x, implementation="cudnn").sum()

    return attending, *args

def undefined_loss():
    step, state, batch = make()
    return step, state, jnp.full(batch.shape, jnp.nan)

def nothing():
    return None

def nested():
    step, *args = make()
    return step, args

def itself(state, batch):
    return state

number = 3
"""

_PLAN_OF_ANOTHER = Plan("0", (KeptGathers("layers", ("head",)),)).to_json().encode()
_PLAN_WITH_A_PROGRAM = (
    Plan("0", options=((DOUBLE_BUFFERING, True),))
    .to_json()
    .replace(DOUBLE_BUFFERING, "xla_gpu_cuda_data_dir")
    .replace("true", '"/tmp/theirs"')
    .encode()
)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "my_train_step.py"
    path.write_text(textwrap.dedent(STEP))
    return path


@pytest.fixture(autouse=True)
def _flags(monkeypatch):
    """What the command line sets for JAX stays within a test."""
    for name in ("XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, "")


@pytest.mark.pure
def test_a_step_is_found_in_a_file_and_in_a_module(file, monkeypatch):
    step, args = load_step(f"{file}:make")
    assert (step.__name__, [leaf.shape for leaf in args]) == ("step", [(64, 64), (16, 64)])
    monkeypatch.syspath_prepend(file.parent)
    assert load_step("my_train_step:make")[0].__name__ == "step"


@pytest.mark.pure
@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("train.py:", "a part of it is missing"),
        ("nowhere/train.py:make", "there is no file nowhere/train.py"),
        ("no_such_module:make", "there is no module no_such_module"),
        ("{file}:other", "my_train_step has no other"),
        ("{file}:number", "it is int, not a function"),
        ("{file}:itself", "it takes state, batch. Name a function without arguments"),
        (
            "{file}:nested",
            r"it returned \(step, list\), and step takes \(state, batch\): missing .*'batch'\. Return \(",
        ),
        ("{file}:nothing", r"it returned NoneType, not \(step, state, batch\)"),
    ],
)
def test_what_is_no_step_is_named(file, spec, problem):
    with pytest.raises(errors.StepSpecError, match=problem):
        load_step(spec.format(file=file))


@pytest.mark.pure
@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("{file}:mak", "my_train_step has no mak; the nearest is make. Name"),
        ("{file}:jnp_", "my_train_step has no jnp_. Name"),
        ("{file}:numbers", "my_train_step has no numbers. Name"),
        ("my_train_stp:make", "there is no module my_train_stp; the nearest is my_train_step. Name"),
        ("my_package.configs:make", r"no module my_package.configs; the nearest is my_package.config. Name"),
        ("my_pakage.config:make", "there is no module my_pakage; the nearest is my_package. Name"),
        ("my_train_step.other:make", "there is no module my_train_step.other. Name"),
    ],
)
def test_the_nearest_is_what_could_be_meant(file, monkeypatch, spec, problem):
    (file.parent / "my_package").mkdir()
    for name in ("__init__", "config"):
        (file.parent / "my_package" / f"{name}.py").touch()
    monkeypatch.chdir(file.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(errors.StepSpecError, match=problem):
        load_step(spec.format(file=file))


@pytest.mark.pure
def test_an_experiment_is_called_as_training_calls_it(tmp_path):
    use_virtual_devices(None)
    step, (state, batch) = load_step("tiny_llama")
    assert (step.__name__, {leaf.shape[0] for leaf in jax.tree.leaves(batch)}) == ("train_step", {32})
    (tmp_path / "mine.py").write_text("from experiments.tiny_llama import CONFIG as ours\n\nCONFIG = ours\n")
    mine = load_step("mine", tmp_path)[1][0]
    assert [leaf.shape for leaf in jax.tree.leaves(mine)] == [leaf.shape for leaf in jax.tree.leaves(state)]
    with pytest.raises(ConfigError, match=r"no experiment 'tiny_lama'; the nearest is 'tiny_llama'; .*, FILE\.py:NAME"):
        load_step("tiny_lama")
    with pytest.raises(NotADirectoryError, match="--experiments nowhere: there is no such folder"):
        load_step("tiny_llama", Path("nowhere"))


@pytest.mark.pure
def test_differences_are_told_by_line_most_first():
    def run(name: str, step_s: float, sizes: dict[str, int], **lines: float) -> dict:
        figures = {"step_s": step_s, "peak_bytes": sum(sizes.values())}
        return {"name": name, "figures": figures, "lines": {line: [s, 0] for line, s in lines.items()}} | {
            "line_bytes": sizes
        }

    theirs, ours = (
        run("theirs.json", 3.0, {"a": 5 << 30}, a=1.0, b=2.0),
        run("planned", 1.75, {"d": 1 << 30}, a=1.25, c=0.5),
    )
    runs = [theirs, run("before", 9.0, {}, a=9.0), ours]
    assert [line.split() for line in Difference.of(runs).lines()] == [
        ["against", "theirs.json,", "1.75", "s", "and", "3", "s,", "by", "your", "lines:"],
        ["-2", "s", "0", "s", "2", "s", "b"],
        ["+500", "ms", "500", "ms", "0", "s", "c"],
        ["+250", "ms", "1.25", "s", "1", "s", "a"],
        ["memory", "at", "the", "peak,", "1.00", "GiB", "and", "5.00", "GiB,", "by", "your", "lines:"],
        ["-5.00", "GiB", "0", "B", "5.00", "GiB", "a"],
        ["+1.00", "GiB", "1.00", "GiB", "0", "B", "d"],
    ]
    assert not any("memory" in line for line in Difference.of([runs[1], ours]).lines())


@pytest.mark.pure
def test_an_error_in_the_step_is_told_by_the_users_lines_alone(file, capsys, monkeypatch):
    file.write_text(textwrap.dedent(STEP).replace("batch @ w", "bach @ w"))
    assert cli.main(["trace", f"{file}:make"]) == 1
    head, *frames, last = capsys.readouterr().err.splitlines()
    assert (head, last) == ("deepcompile: an error in your code:", "NameError: name 'bach' is not defined")
    assert len(frames) < 12
    assert all(str(file) in line for line in frames if line.startswith("  File"))
    monkeypatch.setattr(commands, "sharded_step", int)
    with pytest.raises(TypeError):
        cli.main(["trace", f"{file}:make"])


@pytest.mark.pure
@pytest.mark.parametrize("line", ["explain {file}:make", "train {file}:CONFIG"])
def test_a_file_that_is_no_python_is_told_in_pythons_words(file, capsys, line):
    file.write_text("def make(:\n")
    assert cli.main(line.format(file=file).split()) == 2
    head, where, code, _, last = capsys.readouterr().err.splitlines()
    assert (head, last) == ("deepcompile: an error in your code:", "SyntaxError: invalid syntax")
    assert (where, code) == (f'  File "{file.resolve()}", line 1', "    def make(:")


@pytest.mark.pure
@pytest.mark.parametrize("content", [b"\xff\xd8\xff\xe0", b"make = 1\0"], ids=["a picture", "zeros"])
def test_a_file_that_is_no_text_is_told_in_pythons_words(file, capsys, content):
    file.write_bytes(content)
    assert cli.main(["explain", f"{file}:make"]) == 2
    head, where, *_, last = capsys.readouterr().err.splitlines()
    assert (head, where) == ("deepcompile: an error in your code:", f'  File "{file.resolve()}", line 1')
    assert last.startswith("SyntaxError: ")


@pytest.mark.pure
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["explain", "--html", "nowhere/page.html"], "--html nowhere/page.html cannot be written: there is no folder"),
        (
            ["plan", "--out", "nowhere/plan.json"],
            "--out nowhere/plan.json cannot be written: there is no folder",
        ),
        (["fit", "--trace", "nowhere/trace.json"], "--trace nowhere/trace.json cannot be written: there is no folder"),
        (["compare", "--html", "file/page.html"], "--html file/page.html cannot be written: file is no folder. Name a"),
        (["trace", "--out", "folder"], "--out folder cannot be written: it is a folder. Name a file in a folder that"),
        (["profile"], "--out profile.json cannot be written: it is a folder"),
        (["validate", "--out", "folder"], "--out folder cannot be written: it is a folder"),
        (["fit", "--trace", "t.py"], "--trace t.py cannot be written: what opens traces takes files that end in"),
        (
            ["explain", "--html", "a", "--out", "./a"],
            "--out a cannot be written: --html is the same file. Name",
        ),
        (
            ["trace", "--html", "b.json", "--trace", "a.json"],
            "--trace a.json cannot be written: --html is the same",
        ),
        (["bench", "--out", "file/rows.json"], "--out file/rows.json cannot be written: file is no folder"),
    ],
)
def test_what_cannot_be_written_is_told_before_anything_is_begun(capsys, tmp_path, monkeypatch, words, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "b.json").symlink_to("a.json")
    for folder in ("folder", "profile.json"):
        (tmp_path / folder).mkdir()
    command, *options = words
    assert cli.main([command, "no_step", *options]) == 2
    assert capsys.readouterr().err.startswith(f"deepcompile: {problem}")


@pytest.mark.pure
def test_a_module_that_lacks_one_of_its_own_imports_says_which(file):
    file.write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_step(f"{file}:make")


@pytest.mark.pure
def test_trace_prints_a_summary_and_the_local_view(file, capsys):
    assert cli.main(["trace", f"{file}:make"]) == 0
    head, *rest = capsys.readouterr().out.splitlines()
    assert head.startswith("how it is divided, ")
    assert any("all_gather[" in line for line in rest)


@pytest.mark.pure
def test_what_is_said_is_printed_as_one_json_document(file, capsys):
    found = {}
    for command in ("explain", "trace", "plan"):
        out = file.parent / f"{command}.json"
        assert cli.main([command, f"{file}:make", "--json", "--out", str(out)]) == 0
        found[command] = json.loads(capsys.readouterr().out)
        assert json.loads(out.read_text()) == found[command]
    for document in found.values():
        assert document["headline"] == found["explain"]["headline"]
        assert document.keys() >= {"headline", "seconds", "memory", "decisions", "division", "files"}
    assert found["explain"]["headline"]["step"] == "step"
    assert found["explain"]["headline"]["step_s"] == found["explain"]["seconds"]["step_s"] > 0
    assert found["explain"]["headline"]["costs"] == "assumed figures of a CPU host"
    assert [each["kind"] for each in found["trace"]["division"]["arguments"]] == ["state", "batch"]
    assert "all_gather[" in found["trace"]["jaxpr"]
    assert Plan.from_json(json.dumps(found["plan"])).prediction is None


@pytest.mark.pure
def test_a_decorated_step_keeps_its_own_mesh(file, capsys):
    assert cli.main(["explain", f"{file}:decorated"]) == 0
    assert "data=2 x fsdp=4" in capsys.readouterr().out


@pytest.mark.pure
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{file}:other"], "my_train_step has no other"),
        (["{file}:make", "--trace", "trace.txt"], "--trace trace.txt cannot be written: what opens"),
        (["{file}:make", "--plan", "nowhere/plan.json"], "--plan nowhere/plan.json cannot be read: there is no"),
        (["{file}:make", "--against", "{file}.json"], "there is no such file; the nearest is {file}. Name"),
        (["{file}:make", "--profile", "{file}s"], "{file}s cannot be read: there is no such file; the nearest"),
        (["{file}:make", "--profile", "{file}"], "my_train_step.py"),
        (["{file}:make", "--passes=-unshart"], "the nearest names: 'unshard'"),
    ],
)
def test_mistakes_end_with_2_and_a_sentence(file, capsys, words, said):
    assert cli.main(["explain", *(word.format(file=file) for word in words)]) == 2
    printed = capsys.readouterr()
    said = said.format(file=file)
    assert (printed.out, printed.err.startswith("deepcompile: "), said in printed.err) == ("", True, True)


@pytest.mark.cpu_mesh
def test_profile_measures_on_zeros_where_shapes_are_given(file, tmp_path, capsys):
    out = tmp_path / "profile.json"
    assert cli.main(["profile", f"{file}:make", "--out", str(out), "--runs", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(out.read_text())
    assert document["headline"]["basis"] == "measured"
    assert document["headline"]["costs"].startswith("measured here: ")
    assert document["seconds"]["step_s"] == document["headline"]["simulated_s"] > 0
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    files = ["--trace", str(trace), "--html", str(page)]
    assert cli.main(["profile", f"{file}:make", "--out", str(out), "--runs", "1", *files]) == 0
    printed = capsys.readouterr().out
    assert '"name":"one measured run"' in page.read_text()
    assert re.match(r"step .*s, measured; simulated .*s\n", printed)
    assert "collectives" in printed
    assert f"trace of the measured and the simulated step: {trace} and 7 more, one a device" in printed
    assert Profile.from_json(out.read_text(), "it").step is not None
    for rank, path in enumerate([trace, *(tmp_path / f"trace.rank{rank}.json" for rank in range(1, 8))]):
        found = json.loads(path.read_text())
        assert found["distributedInfo"] == {"backend": "nccl", "rank": rank, "world_size": 8}
        names = {row["name"].split()[0] for row in found["traceEvents"] if "stream" in row["args"]}
        assert {"ncclDevKernel_AllGather", "ncclDevKernel_ReduceScatter"} < names


@pytest.mark.h100_aot
def test_a_plan_is_written_and_explained(file, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert cli.main(["plan", f"{file}:make", "--gpu", "h100", "--nodes", "2", "--out", str(out)]) == 0
    plan = Plan.from_json(out.read_text(), "it")
    assert plan.prediction is not None
    capsys.readouterr()
    trace = tmp_path / "trace.json.gz"
    told = ["explain", f"{file}:make", "--gpu", "h100", "--nodes", "2", "--plan", str(out), "--trace"]
    html = tmp_path / "page.html"
    assert cli.main([*told, str(trace), "--against", str(out), "--html", str(html)]) == 0
    printed = capsys.readouterr().out
    assert "plan: given" in printed
    assert cli.main(["explain", f"{file}:make", "--gpu", "h100", "--nodes", "2", "--json", "--trace", str(trace)]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == [str(trace)]
    names = [each["name"] for each in data_of(html.read_text())["runs"]]
    assert [names[0], names[1], names[-1]] == [str(out), "as divided", "planned"]
    (said,) = re.findall(rf"against {out}, (.*) and (.*), by your lines:\n  0 s ", printed)
    assert said[0] == said[1]
    assert printed.endswith(f"page: {html}\ntrace of the simulated step: {trace}\n")
    assert json.loads(gzip.decompress(trace.read_bytes()))["distributedInfo"]["world_size"] == 16


@pytest.mark.cpu_mesh
def test_a_script_finds_what_the_command_line_planned(file, tmp_path, capsys, monkeypatch):
    """The command line says in XLA's flags how many devices a CPU is, which the mesh says again."""
    cache = tmp_path / "cache"
    told = [f"{file}:make", "--memory-limit", "1GiB", "--cache-dir", str(cache)]
    assert cli.main(["plan", *told]) == 0
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_hlo_as_text")
    step, args = load_step(f"{file}:make")
    sharded = deepcompile.shard(step, memory_limit="1GiB", cache_dir=cache)
    assert "plan: kept from an earlier run" in sharded.trace(*args).explain()
    assert len(list((cache / "plans").iterdir())) == 1


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "cannot be used: it cannot be read (not JSON"),
        (b'{"headline": {}, "decisions": {}}', "cannot be used: it cannot be read (it is no plan as `deepcompile plan"),
        (_PLAN_OF_ANOTHER, "cannot be used: it keeps gathers over 'layers', a loop that step does not have"),
        (_PLAN_WITH_A_PROGRAM, "cannot be used: it sets the XLA option 'xla_gpu_cuda_data_dir', and plans set"),
    ],
    ids=["no text", "an explanation", "another program's", "a program"],
)
def test_a_plan_that_is_none_or_sets_more_than_plans_do_is_refused(file, tmp_path, capsys, content, said):
    given = tmp_path / "plan.json"
    given.write_bytes(content)
    for option in ("--plan", "--against"):
        assert cli.main(["explain", f"{file}:make", option, str(given)]) == 2
        printed = capsys.readouterr()
        assert (printed.out, f"{option} {given} {said}" in printed.err) == ("", True)


@pytest.mark.h100_aot
def test_compare_judges_jit_and_ours_side_by_side(file, capsys, tmp_path):
    html = tmp_path / "page.html"
    assert cli.main(["compare", f"{file}:make", "--gpu", "h100", "--nics-per-node", "1", "--html", str(html)]) == 0
    said, head, *rows, written = capsys.readouterr().out.splitlines()
    assert said.startswith(
        "all seconds are simulated of XLA's schedule, for 8 H100 SXM, described, not attached; costs: "
    )
    assert written == f"page: {html}"
    assert head.split()[:2] == ["step", "s"]
    assert [row.split()[0] for row in rows] == ["jit", "fully", "planned"]
    assert rows[0].split()[2] == "1.00"
    data = data_of(html.read_text())
    assert data["device"] == "GPU"
    assert (data["runs"][0]["name"], data["runs"][-1]["name"]) == ("jit", "planned")
    for row, run in ((rows[0], data["runs"][0]), (rows[2], data["runs"][-1])):
        assert float(row.split()[1]) == pytest.approx(run["figures"]["step_s"], rel=1e-3)


def test_compare_says_what_does_not_fit_and_goes_on(file, capsys, tmp_path):
    html = tmp_path / "page.html"
    words = ["compare", f"{file}:make", "--gpu", "h100", "--memory-limit", "1KiB", "--html", str(html), "--json"]
    assert cli.main(words) == 0
    compared = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["times_jit"]) for each in compared["systems"]] == [("jit", 1.0)]
    *left, unwritten = compared["left_out"]
    assert (compared["files"], compared["seconds"]["step_s"]) == ([], None)
    assert compared["headline"]["step"] == "step"
    assert [line.split(":")[0] for line in left] == ["fully sharded", "planned"]
    assert all("more than the limit" in line for line in left)
    assert unwritten == "no files are written, as there is no planned step"
    assert not html.exists()


@pytest.mark.h100_aot
def test_compare_goes_on_without_what_jit_cannot_divide(file, capsys, monkeypatch):
    def refuse(*_):
        raise NotImplementedError("sequences cannot be divided\nas they are")

    monkeypatch.setattr(ShardedStep, "lower_gspmd", refuse)
    assert cli.main(["compare", f"{file}:make", "--gpu", "h100"]) == 0
    _, _, bare, planned, left = capsys.readouterr().out.splitlines()
    assert (bare.split()[3], planned.split()[2]) == ("-", "-")
    assert left == "jit: does not compile: NotImplementedError: sequences cannot be divided"


@pytest.mark.pure
def test_options_are_those_of_shard(file, tmp_path):
    assert Options().of_shard() == {}
    said = Options(("auto"), "1GiB", passes="-unshard", measure=True, devices=4)
    assert said.of_shard() == {"microbatches": "auto", "memory_limit": "1GiB", "passes": "-unshard", "measure": True}


@pytest.mark.pure
@pytest.mark.parametrize(
    ("words", "count"), [("2", 2), ("1,2,4", (1, 2, 4)), ("auto", "auto"), ("0", None), ("1,0", None), ("many", None)]
)
def test_microbatches_are_a_number_several_or_auto(words, count):
    parsed = partial(tyro.cli, Options, args=["--microbatches", words], console_outputs=False)
    if count is None:
        with pytest.raises(SystemExit, match="2"):
            parsed()
    else:
        assert parsed().microbatches == count


@pytest.mark.pure
@pytest.mark.parametrize("command", ["trace", "plan", "explain", "profile", "compare", "fit"])
def test_every_command_about_a_step_takes_the_same_options(command):
    alike = {"request": StepRequest, "cluster": Cluster, "files": Files}
    function = fit.fit if command == "fit" else getattr(commands, command)
    hints = typing.get_type_hints(function)
    assert {name: hints.get(name) for name in alike} == alike


@pytest.mark.pure
def test_the_page_of_commands_says_which_write_which_files():
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    rows = re.findall(r"^\| (`.*`) \| (.*) \| (.*)\|$", page, re.MULTILINE)
    said = {name: bool(shown) for names, _, shown in rows for name in re.findall(r"`(\w+)`", names)}
    takes = {name: dict(options_of(command)) for name, command in cli._commands([], Watch()).items()}
    assert said == {name: "--html" in takes[name] for name in said}
    assert said.keys() == {"train", "bench", *(name for name in takes if "--out" in takes[name])}


@pytest.mark.cpu_mesh
def test_validate_compares_with_the_step_as_written(file, capsys):
    assert cli.main(["validate", f"{file}:make"]) == 0
    assert "step as written and on fsdp=8: all 2 leaves agree" in capsys.readouterr().out
    assert cli.main(["validate", f"{file}:undefined_loss"]) == 1
    assert "NaN in both: nothing is known of it" in capsys.readouterr().out
    assert cli.main(["validate", f"{file}:make", "--gpu", "h100"]) == 2
    assert "not attached" in capsys.readouterr().err
    assert cli.main(["validate", f"{file}:cudnn"]) == 2
    assert "it does not run on cpu: cuDNN is not detected" in capsys.readouterr().err


@pytest.mark.pure
def test_without_a_cluster_the_devices_are_those_of_this_process():
    assert Cluster().mesh is None


@pytest.mark.pure
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
    use_virtual_devices(count)
    assert os.environ["XLA_FLAGS"] == expected
