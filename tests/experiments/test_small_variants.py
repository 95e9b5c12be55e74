"""The small variants of the examples at size learn; LoRA's is in ``tests/training/test_train.py``."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
from rich.console import Console

from experiments.images import Gratings
from jax_deepcompile.training.config import ConfigError, Mesh
from jax_deepcompile.training.data import load_data
from jax_deepcompile.training.find import load
from jax_deepcompile.training.model import build_model
from jax_deepcompile.training.train import train
from models.vit import VIT_TINY

FOLDERS = [Path(__file__).parents[2] / "experiments"]


WORDS = ("gather", "reduce", "scatter", "stream", "overlap", "memory", "planner", "device", "kernel", "batch")


def below_unigram_entropy(name: str, folder: Path, steps: int, data: dict, learning_rate: float) -> float:
    """By how many nats the held-out loss is; a model that tells nothing from what it reads comes to 0 at best."""
    experiment = load(name, FOLDERS)
    experiment = dataclasses.replace(
        experiment,
        data=dataclasses.replace(experiment.data, **data),
        optimizer=dataclasses.replace(experiment.optimizer, learning_rate=learning_rate),
        mesh=Mesh(fsdp=2),
        train=dataclasses.replace(experiment.train, steps=steps, explain=False),
    )
    summary = train(experiment, folder, console=Console(quiet=True))
    assert summary.held_out_loss is not None
    return summary.unigram_entropy - summary.held_out_loss


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(("name", "learning_rate"), [("tiny_vit", 3e-3), ("tiny_mixer", 1e-2)])
def test_directions_of_stripes_are_learned(name: str, learning_rate: float, tmp_path: Path, quick_compilation):
    """1.8 and more by three seeds each; untrained a ViT comes to -0.7."""
    assert below_unigram_entropy(name, tmp_path, 25, {"batch_size": 32}, learning_rate) > 1.0


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(("name", "steps", "learning_rate"), [("tiny_gpt2", 80, 3e-3), ("tiny_mixtral", 30, 1e-2)])
def test_text_is_learned(name: str, steps: int, learning_rate: float, tmp_path: Path, quick_compilation):
    """Ten words in any order: 1.0 and more by three seeds each; untrained both come to -2.8."""
    text = tmp_path / "words.txt"
    text.write_text(" ".join(random.Random(0).choices(WORDS, k=8000)))
    data = {"files": (str(text),), "held_out_fraction": 0.1, "sequence_length": 32, "batch_size": 4}
    assert below_unigram_entropy(name, tmp_path / "run", steps, data, learning_rate) > 0.7


@pytest.mark.pure
def test_gratings_are_the_same_every_time_and_of_every_class():
    data = load_data(Gratings(training_examples=100, held_out_examples=64))
    assert [int(data.training[index]["targets"]) for index in range(12)] == [*range(10), 0, 1]
    assert (data.training[3]["inputs"] == data.training[3]["inputs"]).all()
    assert (data.training[0]["inputs"] != data.held_out[0]["inputs"]).any()


@pytest.mark.pure
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pixels": 32}, "model.image_size=16: must be data.pixels=32"),
        ({"classes": 9}, "model.n_classes=10: must be data.classes=9"),
    ],
)
def test_images_that_the_model_does_not_take_are_refused(changes: dict, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        build_model(VIT_TINY, Gratings(**changes))


@pytest.mark.pure
def test_too_few_images_are_refused():
    with pytest.raises(ConfigError, match=r"data.held_out_examples=8: must be at least data.batch_size=64"):
        load_data(Gratings(held_out_examples=8))
