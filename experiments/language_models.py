"""What the train step needs of a model: parameters from a key, and the loss of a batch.

:func:`language_model` is open: a model of yours joins by registering a function of its config's type.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.data import VOCABULARY_SIZE
from experiments.values import ConfigError
from models import llama

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model as two functions.

    Attributes:
        init: key -> parameters.
        loss: (parameters, batch) -> the mean loss per token in nats, a scalar. The batch has ``inputs`` and
            ``targets``, both ``i32[batch, length]``.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Batch], jax.Array]


@functools.singledispatch
def language_model(config: Any, sequence_length: int) -> LanguageModel:
    """The model that a config describes, for sequences of ``sequence_length`` tokens.

    Raises:
        ConfigError: the sizes in the config do not fit one another, or the text.
    """
    raise TypeError(
        f"no language model is registered for a {type(config).__name__}: decorate a function "
        f"(config, sequence_length) -> LanguageModel with @language_model.register"
    )


@language_model.register
def _llama(config: llama.LlamaConfig, sequence_length: int) -> LanguageModel:
    check_sizes(config, ("d_model", "n_heads"), ("n_heads", "n_kv_heads"))
    model = llama.Llama(config)
    tokens = jnp.zeros((1, sequence_length), jnp.int32)

    def loss(params: Any, batch: Batch) -> jax.Array:
        return llama.next_token_loss(model.apply({"params": params}, batch["inputs"]), batch["targets"])

    return LanguageModel(init=lambda key: model.init(key, tokens)["params"], loss=loss)


def check_sizes(config: Any, *multiples: tuple[str, str]) -> None:
    """Checks that every integer of a model's config is positive, and the vocabulary holds every byte.

    Args:
        config: the model's config.
        multiples: pairs of field names, of which the first must be a multiple of the second.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        smallest = VOCABULARY_SIZE if field.name == "vocab_size" else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < smallest:
            raise ConfigError(
                f"model.{field.name}={value}: must be at least {smallest}; the nearest is {smallest}"
            )
    for name, divisor_name in multiples:
        size, divisor = getattr(config, name), getattr(config, divisor_name)
        if size % divisor:
            nearest = min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: abs(d - divisor))
            raise ConfigError(
                f"model.{divisor_name}={divisor}: must divide model.{name}={size}; the nearest that does is {nearest}"
            )
