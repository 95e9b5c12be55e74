"""The whole of ``deepcompile train`` on eight virtual devices, at the smallest sizes."""

import dataclasses
import gc
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.console import Console

import jax_deepcompile as deepcompile
from jax_deepcompile import Plan
from jax_deepcompile.cli.train import parse
from jax_deepcompile.training import train as training
from jax_deepcompile.training.checkpoints import claim_folder
from jax_deepcompile.training.config import ConfigError, Experiment, Mesh
from jax_deepcompile.training.data import load_data, training_batches
from jax_deepcompile.training.loop import training_steps
from jax_deepcompile.training.metrics import read_metrics
from jax_deepcompile.training.model import build_model
from jax_deepcompile.training.train import check_batch_size, make_mesh, make_optimizer, train
from jax_deepcompile.transforms.offload_state import OffloadedState, movable

STEPS = 6
FOLDERS = (Path(__file__).parents[2] / "experiments",)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    words = f"""--model.d-model 16 --model.n-heads 2 --model.n-kv-heads 1 --model.d-ff 16 --model.n-layers 1
        --model.remat-policy None --data.sequence-length 16 --data.batch-size 8 --optimizer.learning-rate 0.03
        --steps {STEPS} --train.held-out-batches 2 --train.checkpoint-every-steps 2"""
    return parse("tiny_llama", [*words.split(), "--data", str(text)], FOLDERS).experiment


@dataclasses.dataclass
class Run:
    folder: object
    summary: training.report.Summary
    output: str


@pytest.fixture(scope="module")
def run(experiment, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    out = io.StringIO()
    summary = train(experiment, folder, console=Console(file=out, soft_wrap=True, highlight=False))
    return Run(folder, summary, out.getvalue())


@pytest.mark.cpu_mesh
def test_a_run_leaves_a_record_of_every_step(run):
    records = read_metrics(run.folder)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert {"loss", "tokens_per_s", "step_s", "memory_bytes", "gradient_norm"} <= record.keys()
        assert record["tokens_per_s"] == pytest.approx(8 * 16 / record["step_s"])
    assert [record["step"] for record in records if "compile_s" in record] == [1]


@pytest.mark.cpu_mesh
def test_a_run_ends_with_the_loss_beside_the_entropy(run):
    summary = run.summary
    assert summary.finished
    assert summary.steps == STEPS
    for words in ("unigram entropy", "final loss", "held-out loss", "bits per byte", "tokens/s"):
        assert words in run.output
    assert json.loads((run.folder / "summary.json").read_text()) == dataclasses.asdict(summary)
    assert (run.folder / "explain.txt").read_text().strip() in run.output
    assert list((run.folder / "tensorboard").iterdir())


@pytest.mark.cpu_mesh
def test_the_sharded_run_has_the_losses_of_the_plain_step_on_one_device(experiment, run):
    text = load_data(experiment.data)
    batches = training_batches(text.training, experiment.data)
    model = build_model(experiment.model, experiment.data)
    state = training.make_create_state(model, make_optimizer(experiment.optimizer, STEPS))(jax.random.key(0))
    step = jax.jit(training.make_train_step(model, 0))
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, next(batches))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose([record["loss"] for record in read_metrics(run.folder)], losses, rtol=1e-4)
    assert losses[-1] < losses[0]


@pytest.mark.cpu_mesh
def test_a_stopped_run_resumes_to_the_same_numbers(experiment, run, tmp_path, monkeypatch):
    def steps_then_ctrl_c(*args):
        for state, record in training_steps(*args):
            if record["step"] == 3:
                signal.raise_signal(signal.SIGINT)
            yield state, record

    monkeypatch.setattr(training, "training_steps", steps_then_ctrl_c)
    out = io.StringIO()
    console = Console(file=out, soft_wrap=True, highlight=False)
    stopped = train(experiment, tmp_path, console=console)
    assert (stopped.steps, stopped.finished, stopped.held_out_loss) == (3, False, None)
    assert "continue with the same command and --resume" in out.getvalue()

    monkeypatch.setattr(training, "training_steps", training_steps)
    with (tmp_path / "metrics.jsonl").open("a") as file:  # as if the run had gone on, and been killed
        file.write('{"step": 4, "loss": 123.0}\n')
    resumed = train(experiment, tmp_path, resume=True, console=console)
    assert losses(tmp_path) == losses(run.folder)
    assert resumed.held_out_loss == run.summary.held_out_loss

    with pytest.raises(ConfigError, match=r"has done its 6 steps; raise train\.steps to go on$"):
        train(experiment, tmp_path, resume=True, console=console)


