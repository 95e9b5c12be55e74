"""The published runs, how a constant is fitted to them, and what the committed page says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from experiments.command import bench
from experiments.validation.compare import (
    SUSTAINED,
    Simulated,
    costs_of,
    fitted,
    from_json,
    left_out_errors,
    median_error,
    to_json,
)
from experiments.validation.page import page, plot_svg
from experiments.validation.programs import MODELS
from experiments.validation.runs import RUNS
from jax_deepcompile.costs.overlap import GPU

pytestmark = pytest.mark.pure

RESULTS = Path(__file__).parents[3] / "experiments" / "results"
COMMITTED = from_json(max(RESULTS.glob("validation_h100_*.json")).read_text())


def made_up(number: int, true_value: float) -> Simulated:
    """A run that comes out exact with ``true_value``, half of whose measured step are products."""
    measured_s = next(run for run in RUNS if run.number == number).measured_s
    steps_s = tuple(measured_s * (0.5 + 0.5 * true_value / value) for value in SUSTAINED)
    return Simulated(number, measured_s, measured_s, 0.0, 0.0, 1 << 30, steps_s)


def test_every_run_has_a_model_and_its_own_number():
    assert {run.model for run in RUNS} <= MODELS.keys()
    assert len({run.number for run in RUNS}) == len(RUNS) >= 16
    assert all(run.source and run.cluster.gpus % run.replicas == 0 for run in RUNS)
    assert all(run.reason for run in RUNS if not (run.is_network_known and run.is_compiled))


def test_what_maxtext_printed_is_read_by_its_own_convention():
    """492 TFLOP/s a GPU: six FLOPs for each parameter and token, and causal attention."""
    (second,) = (run for run in RUNS if run.number == 2)
    assert second.measured_s == pytest.approx(1.4536, abs=1e-3)


def test_costs_are_those_of_the_runs_own_cluster():
    costs = {run.number: costs_of(run) for run in RUNS}
    assert costs[7].hardware.name == "H200 SXM"
    assert costs[3].network.node_bytes_per_s == pytest.approx(50e9)
    assert costs[1].overlap == GPU
    assert costs_of(RUNS[0], 0.5).overlap.sustained == 0.5


def test_the_constant_is_found_that_the_runs_were_made_with():
    runs = [made_up(number, 0.7) for number in (1, 2, 7)]
    assert fitted(runs) == pytest.approx(0.7)
    assert runs[0].error_at(0.7) == pytest.approx(0.0, abs=1e-9)
    assert runs[0].error_at(0.66) > 0


def test_a_run_left_out_does_not_help_itself():
    runs = [made_up(1, 0.7), made_up(2, 0.7), made_up(3, 0.7), made_up(7, 0.8)]
    assert abs(left_out_errors(runs)[7]) > 0.04
    assert abs(left_out_errors(runs)[1]) < 0.01


def test_runs_that_no_compiler_fused_are_not_fitted_to():
    assert fitted([made_up(1, 0.7), made_up(9, 0.8)]) == pytest.approx(0.7)
    assert fitted([made_up(9, 0.8)]) == fitted([]) == GPU.sustained


def test_results_survive_json():
    assert from_json(to_json(COMMITTED, "2026-01-01", "0.10.2")) == COMMITTED


def test_the_committed_page_is_what_its_results_say():
    (text,) = (max(RESULTS.glob("validation_h100_*.md")).read_text(),)
    for run in COMMITTED:
        assert f"| {run.number} | {run.run.model} |" in text
        assert f"| {run.error:+.1%} |" in text
    assert max(RESULTS.glob("validation_h100_*.svg")).name in text


def test_the_simulator_is_as_close_as_is_said():
    """As README says."""
    assert [run.number for run in COMMITTED] == [run.number for run in RUNS]
    known = [run for run in COMMITTED if run.run.how == "jit" and run.run.is_network_known]
    assert [run.number for run in known] == [1, 2, 7]
    assert max(abs(run.error) for run in known) < 0.05
    assert median_error(run.error for run in COMMITTED) < 0.06
    assert median_error(left_out_errors(COMMITTED).values()) < 0.08
    assert all(run.run.reason for run in COMMITTED if abs(run.error) > 0.12)
    assert fitted(COMMITTED) == pytest.approx(GPU.sustained, abs=0.006)


def test_a_page_and_its_plot():
    runs = COMMITTED[:3]
    text = page(runs, "2026-01-01", "0.10.2", "plot.svg")
    assert "3 published runs" in text
    assert "![Simulated against measured tokens a second and GPU](plot.svg)" in text
    too_large = dataclasses.replace(runs[0], peak_bytes=90 << 30)
    assert "| **90.0** |" in page([too_large, *runs[1:]], "2026-01-01", "0.10.2", "plot.svg")
    assert plot_svg(runs).count("<svg") == 1


def test_a_row_that_is_not_there(capsys):
    assert bench(["validation", "--rows", "99"]) == 2
    assert "validation has no row 99" in capsys.readouterr().err
