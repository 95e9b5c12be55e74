"""A step whose layers are written one by one, over microbatches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

import jax_deepcompile as deepcompile
from tests.partition.steps import shapes, training_step
from tests.transforms.programs import layer


def eight_layers(rows: int):
    """Eight layers of 50 MB, four microbatches, on 32 H100s: the sharded step, and shapes of its state and its batch.

    Args:
      rows: of a microbatch, on each GPU.
    """
    width, layers = 2048, 8
    shape = {"up": (width, 4 * width), "down": (4 * width, width), "bias": (4 * width,)}
    params = shapes({f"layer{index}": shape for index in range(layers)})

    def loss(params, x):
        for index in range(layers):
            x = jax.checkpoint(layer)(x, params[f"layer{index}"])
        return jnp.mean(x**2)

    mesh, optimizer = deepcompile.targets.h100(nodes=4).make_mesh((32,), ("fsdp",)), optax.sgd(0.1)
    step = deepcompile.shard(training_step(loss, optimizer), mesh, microbatches=4, memory_limit="40GiB")
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    return step, state, shapes((4 * 32 * rows, width))
