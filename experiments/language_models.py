"""The repository's language models, for ``deepcompile train``; they read bytes."""

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_deepcompile.training import ConfigError, Data, Model, build_model, check_sizes
from jax_deepcompile.training.data import VOCABULARY_SIZE
from jax_deepcompile.training.model import Batch, Metrics
from models import gpt2, llama, mixtral

_SMALLEST = {"vocab_size": VOCABULARY_SIZE, "lora_rank": 0}


@build_model.register
def _llama(config: llama.LlamaConfig, data: Data) -> Model:
    check_sizes(config, divisions=(("d_model", "n_heads"), ("n_heads", "n_kv_heads")), smallest=_SMALLEST)
    model = llama.Llama(config)
    tokens = jnp.zeros((1, data.sequence_length), jnp.int32)

    def init(key: jax.Array) -> Any:
        return model.init(key, tokens)["params"]

    def loss(params: Any, batch: Batch, dropout_key: jax.Array | None, frozen: Any = None) -> tuple[jax.Array, Metrics]:
        del dropout_key  # Llama has no dropout
        params = params if frozen is None else _joined(frozen, params)
        logits = cast(jax.Array, model.apply({"params": params}, batch["inputs"]))
        loss = llama.next_token_loss(logits, batch["targets"])
        return loss, {"loss": loss}

    if not config.lora_rank:
        return Model(init, loss)
    return Model(lambda key: _adapters(init(key), True), loss, frozen=lambda key: _adapters(init(key), False))


def _adapters(params: Any, chosen: bool) -> Any:
    """The adapters of LoRA, or all but them."""
    flat = flatten_dict(params)
    return unflatten_dict({path: leaf for path, leaf in flat.items() if path[-1].startswith("lora_") == chosen})


def _joined(frozen: Any, trained: Any) -> Any:
    return unflatten_dict({**flatten_dict(frozen), **flatten_dict(trained)})


@build_model.register
def _gpt2(config: gpt2.GPT2Config, data: Data) -> Model:
    check_sizes(config, divisions=(("d_model", "n_heads"),), smallest=_SMALLEST)
    if data.sequence_length > config.max_length:
        raise ConfigError(
            f"data.sequence_length={data.sequence_length}: model.max_length={config.max_length} is the longest this "
            f"model reads; the nearest is {config.max_length}"
        )
    model = gpt2.GPT2(config)
    tokens = jnp.zeros((1, data.sequence_length), jnp.int32)

    def loss(params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        rngs = None if dropout_key is None else {"dropout": dropout_key}
        logits = model.apply({"params": params}, batch["inputs"], train=dropout_key is not None, rngs=rngs)
        loss = gpt2.next_token_loss(cast(jax.Array, logits), batch["targets"])
        return loss, {"loss": loss}

    return Model(lambda key: model.init(key, tokens)["params"], loss)


@build_model.register
def _mixtral(config: mixtral.MixtralConfig, data: Data) -> Model:
    check_sizes(config, divisions=(("d_model", "n_heads"), ("n_heads", "n_kv_heads")), smallest=_SMALLEST)
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
