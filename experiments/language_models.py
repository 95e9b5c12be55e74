"""The repository's language models, for ``deepcompile train``; they read bytes."""

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jax_deepcompile.training import ConfigError, Model, build_model, check_sizes
from jax_deepcompile.training.data import VOCABULARY_SIZE
from jax_deepcompile.training.model import Batch, Metrics
from models import gpt2, llama, mixtral

_READS_BYTES = {"vocab_size": VOCABULARY_SIZE}


@build_model.register
def _llama(config: llama.LlamaConfig, sequence_length: int) -> Model:
    check_sizes(config, divisions=(("d_model", "n_heads"), ("n_heads", "n_kv_heads")), smallest=_READS_BYTES)
    model = llama.Llama(config)
    tokens = jnp.zeros((1, sequence_length), jnp.int32)

    def loss(params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        del dropout_key  # Llama has no dropout
        logits = cast(jax.Array, model.apply({"params": params}, batch["inputs"]))
        loss = llama.next_token_loss(logits, batch["targets"])
        return loss, {"loss": loss}

    return Model(lambda key: model.init(key, tokens)["params"], loss)


@build_model.register
def _gpt2(config: gpt2.GPT2Config, sequence_length: int) -> Model:
    check_sizes(config, divisions=(("d_model", "n_heads"),), smallest=_READS_BYTES)
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

    return Model(lambda key: model.init(key, tokens)["params"], loss)


@build_model.register
def _mixtral(config: mixtral.MixtralConfig, sequence_length: int) -> Model:
    check_sizes(config, divisions=(("d_model", "n_heads"), ("n_heads", "n_kv_heads")), smallest=_READS_BYTES)
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

    return Model(init, loss)
