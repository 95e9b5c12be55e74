"""One Llama layer, forward, backward and update: its kernels by the profiler beside those of the cost model."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

import jax_deepcompile as deepcompile
from experiments.gpu_suite.cases import Row
from experiments.gpu_suite.kernels import profiled
from experiments.gpu_suite.meshes import one_device_mesh
from experiments.gpu_suite.sizes import Sizes
from models.llama import Layer


def cases(sizes: Sizes) -> list[Row]:
    return [{"width": layer.d_model} for layer in sizes.llama_block.layers]


def rows(case: Row, sizes: Sizes, seconds: float) -> Iterator[Row]:
    """The case with what ``profiled`` says."""
    mesh, wanted = one_device_mesh(), sizes.llama_block
    config = next(layer for layer in wanted.layers if layer.d_model == case["width"])
    x = jnp.ones((1, wanted.sequence, config.d_model), config.dtype)
    layer = Layer(config)

    def step(params, x):
        def loss_of(params):
            y, _ = layer.apply({"params": params}, x)
            return jnp.mean(jnp.square(jnp.asarray(y, jnp.float32)))

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda param, grad: param - 1e-3 * grad, params, grads), loss

    sharded = deepcompile.shard(step, mesh, passes=())
    args = (sharded.init(lambda: layer.init(jax.random.key(0), x)["params"]), x)
    for row in profiled(sharded, args, wanted.runs, wanted.heaviest):
        yield case | row
