"""``deepcompile train``: an ordinary train step, sharded by the public API.

The train step, the state and the optimizer are what any user of Flax and Optax writes for one device. All that
this project does to them is in the three calls ``shard``, ``step.init`` and ``step``.
"""

import contextlib
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from rich.console import Console

from jax_deepcompile.api import shard
from jax_deepcompile.runtime.interrupts import Watch
from jax_deepcompile.runtime.progress import Progress
from jax_deepcompile.training import report
from jax_deepcompile.training.checkpoints import Checkpoints, abstract, claim_folder, parameters_of
from jax_deepcompile.training.config import ConfigError, Experiment, Mesh, Optimizer
from jax_deepcompile.training.data import Dataset, held_out_batches, load_data, training_batches
from jax_deepcompile.training.loop import mean_loss, seconds_of, training_steps
from jax_deepcompile.training.metrics import MetricsWriter, Record, metrics_path, read_metrics, unreadable_lines
from jax_deepcompile.training.model import Batch, Metrics, Model, build_model
from jax_deepcompile.training.progress import progress_view
from jax_deepcompile.training.stopping import StopRequest


class State(TrainState):
    """With parameters that are not trained, where the model has such."""

    frozen: Any = None

    @property
    def more(self) -> tuple[Any, ...]:
        """What the loss takes beyond parameters, batch and key."""
        return () if self.frozen is None else (self.frozen,)


Step = Callable[[State, Batch], tuple[State, Metrics]]


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


def make_create_state(model: Model, optimizer: optax.GradientTransformation) -> Callable[[jax.Array], State]:
    """The function from a key to the whole initial state."""

    def create_state(key: jax.Array) -> State:
        frozen = None if model.frozen is None else model.frozen(key)
        state = State.create(apply_fn=model.loss, params=model.init(key), tx=optimizer, frozen=frozen)
        return state.replace(step=jnp.zeros((), jnp.int32))  # of the type that a checkpoint has it in

    return create_state


def make_train_step(model: Model, seed: int) -> Step:
    """One optimizer step on the whole batch: global shapes, one device, no word about sharding."""

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        dropout_key = jax.random.fold_in(jax.random.key(seed), state.step)
        gradient = jax.grad(model.loss, has_aux=True)
        gradients, metrics = gradient(state.params, batch, dropout_key, *state.more)
        return state.apply_gradients(grads=gradients), metrics | {"gradient_norm": optax.tree.norm(gradients)}

    return train_step


def make_evaluate_step(model: Model) -> Callable[[State, Batch], Metrics]:
    """The metrics of a batch, with nothing dropped and nothing learned."""

    def evaluate_step(state: State, batch: Batch) -> Metrics:
        return model.loss(state.params, batch, None, *state.more)[1]

    return evaluate_step


def abstract_step(experiment: Experiment) -> tuple[Step, Any, Any]:
    """What a run repeats, with the shapes of its state and of a global batch: ``(step, state, batch)``.

    Raises:
        ConfigError: something the user can put right, said in one sentence.
    """
    data, settings = experiment.data, experiment.train
    model = build_model(experiment.model, data)
    create_state = make_create_state(model, make_optimizer(experiment.optimizer, settings.steps))
    batch = abstract_batch(load_data(data), data.batch_size)
    return make_train_step(model, settings.seed), jax.eval_shape(create_state, jax.random.key(0)), batch


