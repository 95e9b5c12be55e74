"""What is said at the beginning and the end of a run, and ``summary.json``."""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import jax

from jax_deepcompile.runtime.files import write_whole
from jax_deepcompile.training.config import Experiment
from jax_deepcompile.training.data import Dataset
from jax_deepcompile.training.metrics import Record

_MEAN_OVER_STEPS = 10  # one batch's loss says little about the model


@dataclasses.dataclass(frozen=True)
class Summary:
    """How a run ended. Losses and the entropy are in nats a target, such as a byte.

    Attributes:
        steps: steps done in all, earlier parts of a resumed run included.
        finished: False where the run was asked to stop before its last step.
        final_loss: mean over the last ten steps' batches.
        held_out_loss: on text the run did not train on; none where the run was stopped.
        unigram_entropy: the loss of the best model that sees no context.
        tokens_per_s: at the median step.
        step_s: the median.
        compile_s: tracing, planning and compiling, before the first step.
        stopped_by: the signal that asked the run to end, ``SIGINT`` or ``SIGTERM``; none where nothing did.
    """

    steps: int
    finished: bool
    final_loss: float
    held_out_loss: float | None
    unigram_entropy: float
    tokens_per_s: float
    step_s: float
    compile_s: float
    stopped_by: str | None = None


def summarise(
    records: Sequence[Record],
    dataset: Dataset,
    *,
    total_steps: int,
    held_out_loss: float | None,
    stopped_by: str | None = None,
) -> Summary:
    """The summary of a run with these records, of which there is at least one whole: the last."""

    def values(name: str) -> list[float]:
        return [record[name] for record in records if name in record]

    return Summary(
        steps=int(records[-1]["step"]),
        finished=records[-1]["step"] >= total_steps,
        final_loss=statistics.fmean(values("loss")[-_MEAN_OVER_STEPS:]),
        held_out_loss=held_out_loss,
        unigram_entropy=dataset.unigram_entropy_nats,
        tokens_per_s=statistics.median(values("tokens_per_s")),
        step_s=statistics.median(values("step_s")),
        compile_s=sum(values("compile_s")),
        stopped_by=stopped_by,
    )


def write(folder: Path, summary: Summary, explanation: str) -> None:
    """Writes ``summary.json`` and ``explain.txt``."""
    write_whole(folder / "summary.json", json.dumps(dataclasses.asdict(summary), indent=2) + "\n")
    write_whole(folder / "explain.txt", explanation + "\n")


def opening(experiment: Experiment, folder: Path, dataset: Dataset, mesh: jax.sharding.Mesh, parameters: int) -> str:
    """What is about to run, in three lines."""
    data = experiment.data
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return (
        f"model    {type(experiment.model).__name__}, {parameters:,} parameters\n"
        f"devices  {mesh.size} x {mesh.devices.flat[0].device_kind} ({axes}), {jax.process_count()} process(es)\n"
        f"data     {dataset.summary}; unigram entropy {dataset.unigram_entropy_nats:.3f} nats\n"
        f"run      {experiment.train.steps} steps of {data.batch_size} x {data.targets} {data.target}s, into "
        f"{folder}"
    )


def closing(summary: Summary, folder: Path, target: str) -> str:
    """What came of it: the loss beside the entropy of the targets, the speed, where the files are."""

    def in_nats_and_bits(nats: float) -> str:
        return f"{nats:.3f} nats, {nats / math.log(2):.3f} bits per {target}"

    lines = [
        f"{'finished' if summary.finished else 'stopped'} after {summary.steps} steps: "
        f"{summary.step_s * 1e3:.0f} ms/step, {summary.tokens_per_s:,.0f} tokens/s (medians); "
        f"compiled in {summary.compile_s:.1f} s",
        f"{'unigram entropy':<17}{in_nats_and_bits(summary.unigram_entropy)}",
        f"{'final loss':<17}{in_nats_and_bits(summary.final_loss)}, "
        f"{_distance(summary.unigram_entropy - summary.final_loss)} the entropy; the mean of the last "
        f"{min(summary.steps, _MEAN_OVER_STEPS)} steps",
    ]
    if summary.held_out_loss is not None:
        lines.append(f"{'held-out loss':<17}{in_nats_and_bits(summary.held_out_loss)}")
    lines.append(f"written to {folder}: metrics.jsonl, tensorboard/, checkpoints/, explain.txt, summary.json")
    if not summary.finished:
        lines.append("continue with the same command and --resume")
    return "\n".join(lines)


def _distance(nats: float) -> str:
    return f"{abs(nats):.3f} nats {'below' if nats >= 0 else 'above'}"
