"""Pictures of steps, on matplotlib where that is installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from jax_deepcompile import errors
from jax_deepcompile.costs.simulation import Simulation, merged
from jax_deepcompile.costs.streams import Stream
from jax_deepcompile.report import timeline
from jax_deepcompile.report.memory_curve import LimitedStep

_GIB = 1 << 30
_WAITS = "waits"
_COLOURS = {
    Stream.COMPUTE: "#0072B2",
    _WAITS: "#D55E00",
    Stream.ALL_GATHER: "#009E73",
    Stream.REDUCE_SCATTER: "#E69F00",
    Stream.ALL_REDUCE: "#CC79A7",
    Stream.TO_HOST: "#56B4E9",
    Stream.FROM_HOST: "#F0E442",
}
"""Of Okabe and Ito, which the colour-blind tell apart; rows have their names, too."""
_OTHER = "#999999"
_EDGED = 150
"""As many operations of a row are drawn with edges; more would be all edges."""
_WIDTH = 8.0


def timeline_plot(simulation: Simulation, start_s: float, end_s: float, ax: Any = None) -> Any:
    """What runs when between ``start_s`` and ``end_s``, a row for each stream; see ``SimulatedStep.plot_timeline``."""
    events = list(simulation.unrolled())
    rows: dict[str, list[tuple[float, float]]] = {Stream.COMPUTE: [], _WAITS: []}
    rows[_WAITS] = [(wait.start_s, wait.end_s) for wait in timeline.waits(events)]
    for event in sorted(events, key=lambda event: list(Stream).index(event.stream)):
        rows.setdefault(event.stream, []).append((event.start_s, event.end_s))
    ax = _axes(ax, 0.9 + 0.3 * len(rows))
    for place, (name, spans) in enumerate(rows.items()):
        shown = [(max(a, start_s), min(b, end_s)) for a, b in spans if a < end_s and b > start_s]
        is_edged = len(shown) <= _EDGED
        bars = shown if is_edged else merged(shown)
        edges = {"edgecolor": "white", "linewidth": 0.4} if is_edged else {"linewidth": 0}
        ax.broken_barh([(a, b - a) for a, b in bars], (place - 0.4, 0.8), color=_COLOURS.get(name, _OTHER), **edges)
    ax.set(xlim=(start_s, end_s), ylim=(len(rows) - 0.5, -0.5), xlabel="seconds into the step, simulated")
    ax.set_yticks(range(len(rows)), labels=list(rows))
    hidden = f"communication {simulation.communication_s:.3g} s, {simulation.exposed_communication_s:.3g} s exposed"
    ax.set_title(f"{simulation.step_s:.4g} s a step, compute {simulation.compute_s:.4g} s, {hidden}", fontsize="medium")
    return ax


def memory_plot(simulation: Simulation, limit: int | None, ax: Any = None) -> Any:
    """Device memory that is needed over the step; see ``SimulatedStep.plot_memory``."""
    seconds, sizes = timeline.live_bytes(simulation)
    ax = _axes(ax, 2.6)
    gib = [size / _GIB for size in sizes]
    if gib:
        ax.fill_between([*seconds, simulation.step_s], [*gib, gib[-1]], step="post", color="#56B4E9", linewidth=0)
    for size, name, style in ((simulation.memory.argument_bytes, "state and batch", ":"), (limit, "limit", "--")):
        if size is not None:
            ax.axhline(size / _GIB, color="black", linestyle=style, linewidth=1, label=name)
    ax.set(xlim=(0, simulation.step_s), ylim=(0, None), ylabel="GiB a device")
    ax.set_xlabel("seconds into the step, simulated")
    ax.set_title(f"takes {simulation.peak_bytes / _GIB:.4g} GiB, gaps between buffers included", fontsize="medium")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    return ax


def memory_curve_plot(curve: Sequence[LimitedStep], ax: Any = None) -> Any:
    """Seconds a step over memory limits; those that nothing fits are marked."""
    ax = _axes(ax, 2.6)
    ordered = sorted(curve, key=lambda each: each.limit_bytes)
    fitting = [(each.limit_bytes / _GIB, each.fits.step_s) for each in ordered if each.fits is not None]
    ax.plot([limit for limit, _ in fitting], [step_s for _, step_s in fitting], "o-", color="#0072B2", clip_on=False)
    too_small = [each.limit_bytes / _GIB for each in ordered if each.fits is None]
    if too_small:
        ax.plot(too_small, [0] * len(too_small), "X", color="#D55E00", label="does not fit", clip_on=False, zorder=3)
        ax.legend(fontsize="small")
    ax.set(ylim=(0, None), xlabel="memory limit, GiB a device", ylabel="s a step, simulated")
    return ax


def _axes(ax: Any, height: float) -> Any:
    """``ax``, or new axes ``height`` inches high."""
    if ax is not None:
        return ax
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise errors.MissingExtraError("a plot", error.name or "matplotlib", "train") from error
    return pyplot.subplots(figsize=(_WIDTH, height), layout="constrained")[1]
