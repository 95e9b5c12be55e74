"""A small step of every model of ``models/``, to plan for eight H100s.

``python -m tests.planner.golden_steps`` writes the plans in ``golden`` anew, or those of the models named.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state

import jax_deepcompile as deepcompile
from jax_deepcompile.stages import TracedStep
from models import gpt2, llama, mixtral, resnet, vit

TOKENS = jax.ShapeDtypeStruct((64, 513), jnp.int32)
IMAGES = {
    "image": jax.ShapeDtypeStruct((512, 64, 64, 3), jnp.float32),
    "label": jax.ShapeDtypeStruct((512,), jnp.int32),
}


class TrainState(train_state.TrainState):
    batch_stats: Any = None


def traced(step: Callable, state: tuple, batch: Any, microbatches: int = 1) -> TracedStep:
    mesh = deepcompile.targets.h100(nodes=1).make_mesh((8,), ("fsdp",))
    return deepcompile.shard(step, mesh, microbatches=microbatches).trace(*state, batch)


def linen(model: nn.Module, example: Any, loss_of: Callable, batch: Any, microbatches: int = 1) -> TracedStep:
    """``loss_of(state, params, batch) -> loss, batch_stats``."""

    def create():
        variables = model.init(jax.random.key(0), example)
        return TrainState.create(
            apply_fn=model.apply,
            params=variables["params"],
            tx=optax.adamw(3e-4),
            batch_stats=variables.get("batch_stats"),
        )

    def step(state, batch):
        (loss, stats), grads = jax.value_and_grad(lambda p: loss_of(state, p, batch), has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    return traced(step, (jax.eval_shape(create),), batch, microbatches)


def in_place(create_model: Callable, loss_of: Callable, batch: Any) -> TracedStep:
    """``loss_of(model, batch) -> loss`` of NNX objects."""

    def create():
        model = create_model()
        return model, nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)

    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return loss

    return traced(step, nnx.eval_shape(create), batch)


LLAMA = llama.LlamaConfig(vocab_size=32_000, d_model=2048, n_layers=6, n_heads=16, n_kv_heads=8, d_ff=8192)


def of_llama(model: nn.Module | None = None, microbatches: int = 1) -> TracedStep:
    def loss_of(state, params, batch):
        return llama.next_token_loss(state.apply_fn({"params": params}, batch[:, :-1]), batch[:, 1:]), None

    return linen(model or llama.Llama(LLAMA), jnp.zeros((1, 8), jnp.int32), loss_of, TOKENS, microbatches)


def of_gpt2() -> TracedStep:
    def loss_of(state, params, batch):
        return gpt2.next_token_loss(state.apply_fn({"params": params}, batch[:, :-1]), batch[:, 1:]), None

    config = gpt2.GPT2Config(vocab_size=32_000, max_length=512, d_model=1024, n_layers=4, n_heads=16)
    return linen(gpt2.GPT2(config), jnp.zeros((1, 8), jnp.int32), loss_of, TOKENS)


def of_resnet() -> TracedStep:
    def loss_of(state, params, batch):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
        return resnet.classification_loss(logits, batch["label"]), updates["batch_stats"]

    config = dataclasses.replace(resnet.RESNET_TINY, width=64, n_classes=1000)
    return linen(resnet.ResNet(config), jnp.zeros((1, 64, 64, 3)), loss_of, IMAGES)


def of_mixtral() -> TracedStep:
    def loss_of(model, batch):
        logits, balance = model(batch[:, :-1])
        return mixtral.next_token_loss(logits, batch[:, 1:]) + 0.01 * balance

    config = dataclasses.replace(
        mixtral.MIXTRAL_TINY, vocab_size=32_000, d_model=1024, n_layers=4, d_ff=2048, dtype=jnp.bfloat16
    )
    return in_place(lambda: mixtral.Mixtral(config, rngs=nnx.Rngs(0)), loss_of, TOKENS)


def of_vit() -> TracedStep:
    def loss_of(model, batch):
        return vit.classification_loss(model(batch["image"], train=True), batch["label"])

    config = dataclasses.replace(vit.VIT_TINY, image_size=64, n_classes=1000, d_model=768, n_heads=12, d_ff=3072)
    return in_place(lambda: vit.ViT(config, rngs=nnx.Rngs(0)), loss_of, IMAGES)


STEPS: dict[str, Callable[[], TracedStep]] = {
    "llama": of_llama,
    "llama_in_microbatches": lambda: of_llama(microbatches=4),
    "mixtral": of_mixtral,
    "gpt2": of_gpt2,
    "vit": of_vit,
    "resnet": of_resnet,
}


FOLDER = Path(__file__).parent / "golden"


def printed(plan: deepcompile.Plan) -> str:
    """``plan`` without what XLA is told, which holds bytes that vary by its version."""
    lines = [line for line in str(plan).splitlines() if not line.startswith(("option ", "scheduled by "))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:] or STEPS:
        (FOLDER / f"{name}.txt").write_text(printed(STEPS[name]().plan()))
