"""``deepcompile train``: an ordinary train step on text, sharded by the public API.

``train_step``, ``create_state`` and the optimizer are what any user of Flax and Optax writes for one device. All that
this project does to them is in the three calls ``deepcompile.shard``, ``step.init`` and ``step``.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from flax.training.train_state import TrainState
from rich.console import Console

import jax_deepcompile as deepcompile
from experiments import report
from experiments.checkpoints import Checkpoints, abstract, claim_folder
from experiments.config import Experiment, Mesh, Optimizer
from experiments.data import Text, held_out_batches, load_text, training_batches
from experiments.language_models import Batch, LanguageModel, language_model
from experiments.loop import mean_loss, training_steps
from experiments.metrics import MetricsWriter, Record, read_metrics
from experiments.progress import progress_view
from experiments.stopping import StopRequest
from experiments.values import ConfigError

Metrics = dict[str, jax.Array]


def make_optimizer(config: Optimizer, steps: int) -> optax.GradientTransformation:
    """AdamW on a warmed-up cosine, behind clipping by global norm."""
    decay_steps = config.decay_steps or steps
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(int(config.warmup_fraction * decay_steps), decay_steps - 1),
        decay_steps=decay_steps,
        end_value=config.learning_rate * config.final_fraction,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay),
    )


def make_create_state(model: LanguageModel, optimizer: optax.GradientTransformation) -> Callable[[jax.Array], TrainState]:
    """The function that makes the whole initial state from a key."""

    def create_state(key: jax.Array) -> TrainState:
        return TrainState.create(apply_fn=model.loss, params=model.init(key), tx=optimizer)

    return create_state


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One optimizer step on the whole batch: global shapes, one device, no word about sharding."""
    loss, gradients = jax.value_and_grad(state.apply_fn)(state.params, batch)
    return state.apply_gradients(grads=gradients), {"loss": loss, "gradient_norm": optax.global_norm(gradients)}


def evaluate_step(state: TrainState, batch: Batch) -> Metrics:
    """The loss of a batch, and nothing else."""
    return {"loss": state.apply_fn(state.params, batch)}


def make_mesh(config: Mesh) -> jax.sharding.Mesh:
    """The mesh ``("fsdp",)``, or ``("data", "fsdp")`` where the state has replicas.

    Raises:
        ConfigError: there are not that many devices.
    """
    devices = jax.devices()
    fsdp = config.fsdp or max(len(devices) // config.replicas, 1)
    if fsdp * config.replicas > len(devices):
        raise ConfigError(
            f"mesh.fsdp={fsdp} times mesh.replicas={config.replicas} needs {fsdp * config.replicas} devices, and there are "
            f"{len(devices)}; the nearest is mesh.fsdp={max(len(devices) // config.replicas, 1)}"
        )
    shape, names = ((fsdp,), ("fsdp",)) if config.replicas == 1 else ((config.replicas, fsdp), ("data", "fsdp"))
    automatic = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=automatic, devices=devices[: fsdp * config.replicas])


def check_batch_size(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
    """Raises a ``ConfigError`` unless every device gets the same number of rows of every microbatch."""
    unit = mesh.size * experiment.train.microbatches
    if rest := experiment.data.batch_size % unit:
        below, above = experiment.data.batch_size - rest, experiment.data.batch_size - rest + unit
        raise ConfigError(
            f"data.batch_size={experiment.data.batch_size} does not divide over {mesh.size} devices and "
            f"{experiment.train.microbatches} microbatch(es); the nearest is {below or above}"
            + (f" or {above}" if below else "")
        )


def train(
    experiment: Experiment, folder: Path, *, resume: bool = False, console: Console | None = None
) -> report.Summary:
    """Runs an experiment; leaves metrics, TensorBoard events, checkpoints and the compiler's report in ``folder``.

    Args:
        experiment: a checked config.
        folder: the output folder; it must not hold a run already, unless ``resume``.
        resume: continue the run in ``folder`` from its newest checkpoint, exactly.
        console: where to report; by default the standard output of the first process.

    Raises:
        ConfigError: something the user can put right, said in one sentence.
    """
    settings = experiment.train
    is_primary = jax.process_index() == 0
    console = console or Console(quiet=not is_primary)
    mesh = make_mesh(experiment.mesh)
    check_batch_size(experiment, mesh)
    text = load_text(experiment.data)
    model = language_model(experiment.model, experiment.data.sequence_length)
    claim_folder(folder, experiment, resume=resume, is_primary=is_primary)

    optimizer = make_optimizer(experiment.optimizer, settings.steps)
    step = deepcompile.shard(
        train_step, mesh, microbatches=settings.microbatches, memory_limit=settings.memory_limit_bytes
    )
    state = step.init(make_create_state(model, optimizer), jax.random.key(settings.seed))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    console.print(report.opening(experiment, folder, text, mesh, parameters), highlight=False, soft_wrap=True)

    state, records = run_steps(experiment, folder, step, state, text, resume=resume, console=console)
    finished = records[-1]["step"] >= settings.steps
    held_out_loss = evaluate(experiment, mesh, state, text) if finished else None
    summary = report.summarise(records, text, total_steps=settings.steps, held_out_loss=held_out_loss)
    explanation = str(step.explain())
    if is_primary:
        report.write_summary(folder, summary)
        (folder / "explain.txt").write_text(explanation + "\n", encoding="utf-8")
    if settings.explain:
        console.print(explanation, highlight=False, markup=False, soft_wrap=True)
    console.print(report.closing(summary, folder), highlight=False, soft_wrap=True)
    return summary


def run_steps(
    experiment: Experiment, folder: Path, step: Any, state: TrainState, text: Text, *, resume: bool, console: Console
) -> tuple[TrainState, list[Record]]:
    """The training steps, with their metrics, progress and checkpoints; ends early on Ctrl-C, after saving.

    Returns:
        The last state, and the records of all steps, those before a resumption included.
    """
    settings, data = experiment.train, experiment.data
    place_in_batch = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    batches = training_batches(text.training, data, **place_in_batch)
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(contextlib.closing(Checkpoints(folder, settings)))
        done = 0
        if resume:
            target = abstract(state)
            del state  # before its successor takes its place in memory
            done, state, place = checkpoints.restore(target, text.fingerprint)
            batches.set_state(place)
        writer = MetricsWriter(folder, after_step=done, enabled=jax.process_index() == 0)
        stack.enter_context(contextlib.closing(writer))
        stop = stack.enter_context(StopRequest())
        view = progress_view(
            console, total_steps=settings.steps, first_step=done, log_every_steps=settings.log_every_steps
        )
        stack.enter_context(view)
        records = read_metrics(folder)
        for state, record in training_steps(
            step,
            state,
            batches,
            first=done + 1,
            last=settings.steps,
            tokens_per_step=data.batch_size * data.sequence_length,
        ):
            records.append(record)
            writer.write(record)
            view.show(record)
            done += 1
            if done % settings.checkpoint_every_steps == 0 or done == settings.steps or stop.requested:
                checkpoints.save(done, state, batches.get_state(), text.fingerprint)
            if stop.requested:
                break
    return state, records


def evaluate(experiment: Experiment, mesh: jax.sharding.Mesh, state: TrainState, text: Text) -> float:
    """The mean loss on held-out text, in nats a token."""
    batches = held_out_batches(
        text.held_out,
        experiment.data,
        experiment.train.held_out_batches,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    return mean_loss(deepcompile.shard(evaluate_step, mesh, donate=False), state, batches)
