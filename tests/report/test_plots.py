"""Plots: what is drawn is what was simulated; without matplotlib an error says what to install."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import matplotlib as mpl
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from jax_deepcompile.costs.simulator import simulate
from jax_deepcompile.report.simulated import SimulatedStep
from tests.costs.snippets import BODY, COSTS, WHILE, module


@pytest.fixture(autouse=True)
def pyplot() -> Iterator:
    mpl.use("Agg")
    yield (plt := importlib.import_module("matplotlib.pyplot"))
    plt.close("all")


@pytest.fixture
def run() -> SimulatedStep:
    return SimulatedStep(**vars(simulate(module(WHILE, BODY), COSTS)), devices=4)


@pytest.mark.pure
def test_a_timeline_has_a_row_a_stream_and_what_is_waited_for(run: SimulatedStep):
    ax = run.plot_timeline()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["compute", "waits", "all-gather"]
    drawn_s = [sum(path.get_extents().width for path in row.get_paths()) for row in ax.collections]
    assert drawn_s == pytest.approx([run.compute_s, run.exposed_communication_s, run.communication_s])
    assert ax.get_xlim() == (0, run.step_s)
    part = run.plot_timeline(1.0, 1.5)
    assert part.get_xlim() == (1.0, 1.5)
    assert all(1.0 <= x <= 1.5 for row in part.collections for path in row.get_paths() for x in path.vertices[:, 0])


@pytest.mark.pure
@pytest.mark.parametrize(("start_s", "end_s"), [(2.0, 1.0), (-1.0, 1.0), (8.0, None), (1.0, 1.0)])
def test_no_part_of_the_step_is_refused(run: SimulatedStep, start_s: float, end_s: float | None):
    with pytest.raises(errors.ArgumentError, match="plot_timeline"):
        run.plot_timeline(start_s, end_s)


@pytest.mark.pure
def test_memory_is_drawn_on_axes_of_ones_own(run: SimulatedStep, pyplot):
    _, ax = pyplot.subplots()
    assert run.plot_memory(limit=1 << 30, ax=ax) is ax
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["state and batch", "limit"]
    top = max(y for row in ax.collections for path in row.get_paths() for y in path.vertices[:, 1])
    assert top == pytest.approx(run.memory.live_peak_bytes / 2**30)
    assert len(run.plot_memory().lines) == 1


@pytest.mark.pure
def test_without_matplotlib_an_error_says_what_to_install(run: SimulatedStep, monkeypatch: pytest.MonkeyPatch):
    def missing(name: str):
        raise ModuleNotFoundError(f"No module named {name}", name="matplotlib")

    monkeypatch.setattr("jax_deepcompile.report.plots.importlib.import_module", missing)
    with pytest.raises(errors.MissingExtraError, match=r"pip install 'jax-deepcompile\[train\]'"):
        run.plot_timeline()


@pytest.mark.cpu_mesh
@pytest.mark.usefixtures("quick_compilation")
def test_a_step_is_planned_once_for_each_limit():
    def step(params, batch):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
        return params - 0.1 * grads, loss

    sharded = deepcompile.shard(step, {"fsdp": 8}, passes=())
    with pytest.raises(errors.NotTracedError):
        sharded.plot_memory_curve(["1GiB"])
    traced = sharded.trace(jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32))
    for ax in (traced.plot_memory_curve(["1GiB", 1024, "2GiB"]), sharded.plot_memory_curve(["2GiB", 1024, "1GiB"])):
        fitting, too_small = ax.lines
        assert list(fitting.get_xdata()) == [1.0, 2.0]
        assert all(seconds > 0 for seconds in fitting.get_ydata())
        assert list(too_small.get_xdata()) == [1024 / 2**30]
    fits, too_small = map(repr, traced.memory_curve(["1GiB", 1024]))
    assert re.fullmatch(r"LimitedStep\(of 1\.00 GiB: [\d.]+ [mu]s in [\d.]+ [KM]iB\)", fits)
    assert too_small == "LimitedStep(of 1.0 KiB: does not fit)"
    with pytest.raises(errors.MemoryLimitError):
        traced.plot_memory_curve(["much"])
