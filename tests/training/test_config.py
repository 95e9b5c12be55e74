from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_deepcompile.cli.train import parse
from jax_deepcompile.training.config import ConfigError, flatten, settings, spell
from jax_deepcompile.training.find import load, names
from jax_deepcompile.training.model import build_model
from jax_deepcompile.training.train import abstract_step, make_evaluate_step

pytestmark = pytest.mark.pure

FOLDERS = (Path(__file__).parents[2] / "experiments",)


def test_every_experiment_has_a_description():
    assert {"tiny_llama", "tiny_gpt2", "tiny_mixtral"} <= set(names(FOLDERS))
    assert all(names(FOLDERS).values())


def test_modules_without_a_config_are_not_experiments():
    assert not {"config", "data", "train", "__init__"} & set(names(FOLDERS))


@pytest.mark.parametrize("name", sorted(names(FOLDERS)))
def test_every_experiment_has_a_model_that_fits_its_data(name):
    experiment = load(name, FOLDERS)
    assert build_model(experiment.model, experiment.data).loss


@pytest.mark.parametrize("name", sorted(name for name in names(FOLDERS) if name.startswith("tiny_")))
def test_every_small_experiment_has_a_loss(name):
    experiment = load(name, FOLDERS)
    model = build_model(experiment.model, experiment.data)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.tree.leaves(params)
    step, state, batch = abstract_step(experiment)
    _, metrics = jax.eval_shape(step, state, batch)
    assert metrics["loss"].shape == ()
    without_dropout = jax.eval_shape(make_evaluate_step(model), state, batch)
    assert without_dropout["loss"].shape == ()


def test_an_unknown_name_gets_the_nearest_and_all():
    with pytest.raises(
        ConfigError, match=r"^there is no experiment 'tinyllama'; the nearest is 'tiny_llama'; there are "
    ):
        load("tinyllama", FOLDERS)
    with pytest.raises(ConfigError, match=r"^there is no experiment 'qqq'; there are "):
        load("qqq", FOLDERS)


def test_a_module_of_the_package_is_not_addressed_as_an_experiment():
    with pytest.raises(ConfigError, match="there is no experiment 'data'"):
        load("data", FOLDERS)


def test_flatten_names_every_setting_in_order():
    settings = flatten(load("tiny_llama", FOLDERS))
    assert list(settings)[:2] == ["model.vocab_size", "model.d_model"]
    assert list(settings)[-1] == "train.explain"
    assert settings["model.dtype"] is jnp.float32
    assert [spell(value) for value in (None, jnp.float32, ("a", "b"), 3)] == ["none", "float32", "a,b", "3"]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        (
            "tiny_llama",
            "model.n-heads=3",
            "model.n_heads=3: must divide model.d_model=64; the nearest that does is 2",
        ),
        (
            "tiny_llama",
            "model.n-kv-heads=3",
            "model.n_kv_heads=3: must divide model.n_heads=4; the nearest that does is 2",
        ),
        ("tiny_llama", "model.vocab-size=255", "model.vocab_size=255: must be at least 256; the nearest is 256"),
        ("tiny_llama", "model.n-layers=0", "model.n_layers=0: must be at least 1; the nearest is 1"),
        (
            "tiny_gpt2",
            "data.sequence-length=65",
            "data.sequence_length=65: model.max_length=64 is the longest this model reads; the nearest is 64",
        ),
        (
            "tiny_mixtral",
            "model.n-active-experts=9",
            "model.n_active_experts=9: there are model.n_experts=4; the nearest is 4",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_nearest(name, options, sentence):
    experiment = parse(name, [f"--{options}"], FOLDERS).experiment
    with pytest.raises(ConfigError) as caught:
        build_model(experiment.model, experiment.data)
    assert str(caught.value) == sentence


def test_a_model_that_is_not_registered_says_how_to_register_it():
    with pytest.raises(ConfigError, match=r"for a object: decorate a function .* with @build_model\.register"):
        build_model(object(), None)


def test_every_setting_of_every_experiment_says_what_it_takes_and_means():
    listed = [(name, each) for name in names(FOLDERS) for each in settings(load(name, FOLDERS))]
    assert [(name, each.option) for name, each in listed if not each.meaning or "ANY" in each.kind] == []


def test_the_type_of_logits_is_a_dtype_or_none():
    given = (parse("tiny_llama", words, FOLDERS).experiment.model for words in (["--model.logits-dtype=float32"], []))
    assert [model.logits_dtype for model in given] == [jnp.float32, None]
