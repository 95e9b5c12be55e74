"""Pictures of real plans for ``docs/concepts.md``, and the figures that they draw.

``python -m experiments.pictures`` plans eight layers of Llama-3-70B for 32 H100s that are not here, under a few memory
limits, in five minutes or so, and writes ``streams.svg``, ``layers.svg``, ``memory.svg``, ``limits.svg``,
``pictures.json`` and the plans as text into ``--out DIR``. A test holds the figures against what planning finds now.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
import matplotlib as mpl
from matplotlib.figure import Figure

import jax_deepcompile as deepcompile
from experiments.bench.steps import llama_gradients, training_step
from experiments.bench.workload import Cluster
from models import llama

_LAYERS, _TOKENS = 8, 1024
LIMITS = ("6GiB", "8GiB", "9GiB", "10GiB", "12GiB", "16GiB")
_WAYS = {"sharded only": {"passes": ()}, "planned": {}, "planned for 9 GiB": {"memory_limit": "9GiB"}}
"""What is drawn of the one step, by the options of ``shard``."""
_SHOWN_MS = (48.0, 96.0)
"""A part of the planned step: backward begins."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "jax_deepcompile", "font.size": 9})
    with tempfile.TemporaryDirectory() as plans:
        step, given = example(cache_dir=plans)
        runs = {name: simulated(step, given, name) for name in _WAYS}
        curve = step.trace(*given).memory_curve(LIMITS)
        draw(runs, out)
        figure, (ax,) = _figure(2.6)
        step.trace(*given).plot_memory_curve(curve, ax)
        _save(figure, out / "limits.svg")
        (out / "plan.txt").write_text(text(step.plan(*given)))
        (out / "plan_for_9_gib.txt").write_text(text(step.reshard(**_WAYS["planned for 9 GiB"]).plan(*given)))
    drawn = {name: figures(run) for name, run in runs.items()} | {"step_s by GiB": curve_figures(curve)}
    (out / "pictures.json").write_text(json.dumps(drawn, indent=1) + "\n")


def example(**options: Any) -> tuple[deepcompile.ShardedStep, tuple]:
    """The step, 1024 tokens a GPU, and the shapes that it is given."""
    config = dataclasses.replace(llama.LLAMA3_70B, n_layers=_LAYERS, attention="cudnn")
    gradients, state = llama_gradients(config, by_hand=False)
    step = deepcompile.shard(training_step(gradients), Cluster().make_mesh(), memory_limit="72GiB", **options)
    return step, (state, jax.ShapeDtypeStruct((step.mesh.size, _TOKENS + 1), jnp.int32))


def simulated(step: deepcompile.ShardedStep, given: tuple, name: str) -> Any:
    """One of ``_WAYS``, compiled and played."""
    compiled = step.reshard(**_WAYS[name]).lower(*given).compile()
    return deepcompile.simulate(compiled, Cluster().make_mesh())


def figures(run: Any) -> dict[str, float]:
    """What a picture of ``run`` draws, in seconds and bytes."""
    names = ("step_s", "compute_s", "communication_s", "exposed_communication_s", "peak_bytes")
    return {name: getattr(run, name) for name in names}


def text(plan: deepcompile.Plan) -> str:
    """What ``plan`` decides, and what became of each proposal, each from a line of its own."""
    verdicts = {True: "accepted", False: "rejected"}
    tried = [f"{verdicts[each.accepted]}: {each.strategy}: {each.decision}; {each.reason}" for each in plan.records]
    wrapped = textwrap.TextWrapper(88, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapped.fill(line) for line in (*str(plan).splitlines(), "", "proposed, in turn:", *tried)) + "\n"


def curve_figures(curve: Sequence[Any]) -> dict[str, float | None]:
    """Seconds a step by GiB of memory limit, None where it does not fit, of a step's ``memory_curve``."""
    return {f"{each.limit_bytes / 2**30:g}": each.fits and each.fits.step_s for each in reversed(curve)}


def draw(runs: dict[str, Any], out: Path) -> None:
    """Writes the pictures of single plans."""
    last_s = max(run.step_s for run in runs.values())
    figure, axes = _figure(6.4, len(runs))
    for (name, run), ax in zip(runs.items(), axes, strict=True):
        run.plot_timeline(0.0, last_s, ax)
        ax.set_title(f"{name}: {1e3 * run.step_s:.0f} ms a step, {1e3 * run.exposed_communication_s:.0f} ms exposed")
    _save(figure, out / "streams.svg")

    figure, (ax,) = _figure(2.4)
    runs["planned"].plot_timeline(*(1e-3 * ms for ms in _SHOWN_MS), ax)
    ax.set_title("planned, where backward begins")
    _save(figure, out / "layers.svg")

    figure, axes = _figure(6.4, len(runs))
    for (name, run), ax in zip(runs.items(), axes, strict=True):
        run.plot_memory(9 << 30 if "9 GiB" in name else None, ax)
        ax.set(xlim=(0, last_s), ylim=(0, 16))
        ax.set_title(f"{name}: takes {run.peak_bytes / 2**30:.1f} GiB")
    _save(figure, out / "memory.svg")


def _figure(height: float, rows: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(8.0, height), layout="constrained")
    return figure, figure.subplots(rows, 1, squeeze=False)[:, 0]


def _save(figure: Figure, path: Path) -> None:
    """Lines and words as vectors, thousands of bars as pixels."""
    for ax in figure.axes:
        for bars in ax.collections:
            bars.set_rasterized(True)
    figure.savefig(path, dpi=200, metadata={"Date": None})


if __name__ == "__main__":
    main()
