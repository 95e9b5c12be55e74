"""What the train step needs of a model: parameters from a key, and the loss of a batch.

:func:`language_model` is open: a model of yours joins by registering a function of its config's type.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.config import ConfigError
from experiments.data import VOCABULARY_SIZE
from models import gpt2, llama, mixtral

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model as two functions.

    Attributes:
        init: key -> parameters.
        loss: (parameters, batch, dropout key) -> (what to minimise, metrics), all scalars. The metrics have ``loss``,
            the mean cross-entropy per token in nats. The batch has ``inputs`` and ``targets``, both
            ``i32[batch, length]``. Without a key nothing is dropped.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Batch, jax.Array | None], tuple[jax.Array, Metrics]]


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
    check_sizes(config, divisions=(("d_model", "n_heads"), ("n_heads", "n_kv_heads")))
    model = llama.Llama(config)
    tokens = jnp.zeros((1, sequence_length), jnp.int32)

    def loss(params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        del dropout_key  # Llama has no dropout
        logits = cast(jax.Array, model.apply({"params": params}, batch["inputs"]))
        loss = llama.next_token_loss(logits, batch["targets"])
        return loss, {"loss": loss}

    return LanguageModel(lambda key: model.init(key, tokens)["params"], loss)


@language_model.register
def _gpt2(config: gpt2.GPT2Config, sequence_length: int) -> LanguageModel:
    check_sizes(config, divisions=(("d_model", "n_heads"),))
    if sequence_length > config.max_length:
        raise ConfigError(
            f"data.sequence_length={sequence_length}: model.max_length={config.max_length} is the longest this model "
            f"reads; the nearest is {config.max_length}"
        )
    model = gpt2.GPT2(config)
    tokens = jnp.zeros((1, sequence_length), jnp.int32)

    def loss(params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        rngs = None if dropout_key is None else {"dropout": dropout_key}
        logits = model.apply({"params": params}, batch["inputs"], train=dropout_key is not None, rngs=rngs)
        loss = gpt2.next_token_loss(cast(jax.Array, logits), batch["targets"])
        return loss, {"loss": loss}

    return LanguageModel(lambda key: model.init(key, tokens)["params"], loss)


@language_model.register
def _mixtral(config: mixtral.MixtralConfig, sequence_length: int) -> LanguageModel:
    check_sizes(config, divisions=(("d_model", "n_heads"), ("n_heads", "n_kv_heads")))
    if config.n_active_experts > config.n_experts:
        raise ConfigError(
            f"model.n_active_experts={config.n_active_experts}: there are model.n_experts={config.n_experts}; "
            f"the nearest is {config.n_experts}"
        )
    graph = nnx.graphdef(nnx.eval_shape(lambda: mixtral.Mixtral(config, rngs=nnx.Rngs(0))))

    def init(key: jax.Array) -> Any:
        return nnx.state(mixtral.Mixtral(config, rngs=nnx.Rngs(key)))

    def loss(params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        del dropout_key  # Mixtral has no dropout
        logits, balance = nnx.merge(graph, params)(batch["inputs"])
        loss = mixtral.next_token_loss(logits, batch["targets"])
        return loss + config.balance_weight * balance, {"loss": loss, "balance_loss": balance}

    return LanguageModel(init, loss)


def check_sizes(config: Any, divisions: tuple[tuple[str, str], ...] = ()) -> None:
    """Checks that every integer of a model's config is positive, and that its vocabulary holds every byte.

    Args:
        config: the model's config.
        divisions: pairs of field names, of which the second must divide the first.

    Raises:
        ConfigError: with the nearest size that fits.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        smallest = VOCABULARY_SIZE if field.name == "vocab_size" else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < smallest:
            raise ConfigError(f"model.{field.name}={value}: must be at least {smallest}; the nearest is {smallest}")
    for whole_name, part_name in divisions:
        whole, part = getattr(config, whole_name), getattr(config, part_name)
        if whole % part:
            nearest = min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: abs(n - part))
            raise ConfigError(
                f"model.{part_name}={part}: must divide model.{whole_name}={whole}; the nearest that does is {nearest}"
            )