@pytest.mark.cpu_mesh
def test_what_the_plan_has_on_the_host_is_there_from_the_beginning(experiment, run, tmp_path, monkeypatch):
    """The state is born there, and restored there."""
    step, state, batch = training.abstract_step(experiment)
    moments = [
        name
        for name in movable(deepcompile.shard(step).trace(state, batch).sharded).values()
        if {"mu", "nu"} & {*name.split("/")}
    ]
    there, steps = list[int](), list[deepcompile.ShardedStep]()

    def three_steps(step, state, *args):
        steps.append(step)
        there.append(sum(leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(state)))
        return killed_after(3)(step, state, *args)

    monkeypatch.setattr(training, "training_steps", three_steps)
    options = {"plan": Plan("", (OffloadedState(tuple(moments)),))}
    with pytest.raises(KeyboardInterrupt):
        train(experiment, tmp_path, console=Console(quiet=True), options=options)
    monkeypatch.setattr(training, "training_steps", lambda *args: three_steps(*args[:3], range(3, STEPS + 1), args[4]))
    with pytest.raises(KeyboardInterrupt):
        train(experiment, tmp_path, resume=True, console=Console(quiet=True), options=options)
    assert there == [len(moments)] * 2
    assert losses(tmp_path)[:3] == losses(run.folder)[:3]
    assert [len(step._compilations) for step in steps] == [1, 1]


def losses(folder) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read_metrics(folder)]


def killed_after(step: int):
    """Steps of a run that a signal without a handler ends after ``step``."""

    def steps(*args):
        for state, record in training_steps(*args):
            yield state, record
            if record["step"] == step:
                raise KeyboardInterrupt

    return steps


@pytest.mark.cpu_mesh
def test_a_run_killed_before_its_first_checkpoint_begins_again(experiment, run, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "training_steps", killed_after(1))
    with pytest.raises(KeyboardInterrupt):
        train(experiment, tmp_path, console=Console(quiet=True))
    assert losses(tmp_path) == losses(run.folder)[:1]
    with pytest.raises(ConfigError, match=r" holds a run already; add --resume to continue it, or give another --out$"):
        train(experiment, tmp_path, console=Console(quiet=True))

    monkeypatch.setattr(training, "training_steps", training_steps)
    out = io.StringIO()
    train(experiment, tmp_path, resume=True, console=Console(file=out, soft_wrap=True, highlight=False))
    assert f"{tmp_path} holds no checkpoint yet: starting from the beginning\n" in out.getvalue()
    assert losses(tmp_path) == losses(run.folder)


@pytest.mark.cpu_mesh
def test_adapters_are_trained_and_what_is_frozen_stays(experiment, run, tmp_path):
    adapted = dataclasses.replace(
        experiment,
        model=dataclasses.replace(experiment.model, lora_rank=2),
        train=dataclasses.replace(experiment.train, base=str(run.folder)),
    )
    train(adapted, tmp_path, console=Console(quiet=True))
    found = losses(tmp_path)
    assert found[0][1] < losses(run.folder)[0][1] - 0.1, "it begins where its base is"
    assert found[-1][1] < found[0][1]
    saved = [saved_by(folder) for folder in (run.folder, tmp_path)]
    jax.tree.map(np.testing.assert_array_equal, saved[0]["params"], saved[1]["frozen"])
    assert {path[-1].key for path, _ in jax.tree.leaves_with_path(saved[1]["params"])} == {"lora_a", "lora_b"}


def saved_by(folder) -> dict:
    """The state in the last checkpoint of a run, as numpy arrays."""
    path = folder / "checkpoints" / str(STEPS) / "state"
    with ocp.PyTreeCheckpointer() as checkpointer:
        leaves = checkpointer.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), leaves)
        return checkpointer.restore(path, restore_args=as_numpy)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "all parameters of this model are trained"),
        (
            {"lora_rank": 2, "d_ff": 32},
            r"it holds no parameters of this model \(ValueError: params/layers/\S+ is \(.*\) here, \(.*\) there\)",
        ),
    ],
)
def test_a_base_that_does_not_fit_is_refused(experiment, run, tmp_path, changes, sentence):
    other = dataclasses.replace(
        experiment,
        model=dataclasses.replace(experiment.model, **changes),
        train=dataclasses.replace(experiment.train, base=str(run.folder)),
    )
    with pytest.raises(ConfigError, match=sentence):
        train(other, tmp_path, console=Console(quiet=True))


