"""The small variants of the examples at size learn; LoRA's is in ``tests/training/test_train.py``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from experiments.images import Gratings
from jax_deepcompile.training.config import ConfigError
from jax_deepcompile.training.data import load_data
from jax_deepcompile.training.find import load
from jax_deepcompile.training.model import build_model
from jax_deepcompile.training.train import train
from models.vit import VIT_TINY

FOLDERS = [Path(__file__).parents[2] / "experiments"]


def below_unigram_entropy(name: str, steps: int, folder: Path) -> float:
    """By how many nats the held-out loss is."""
    experiment = load(name, FOLDERS)
    settings = dataclasses.replace(experiment.train, steps=steps, held_out_batches=2, explain=False)
    summary = train(dataclasses.replace(experiment, train=settings), folder, console=Console(quiet=True))
    assert summary.held_out_loss is not None
    return summary.unigram_entropy - summary.held_out_loss


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("name", [pytest.param("tiny_vit", marks=pytest.mark.slow), "tiny_mixer"])
def test_directions_of_stripes_are_learned(name: str, tmp_path: Path, quick_compilation):
    assert below_unigram_entropy(name, 40, tmp_path) > 1.0


@pytest.mark.slow
@pytest.mark.cpu_mesh
@pytest.mark.parametrize(("name", "steps"), [("tiny_gpt2", 400), ("tiny_mixtral", 60)])
def test_text_is_learned(name: str, steps: int, tmp_path: Path):
    assert below_unigram_entropy(name, steps, tmp_path) > 0.3


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
