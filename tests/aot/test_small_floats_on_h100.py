"""Eight-bit floats are gathered as such, and what is multiplied in them runs as their kernels."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.hlo.types import leaves
from tests.schedules import instructions

pytestmark = [pytest.mark.h100_aot, pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")]

D = 1024


class Layer(nn.Module):
    """Products of what was rounded to eight bits, as quantization-aware training writes them."""

    @nn.compact
    def __call__(self, x, _):
        hidden = nn.Dense(4 * D, dtype=jnp.bfloat16, use_bias=False, dot_general_cls=nn.Fp8DotGeneralOp)(x)
        down = nn.Dense(D, dtype=jnp.bfloat16, use_bias=False, dot_general_cls=nn.Fp8DotGeneralOp)
        return x + down(nn.silu(hidden)), None


MODEL = nn.scan(
    Layer, variable_axes={"params": 0, "_overwrite_with_gradient": 0}, split_rngs={"params": True}, length=4
)


def step(variables, x):
    def loss(variables):
        return jnp.mean(jnp.square(MODEL().apply(variables, x, None)[0].astype(jnp.float32) - 1))

    value, gradients = jax.value_and_grad(loss)(variables)
    trained = jax.tree.map(lambda w, g: w - 0.1 * g, variables["params"], gradients["params"])
    return gradients | {"params": trained}, value


def test_eight_bits_are_gathered_and_multiplied():
    """Differentiation alone would leave kernels and activations in sixteen bits for the backward pass."""
    x = jax.ShapeDtypeStruct((16 * 2048, D), jnp.bfloat16)
    variables = jax.eval_shape(lambda: MODEL().init(jax.random.key(0), jnp.zeros((8, D), jnp.bfloat16), None))
    traced = deepcompile.shard(step, deepcompile.targets.h100(nodes=2)).trace(variables, x)
    made = instructions(read(traced.lower().compile().as_text() or ""))
    products = [each.target for each in made if each.target.startswith("__cublas$")]
    assert products.count("__cublas$lt$matmul$f8") >= 0.75 * len(products)
    gathers = [leaves(each.shape) for each in made if each.opcode in ("all-gather", "all-gather-start")]
    kernels = {array.dtype for gathered in gathers for _, array in gathered if array.elements == 4 * D * D}
    assert kernels == {"f8e4m3fn"}
