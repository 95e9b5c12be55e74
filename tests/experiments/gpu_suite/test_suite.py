"""The suite as a whole: failures, files; its cases are stand-ins here."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.command import bench
from experiments.gpu_suite import suite
from experiments.gpu_suite.results import Results, SectionResult, Status
from experiments.gpu_suite.sizes import SIZES, offload, tiny
from experiments.gpu_suite.summary import summary

pytestmark = pytest.mark.cpu_mesh

FACTS = {"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3", "versions": {"jax": "0.11.2"}}

MATMUL = {"m": 64, "n": 64, "k": 64, "dtype": "bf16", "form": "nn"}


CONFTEST = "from experiments.gpu_suite.conftest import left_s, pytest_addoption, sizes"

CASES = """
import json, os, signal, time
import pytest

CASES = [("matmul", "hang"), ("memory", "well"), ("memory", "crash"), ("matmul", "late"), ("memory", "error")]

@pytest.mark.parametrize(("section", "case"), CASES, ids=[": ".join(each) for each in CASES])
def test_case(section, case, left_s, record_property):
    record_property("row", json.dumps({"case": case, "loss": float("nan")}))
    if case == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if case == "hang":
        time.sleep(60)
    if case == "error":
        raise ValueError("no more")
"""


def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path: Path, capsys):
    assert suite.run(tmp_path / "out.json") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("deepcompile bench --suite: no GPU is attached to this machine: JAX found cpu devices")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rows", "code"), [(({"seconds": 1.0},), 0), (({"error": "no"},), 1)])
def test_exit_codes_with_a_gpu(rows, code, tmp_path, monkeypatch):
    results = Results("2026-11-21", "a GPU", {}, "full", (SectionResult("matmul", rows, "", 1.0),))
    monkeypatch.setattr(suite, "find_facts", lambda: (FACTS, ""))
    monkeypatch.setattr(suite, "measure", lambda *args: results)
    assert suite.run(tmp_path / "out.json") == code


@pytest.mark.parametrize(("name", "sizes"), [("gpu", "full"), ("offload", "offload")])
def test_the_command_measures_what_its_suite_is(name, sizes, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(suite, "find_facts", lambda: (FACTS, ""))
    monkeypatch.setattr(suite, "measure", lambda *args: asked.append(args) or Results("", "", {}, sizes))
    assert bench(["--suite", name, "--out", str(tmp_path / "out.json")]) == 1, "nothing was measured"
    assert asked == [(tmp_path / "out.json", sizes, FACTS)]
    assert SIZES[sizes]().name == sizes


def test_the_suite_of_offload_is_one_section():
    sizes = offload()
    assert [name for name, _ in sizes.budgets.sections_s] == ["offload"]
    assert sizes.budgets.until_s("offload") + sizes.budgets.grace_s < 8 * 60


def test_a_broken_installation_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite, "find_facts", lambda: ({}, "RuntimeError: Unable to initialize backend 'cuda'"))
    assert suite.run(tmp_path / "out.json") == 2
    assert "Unable to initialize backend 'cuda'" in capsys.readouterr().err


def test_cases_that_fail_do_not_lose_the_others(tmp_path: Path, monkeypatch):
    """The time of the first section is over 10 s after they begin, and that of the second later."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(CASES)
    begun_s = time.monotonic() + 10 - tiny().budgets.until_s("matmul")
    monkeypatch.setattr(suite, "time", SimpleNamespace(monotonic=lambda: begun_s))
    results = suite.measure(tmp_path / "out.json", "tiny", FACTS, tmp_path)
    products, kernels = results.sections
    (hung,) = products.rows
    (crashed,) = (row for row in kernels.rows if row["case"] == "crash")
    assert hung["case"] == "hang"
    assert all("crashed while running" in row["error"] for row in (hung, crashed))
    assert products.error == "out of time: 1 cases were not reached"
    others = [row for row in kernels.rows if row is not crashed]
    assert {row["case"]: row.get("loss") for row in others if "error" not in row} == {"well": "NaN", "error": "NaN"}
    assert [row for row in others if "error" in row] == [{"case": "error", "error": "ValueError: no more"}]
    assert (products.status, kernels.status) == (Status.FAILED, Status.PARTIAL)
    assert (tmp_path / "out.json").read_text() == results.to_json() + "\n"
    assert "ValueError: no more" in (tmp_path / "out.md").read_text()


def test_a_section_that_did_not_run_has_failed():
    assert Results("", "", {}, "").section("x").status is Status.FAILED


RESULTS = Results(
    "2026-11-21",
    "NVIDIA H100 80GB HBM3",
    {"jax": "0.11.2"},
    "full",
    (
        SectionResult(
            "matmul",
            (
                MATMUL | {"compiler": "cublas", "seconds": 2e-6, "flops_per_s": 1e12},
                MATMUL | {"compiler": "default", "seconds": 1e-6, "flops_per_s": 2e12},
                MATMUL | {"form": "nt", "compiler": "default", "error": "XlaRuntimeError: a|b\nc"},
            ),
            "",
            1.0,
        ),
        SectionResult(
            "memory",
            (
                {"kind": "tiny", "launched": "a", "kernels": 8, "period_s": 3e-6, "kernel_s": 2e-6, "gap_s": 1e-6},
                {"kind": "tiny", "launched": "b", "kernels": 8, "period_s": 2.5e-6, "kernel_s": None, "gap_s": None},
                {"kind": "copy", "operand_bytes": 1, "size_bytes": 1 << 21, "seconds": 1e-6, "bytes_per_s": 2e12},
            ),
            "out of time",
            1.0,
        ),
        SectionResult(
            "host_copies",
            (
                {"direction": "to host", "size_bytes": 8, "how": "alone", "seconds": 1.0, "bytes_per_s": 8.0},
                {
                    "direction": "to host", "size_bytes": 8, "how": "beside products", "seconds": 1.0,
                    "products_s": 1.0, "together_s": 1.0, "hidden": 1.0,
                },
            ),
            "",
            1.0,
        ),
        SectionResult(
            "two_processes",
            (
                {"what": "losses", "system": "jit", "losses": [5.5, 5.25], "compile_and_first_steps_s": 3.0},
                {"what": "agreement", "relative_difference": 1e-6, "step_s": {"jit": 0.5, "shard": 0.25}},
            ),
            "",
            1.0,
        ),
    ),
)  # fmt: skip


def test_summary():
    text = summary(RESULTS)
    assert text.startswith("# One NVIDIA H100 80GB HBM3, measured 2026-11-21\n")
    assert "| 64 | 64 | 64 | bf16 | nn | default | 1.0 | 2 |  |" in text
    assert "* failed: 64 64 64 bf16 nt default: `XlaRuntimeError: a/b c`" in text
    assert "partial after 1 s, 3 rows.\n\n```\nout of time\n```" in text
    assert "| b | 8 | 2.5 |  |  |" in text
    assert "| jit | 5.50000, 5.25000 | 3.0 |" in text
    assert "| 1.0e-06 | jit 500.00, shard 250.00 |" in text
    assert "mean nothing" in summary(dataclasses.replace(RESULTS, sizes="tiny"))