def abstract_batch(dataset: Dataset, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a global batch of ``size`` rows."""
    row = dataset.training[0]
    return {name: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype) for name, leaf in row.items()}


def make_mesh(config: Mesh) -> jax.sharding.Mesh:
    """The mesh ``("fsdp",)``, or ``("data", "fsdp")`` where the state has replicas.

    Raises:
        ConfigError: there are not that many devices.
    """
    devices = jax.devices()
    fsdp = config.fsdp or max(len(devices) // config.replicas, 1)
    if fsdp * config.replicas > len(devices):
        raise ConfigError(
            f"mesh.fsdp={fsdp} times mesh.replicas={config.replicas} needs {fsdp * config.replicas} devices, and there "
            f"are {len(devices)}; the nearest is mesh.fsdp={max(len(devices) // config.replicas, 1)}"
        )
    shape, names = ((fsdp,), ("fsdp",)) if config.replicas == 1 else ((config.replicas, fsdp), ("data", "fsdp"))
    automatic = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=automatic, devices=devices[: fsdp * config.replicas])


def check_batch_size(batch_size: int, mesh: jax.sharding.Mesh) -> None:
    """Raises a ``ConfigError`` unless every device gets the same number of rows."""
    if rest := batch_size % mesh.size:
        choices = [size for size in (batch_size - rest, batch_size - rest + mesh.size) if size]
        raise ConfigError(
            f"data.batch_size={batch_size} does not divide over {mesh.size} devices; "
            f"the nearest that does is {' or '.join(map(str, choices))}"
        )


def train(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    console: Console | None = None,
    watch: Watch | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> report.Summary:
    """Runs an experiment; leaves metrics, TensorBoard events, checkpoints and the compiler's report in ``folder``.

    Args:
        experiment: a checked config.
        folder: the output folder; it must not hold a run already, unless ``resume``.
        resume: continue the run in ``folder`` from its newest whole checkpoint, exactly; from the beginning where it
            came to none.
        console: where to report; by default the standard output of the first process.
        watch: who ends the process where a signal is not answered in time; see ``StopRequest``.
        options: of ``shard``.

    Raises:
        ConfigError: something the user can put right, said in one sentence.
    """
    settings = experiment.train
    is_primary = jax.process_index() == 0
    console = console or Console(quiet=not is_primary, highlight=False, soft_wrap=True)
    mesh = make_mesh(experiment.mesh)
    check_batch_size(experiment.data.batch_size, mesh)
    with Progress("reading the data"):
        dataset = load_data(experiment.data)
    model = build_model(experiment.model, experiment.data)
    claim_folder(folder, experiment, dataset.fingerprint, resume=resume, is_primary=is_primary)

    step = shard(make_train_step(model, settings.seed), mesh, **options)
    create_state = make_create_state(model, make_optimizer(experiment.optimizer, settings.steps))
    batches = training_batches(dataset.training, experiment.data, **share_of_batch())
    with contextlib.closing(Checkpoints(folder, settings)) as checkpoints:
        with Progress("planning the step"):
            state = jax.eval_shape(create_state, jax.random.key(settings.seed))
            shapes = state, abstract_batch(dataset, experiment.data.batch_size)
            plan_s = seconds_of(step.plan, *shapes)
        state = starting_state(experiment, step, create_state, resume=resume)
        done = 0
        if resume and checkpoints.steps():
            target = abstract(state)
            del state  # before its successor takes its place in memory
            with Progress(f"restoring {folder}"):
                restored = checkpoints.restore(target, batches.set_state)
            done, state = restored.step, restored.state
            console.print(str(restored), markup=False)
        elif resume:
            console.print(f"{folder} holds no checkpoint yet: starting from the beginning", markup=False)
        if done >= settings.steps:
            raise ConfigError(f"the run in {folder} has done its {done} steps; raise train.steps to go on")
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        console.print(report.opening(experiment, folder, dataset, mesh, parameters))
        stop = StopRequest(checkpoints.reached_preemption, watch)
        state, records = run_steps(
            experiment, folder, step, state, batches, checkpoints, stop, done=done, plan_s=plan_s, console=console
        )

    is_done = records[-1]["step"] >= settings.steps and stop.signal is None
    summary = report.summarise(
        records,
        dataset,
        total_steps=settings.steps,
        held_out_loss=held_out_loss(experiment, model, dataset, mesh, state) if is_done else None,
        stopped_by=stop.signal.name if stop.signal is not None else None,
    )
    explanation = str(step.explain())
    if is_primary:
        report.write(folder, summary, explanation)
    if settings.explain:
        console.print(explanation, markup=False)
    console.print(report.closing(summary, folder, experiment.data.target))
    return summary


def starting_state(experiment: Experiment, step: Any, create_state: Callable, *, resume: bool) -> State:
    """The initial state, born in the memory where the plan of ``step`` has it; of ``train.base`` what is frozen."""
    base, key = experiment.train.base, jax.random.key(experiment.train.seed)
    with Progress("making the state"):
        state = step.init(create_state, key)
    if base is None or resume:
        return state
    if state.frozen is None:
        raise ConfigError(f"train.base={base}: all parameters of this model are trained")
    with Progress(f"reading {base}"):
        return state.replace(frozen=parameters_of(Path(base), abstract(state.frozen)))


def held_out_loss(
    experiment: Experiment, model: Model, dataset: Dataset, mesh: jax.sharding.Mesh, state: State
) -> float:
    """The loss on data that nothing was learned from, in nats."""
    evaluate_step = shard(make_evaluate_step(model), mesh)
    batches = held_out_batches(dataset.held_out, experiment.data, experiment.train.held_out_batches, **share_of_batch())
    with Progress("measuring the loss on data held out"):
        return mean_loss(evaluate_step, state, batches)


def run_steps(
    experiment: Experiment,
    folder: Path,
    step: Any,
    state: State,
    batches: Any,
    checkpoints: Checkpoints,
    stop: StopRequest,
    *,
    done: int,
    plan_s: float,
    console: Console,
) -> tuple[State, list[Record]]:
    """The steps after the first ``done``, with metrics, progress and checkpoints; ends early on Ctrl-C, after saving.

    Returns:
        The last state, and the records of all steps, the first ``done`` included.
    """
    settings, data = experiment.train, experiment.data
    view = progress_view(console, settings.steps, first_step=done, log_every_steps=settings.log_every_steps)
    if bad := unreadable_lines(folder):
        console.print(f"{metrics_path(folder)}: left out line {', '.join(map(str, bad))}: no record", markup=False)
    writer = MetricsWriter(folder, after_step=done, enabled=jax.process_index() == 0)
    records = read_metrics(folder)
    steps = range(done + 1, settings.steps + 1)

    def save() -> None:
        with stop.waiting_for(f"the checkpoint after step {done}"):
            checkpoints.save(done, state, batches.get_state())

    with contextlib.closing(writer):
        with Progress("compiling the step"):
            first = next(batches)
            compile_s = seconds_of(lambda: step.lower(state, first).compile())
        compiled = {"compile_s": plan_s + compile_s}
        all_batches = itertools.chain([first], batches)
        with view as show, stop:
            for new_state, record in training_steps(step, state, all_batches, steps, data.batch_size * data.targets):
                state = new_state
                done += 1
                record |= compiled if done == steps.start else {}
                records.append(record)
                writer.write(record)
                show(record)
                if done % settings.checkpoint_every_steps == 0 or done == settings.steps:
                    save()
                if stop.is_due(done):
                    save()
                    break
    return state, records


def share_of_batch() -> dict[str, int]:
    """Which rows of each global batch are this process's."""
    return {"process_index": jax.process_index(), "process_count": jax.process_count()}