def cut_short(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.cpu_mesh
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax leaves other reads behind
@pytest.mark.parametrize("damage", [cut_short, Path.unlink])
def test_a_run_goes_on_from_its_newest_whole_checkpoint(experiment, run, tmp_path, damage):
    folder = shutil.copytree(run.folder, tmp_path / "run")
    newest = folder / "checkpoints" / str(STEPS)
    for file in [file for file in newest.rglob("*") if file.is_file()]:
        damage(file)
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([lines[0], '{"step": ', *lines[1:]]) + "\n")

    out = io.StringIO()
    train(experiment, folder, resume=True, console=Console(file=out, soft_wrap=True, highlight=False))
    assert f"the checkpoint after step {STEPS} is damaged (" in out.getvalue()
    assert f"): moved to damaged_checkpoints\ngoing on from the checkpoint after step {STEPS - 2}\n" in out.getvalue()
    assert f"{metrics}: left out line 2: no record\n" in out.getvalue()
    assert losses(folder) == losses(run.folder)
    assert [each.name.split("_")[0] for each in (folder / "damaged_checkpoints").iterdir()] == [str(STEPS)]
    assert newest.is_dir()
    gc.collect()  # here, where what is said of them is ignored


@pytest.mark.cpu_mesh
def test_other_numbers_than_were_written_are_not_restored(experiment, run, tmp_path):
    """Orbax restores such a checkpoint without a word."""
    folder = shutil.copytree(run.folder, tmp_path / "run")
    arrays = folder / "checkpoints" / str(STEPS) / "state"
    largest = max((file for file in arrays.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 8] = bytes(x ^ 0x55 for x in content[len(content) // 2 :][:8])
    largest.write_bytes(content)

    out = io.StringIO()
    train(experiment, folder, resume=True, console=Console(file=out, soft_wrap=True, highlight=False))
    name = largest.relative_to(arrays.parent)
    assert (
        f"the checkpoint after step {STEPS} is damaged ({name} is not what was written): moved to damaged_checkpoints\n"
        f"going on from the checkpoint after step {STEPS - 2}\n"
    ) in out.getvalue()
    assert losses(folder) == losses(run.folder)


@pytest.mark.cpu_mesh
def test_a_checkpoint_that_nothing_checks_is_restored_and_said_to_be(experiment, run, tmp_path):
    folder = shutil.copytree(run.folder, tmp_path / "run")
    (folder / "checkpoints" / str(STEPS) / "manifest.json").unlink()
    out = io.StringIO()
    with pytest.raises(ConfigError, match=rf" has done its {STEPS} steps; "):
        train(experiment, folder, resume=True, console=Console(file=out, soft_wrap=True, highlight=False))
    said = f"going on from the checkpoint after step {STEPS}, which has no manifest.json to check it by\n"
    assert said in out.getvalue()


@pytest.mark.cpu_mesh
def test_a_run_with_no_whole_checkpoint_is_left_as_it_is(experiment, run, tmp_path):
    folder = shutil.copytree(run.folder, tmp_path / "run")
    for file in [file for file in (folder / "checkpoints").rglob("*") if file.is_file()]:
        cut_short(file)
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        train(experiment, folder, resume=True, console=Console(quiet=True))
    begins, _, ends = str(caught.value).partition(" is whole (6: ")
    assert begins == f"cannot resume: no checkpoint in {folder / 'checkpoints'}"
    assert ends.endswith("); put a copy of one there, or start a new run in another --out")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.cpu_mesh
def test_signals_end_the_command_with_their_exit_codes(tmp_path):
    folder = tmp_path / "run"
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 4000)
    command = [sys.executable, "-c", "import sys; from jax_deepcompile.cli.main import main; sys.exit(main())"]
    command += ["train", "tiny_llama", "--data", str(text), "--out", str(folder)]

    def signalled(number: signal.Signals, when) -> tuple[int, float, str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not when():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        began = time.monotonic()
        process.send_signal(number)
        out, said = process.communicate(timeout=60)
        return process.returncode, time.monotonic() - began, out + said

    def has_steps() -> bool:
        return (folder / "metrics.jsonl").exists() and len(read_metrics(folder)) > 1

    code, seconds, said = signalled(signal.SIGINT, lambda: (folder / "experiment.json").exists())
    assert (code, seconds < 2.0) == (130, True)
    assert said.endswith("deepcompile: Ctrl-C: stopped\n")
    code, seconds, said = signalled(signal.SIGTERM, has_steps)
    assert (code, "continue with the same command and --resume" in said) == (143, True)
    assert [step.name for step in (folder / "checkpoints").iterdir()] == [str(len(read_metrics(folder)))]


@pytest.mark.pure
def test_a_folder_with_a_run_is_not_overwritten(experiment, tmp_path):
    claim_folder(tmp_path, experiment, 1, resume=False)
    claim_folder(tmp_path, experiment, 1, resume=False)  # a run that never made a step is no run
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r" holds a run already; add --resume to continue it, or give another --out$"):
        claim_folder(tmp_path, experiment, 1, resume=False)


@pytest.mark.pure
def test_a_folder_that_cannot_be_written_is_named(experiment, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^cannot write to .*: .*; give another --out$"):
        claim_folder(tmp_path / "file" / "run", experiment, 1, resume=False)


@pytest.mark.pure
def test_resuming_needs_the_same_experiment(experiment, tmp_path):
    with pytest.raises(ConfigError, match=r"^nothing to resume: .* holds no run; leave --resume out to start one$"):
        claim_folder(tmp_path, experiment, 1, resume=True)
    claim_folder(tmp_path, experiment, 1, resume=False)
    longer = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, steps=99))
    claim_folder(tmp_path, longer, 1, resume=True)
    moved = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, files=("elsewhere.txt",)))
    claim_folder(tmp_path, moved, 1, resume=True)
    with pytest.raises(ConfigError, match=r"^cannot resume: the text has changed since the run began; give the same "):
        claim_folder(tmp_path, experiment, 2, resume=True)
    wider = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, d_model=32))
    with pytest.raises(ConfigError) as caught:
        claim_folder(tmp_path, wider, 1, resume=True)
    assert str(caught.value) == (
        "cannot resume: model.d_model was 16 and is now 32; add --model.d-model 16, or start a new run in another --out"
    )


