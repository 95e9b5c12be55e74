"""Benchmarks: what they measure, what they keep, what they print; nothing is compiled."""

from __future__ import annotations

import dataclasses
import re

import pytest

import jax_deepcompile as deepcompile
from experiments.bench import configs, rows, simulated
from experiments.bench.command import BENCHMARKS, run
from experiments.bench.commit import commit
from experiments.bench.rows import Result, Results, load, measure
from experiments.bench.simulated import Published, Simulated
from experiments.bench.systems import Figures, Ours
from experiments.bench.workload import Cluster, Workload
from experiments.command import bench

pytestmark = pytest.mark.pure

FIGURES = Figures(2.0, 1.0, 1.5, 0.5, 1.6, 3.0, 60.0, 59.0, 4.0, 30.0, 0.5, "a plan", mfu=0.4)
SMALL = Workload("llama3_8b", 512)
LARGE = Workload("llama3_70b", 512, 2, 4, Cluster(nodes=1))


@pytest.fixture
def measured(monkeypatch) -> list[tuple[Workload, str]]:
    """What is measured, instead of measuring it; 70B fits no single node."""
    seen = []

    def instead(workload, system):
        seen.append((workload, system.name))
        if workload == LARGE:
            return Result(workload, system.name, None, "needs 100 GiB")
        return Result(workload, system.name, FIGURES)

    monkeypatch.setattr(simulated, "_measured", instead)
    return seen


def two_rows(**options) -> Simulated:
    systems = (Ours("first", ()), Ours("second", None))
    return Simulated("Two rows", (SMALL, LARGE), systems, **options)


def test_every_system_of_every_row_is_measured_once(measured):
    *_, (_, results) = measure("two", two_rows(), [0, 1], None)
    assert measured == [(load, name) for load in (SMALL, LARGE) for name in ("first", "second")]
    assert [(each.workload, each.system) for each in results.results] == measured


def test_what_is_known_is_not_measured_again(measured):
    _, first = next(measure("two", two_rows(), [0], None))
    *_, (_, results) = measure("two", two_rows(), [0], first)
    assert measured == [(SMALL, "first"), (SMALL, "second")]
    assert len(results.results) == 2


def test_some_systems_are_measured_again_and_stay_in_their_place(measured):
    *_, (_, first) = measure("two", two_rows(), [0, 1], None)
    old = dataclasses.replace(first, results=tuple(dataclasses.replace(each, commit="older") for each in first.results))
    *_, (_, results) = measure("two", two_rows(), [0], old, again=["first"])
    assert measured[4:] == [(SMALL, "first")]
    assert [(each.workload, each.system) for each in results.results] == measured[:4]
    assert [each.commit == "older" for each in results.results] == [False, True, True, True]


def test_results_name_their_commit(measured, monkeypatch):
    monkeypatch.setattr(rows, "commit", lambda: "0123abc+")
    *_, (_, results) = measure("two", two_rows(), [0, 1], None)
    lines = [line for line in two_rows().page(results).splitlines() if line.startswith("| llama3")]
    assert len(lines) == 4
    assert all(line.endswith(" 0123abc+ |") for line in lines)
    assert re.fullmatch(r"[0-9a-f]{7,}\+?|", commit())


def test_results_survive_json(measured, tmp_path):
    *_, (_, results) = measure("two", two_rows(), [0, 1], None)
    file = tmp_path / "two.json"
    file.write_text(results.to_json())
    assert load(file, "two", two_rows()) == results
    assert load(file, "another", two_rows()) is None
    assert load(tmp_path / "none.json", "two", two_rows()) is None


def test_results_of_another_jax_are_measured_anew(tmp_path):
    file = tmp_path / "two.json"
    file.write_text(Results("two", "2026-01-01", "0.0.1", ()).to_json())
    assert load(file, "two", two_rows()) is None


