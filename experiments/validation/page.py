"""The validation page: a table and a plot of simulated against measured steps."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import fields

from experiments.markdown import table
from experiments.validation.compare import GIB, Simulated, fitted, left_out_errors, median_error
from jax_deepcompile.costs.overlap import GPU

_COLUMNS = (
    "run",
    "model",
    "GPUs",
    "network a node",
    "tokens a GPU",
    "rebuilt as",
    "measured s",
    "simulated s",
    "error",
    "left out",
    "tokens/s/GPU",
    "compute s",
    "exposed s",
    "peak GiB",
    "notes",
)

_HOW = {"jit": "`jax.jit`, the source's flags", "prefetch": "fully sharded, prefetch alone"}


def page(runs: Sequence[Simulated], date: str, jax_version: str, plot: str) -> str:
    """The page in Markdown, of which ``plot`` is the picture's file."""
    left_out = left_out_errors(runs)
    known = [run for run in runs if run.run.how == "jit" and run.run.is_network_known]
    lines = [
        f"# The simulator against {len(runs)} published runs, {date}",
        "",
        f"`deepcompile bench validation --out FILE`, jax {jax_version}. Each run is rebuilt from `models/`, compiled",
        "by XLA:GPU for the cluster that it ran on, and simulated from its scheduled HLO by published tables and the",
        "constants below, of which `sustained` is fitted: to the runs that were compiled as a whole, by JAX or by",
        "`torch.compile`. `left out` is the error of a run with that constant fitted to the others of these.",
        "Runs of `jax.jit` are compiled by today's XLA, not by that of their day. `peak` is XLA's own figure: a step",
        "in bold does not fit its GPU as this package's program, which is simulated all the same.",
        "",
        f"* Median error {median_error(run.error for run in runs):.1%}, largest "
        f"{max(abs(run.error) for run in runs):.1%}; left out of the fit, the median is "
        f"{median_error(left_out.values()):.1%}.",
        f"* `jax.jit` on known networks: {', '.join(f'run {run.number} {run.error:+.1%}' for run in known)}.",
        f"* `sustained` fitted is {fitted(runs):g}; the package has {GPU.sustained:g}.",
        f"* Constants: {', '.join(f'{each.name} {getattr(GPU, each.name):.4g}' for each in fields(GPU))}.",
        "",
        f"![Simulated against measured tokens a second and GPU]({plot})",
        "",
        *table(_COLUMNS, (_cells(run, left_out[run.number]) for run in runs)),
        "",
        "Sources:",
        "",
        *(f"* Runs {_numbers(runs, source)}: {source}." for source in dict.fromkeys(run.run.source for run in runs)),
    ]
    return "\n".join(lines) + "\n"


def plot_svg(runs: Sequence[Simulated]) -> str:
    """Tokens a second and GPU, simulated against measured, with lines at 12 % from the diagonal."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot(
        xscale="log", yscale="log", xlabel="measured tokens/s/GPU", ylabel="simulated tokens/s/GPU", aspect="equal"
    )
    for how, marker in (("jit", "o"), ("prefetch", "s")):
        points = [(_rate(run, run.run.measured_s), _rate(run, run.step_s)) for run in runs if run.run.how == how]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=marker, label=_HOW[how].replace("`", ""), alpha=0.7)
    rates = [_rate(run, step_s) for run in runs for step_s in (run.run.measured_s, run.step_s)]
    ends = [0.8 * min(rates), 1.25 * max(rates)]
    for times, style in ((1, "-"), (1.12, ":"), (1 / 1.12, ":")):
        axes.plot(ends, [times * end for end in ends], style, color="gray", linewidth=0.8)
    axes.legend()
    figure.canvas = FigureCanvasSVG(figure)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _cells(run: Simulated, left_out: float) -> tuple[str, ...]:
    said = run.run
    peak, limit = run.peak_bytes / GIB, said.cluster.target().hardware.memory_bytes / GIB
    return (
        str(run.number),
        said.model,
        f"{said.cluster.gpus} {said.cluster.gpu}" + (f", {said.replicas} replicas" if said.replicas > 1 else ""),
        said.cluster.network + ("" if said.is_network_known else ", assumed") if said.cluster.nodes > 1 else "one node",
        f"{said.sequence} x {said.batch}" + (f" x {said.microbatches}" if said.microbatches > 1 else ""),
        _HOW[said.how],
        f"{said.measured_s:.3f}",
        f"{run.step_s:.3f}",
        f"{run.error:+.1%}",
        f"{left_out:+.1%}",
        f"{_rate(run, run.step_s):.0f}",
        f"{run.compute_s:.3f}",
        f"{run.exposed_s:.3f}",
        f"{peak:.1f}" if peak <= limit else f"**{peak:.1f}**",
        said.reason,
    )


def _rate(run: Simulated, step_s: float) -> float:
    return run.run.tokens_per_gpu / step_s


def _numbers(runs: Sequence[Simulated], source: str) -> str:
    return ", ".join(str(run.number) for run in runs if run.run.source == source)