@pytest.mark.pure
def test_the_mesh_takes_all_devices_or_those_asked_for():
    assert dict(make_mesh(Mesh()).shape) == {"fsdp": 8}
    assert dict(make_mesh(Mesh(replicas=2)).shape) == {"data": 2, "fsdp": 4}
    assert dict(make_mesh(Mesh(fsdp=2)).shape) == {"fsdp": 2}
    with pytest.raises(ConfigError) as caught:
        make_mesh(Mesh(fsdp=8, replicas=2))
    assert str(caught.value) == (
        "mesh.fsdp=8 times mesh.replicas=2 needs 16 devices, and there are 8; the nearest is mesh.fsdp=4"
    )


@pytest.mark.pure
def test_a_batch_that_does_not_divide_gets_the_nearest_that_does():
    mesh = make_mesh(Mesh())
    check_batch_size(16, mesh)
    with pytest.raises(ConfigError, match=r"=12 does not divide over 8 devices; the nearest that does is 8 or 16$"):
        check_batch_size(12, mesh)
    with pytest.raises(ConfigError, match=r"=3 does not divide over 8 devices; the nearest that does is 8$"):
        check_batch_size(3, mesh)


@pytest.mark.pure
@pytest.mark.parametrize("steps", [1, 2, 10])
def test_any_number_of_steps_has_a_schedule(experiment, steps):
    make_optimizer(experiment.optimizer, steps)


@pytest.mark.pure
def test_a_loss_that_is_no_number_ends_the_run_after_its_record():
    class Step:
        def lower(self, *_):
            return self

        def compile(self):
            return self

        def __call__(self, state, batch):
            return state, {"loss": np.float32("nan")}

    steps = training_steps(Step(), None, iter([{}, {}]), range(5, 7), 8)
    _, record = next(steps)
    assert record["step"] == 5
    with pytest.raises(ConfigError, match=r"^the loss is nan at step 5: lower optimizer\.learning_rate"):
        next(steps)