def test_the_table_compares_with_the_first_system_and_says_what_it_rests_on(measured):
    *_, (_, results) = measure("two", two_rows(published={SMALL: Published(10, None, 30)}), [0, 1], None)
    faster = dataclasses.replace(FIGURES, step_s=1.0)
    results = dataclasses.replace(
        results, results=(results.results[0], Result(SMALL, "second", faster), *results.results[2:])
    )
    page = two_rows(published={SMALL: Published(10, None, 30)}).page(results)
    row = "| llama3_8b | 32 | 8 x 400 Gb/s | 512 | 1 | 1 | second | 1.000 | 2.00 | 512 | 40.0 | 1.000 | 1.500 | 0.500 |"
    assert row in page
    assert "*published: ZeRO-3* |  |  | *10* |" in page
    assert "*published: FSDP*" not in page
    assert "| llama3_70b | 8 | 8 x 400 Gb/s | 512 | 2 | 4 | first | does not fit |" in page
    assert "* first: needs 100 GiB" in page
    for constant in (
        "matmul_fraction 0.7",
        "nic_gbps 400",
        "nvlink_bytes_per_s 3.6e+11",
        "memory_fraction 0.87",
        "sustained 0.735",
    ):
        assert constant in page


@pytest.mark.parametrize(("peak_gib", "cell"), [(79.0, "| 79.0 |"), (80.0, "| **80.0** |")])
def test_a_peak_beyond_the_gpus_memory_stands_out(measured, peak_gib, cell):
    """An H100 has 79.1 GiB."""
    *_, (_, results) = measure("two", two_rows(), [0], None)
    over = Result(SMALL, "second", dataclasses.replace(FIGURES, peak_gib=peak_gib))
    assert cell in two_rows().page(dataclasses.replace(results, results=(over,)))


def test_a_step_that_does_not_fit_is_a_result(monkeypatch):
    def full(self, workload, mesh):
        raise deepcompile.errors.MemoryExceededError("step", 2 << 30, 1 << 30, 0)

    monkeypatch.setattr(Ours, "measure", full)
    monkeypatch.setattr(Cluster, "make_mesh", lambda self: None)
    *_, (_, results) = measure("two", two_rows(), [0], None)
    assert results.results[0].figures is None
    assert "GiB" in results.results[0].problem


@pytest.mark.parametrize("name", configs.BENCHMARKS)
def test_published_figures_belong_to_a_workload_of_the_paper(name):
    benchmark = configs.BENCHMARKS[name]
    assert len(set(benchmark.workloads)) == len(benchmark.workloads)
    for workload in benchmark.published or {}:
        assert workload.cluster.gpus == 32


def test_the_command_writes_after_every_system(measured, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(BENCHMARKS, "two", two_rows())
    file = tmp_path / "made" / "two.json"
    assert run("two", out=file, rows=(0,)) == 0
    assert len(Results.from_json(file.read_text(), two_rows().read).results) == 2
    assert file.with_suffix(".md").read_text() == capsys.readouterr().out
    assert run("two", out=file, resume=True) == 0
    assert len(measured) == 4
    page, _ = file.with_suffix(".md"), capsys.readouterr()
    page.unlink()
    assert run("two", out=file, resume=True) == 0
    assert len(measured) == 4, "nothing was left to measure"
    assert page.read_text() == capsys.readouterr().out != ""


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "say which benchmark: smoke, headline"),
        ("smok", "there is no benchmark smok; the nearest is smoke"),
        ("smoke --rows 0 7", "smoke has no row 7: its rows are 0 to 0"),
        ("smoke --resume", "say which results to go on with: --out FILE"),
        ("smoke --again all", "say which results to go on with: --out FILE"),
        ("smoke --again al --out any.json", "smoke has no system 'al': its systems are jit, all"),
    ],
)
def test_mistakes_are_named(line, sentence, capsys):
    assert bench(line.split()) == 2
    assert sentence in capsys.readouterr().err


def test_files_that_hold_no_results_or_cannot_be_written_are_named(measured, tmp_path, capsys):
    file = tmp_path / "results.json"
    file.write_text("nonsense")
    assert bench(["smoke", "--resume", "--out", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"deepcompile: {file} holds no results to go on with: ")
    assert bench(["smoke", "--out", str(file / "x.json")]) == 2
    assert f"cannot be written: {file} is no folder" in capsys.readouterr().err


def test_the_list_names_every_benchmark(capsys):
    assert bench(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*BENCHMARKS, "validation", "confirm"]
