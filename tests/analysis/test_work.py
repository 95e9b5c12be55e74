"""What attention by cuDNN asks of the machine, before it is compiled."""

import jax
import jax.numpy as jnp
import pytest

from jax_deepcompile._jax_compat import described_gpu
from jax_deepcompile.analysis.work import alone_bytes, fuses, work_of
from jax_deepcompile.ir.primitives import PRODUCTS
from jax_deepcompile.ir.traversal import equations

pytestmark = pytest.mark.pure

BATCH, QUERIES, KEYS, HEADS, GROUPS, HEAD_SIZE = 2, 512, 1024, 8, 2, 64
PRODUCT = 2.0 * BATCH * HEADS * QUERIES * KEYS * HEAD_SIZE


def attention_works(**options):
    """Of attention and of its gradient."""
    sizes = [(BATCH, QUERIES, HEADS, HEAD_SIZE), *[(BATCH, KEYS, GROUPS, HEAD_SIZE)] * 2]
    shapes = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]

    def loss(*args):
        return jax.nn.dot_product_attention(*args, implementation="cudnn", **options).astype(jnp.float32).sum()

    with described_gpu(91000, "9.0"):
        traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*shapes)
    found = [eqn for eqn in equations(traced) if eqn.primitive.name in PRODUCTS]
    assert not any(map(fuses, found))
    return [(work_of(eqn), alone_bytes(eqn)) for eqn in found]


@pytest.mark.parametrize(
    ("options", "share"),
    [({}, 1.0), ({"is_causal": True}, 0.5), ({"is_causal": True, "local_window_size": (255, 0)}, 0.25 * (1 - 0.125))],
    ids=["all keys", "causal", "window"],
)
def test_two_products_forward_and_five_backward_of_what_the_mask_shows(options, share):
    (forward, _), (backward, _) = attention_works(**options)
    assert (forward.flops, backward.flops) == (2 * share * PRODUCT, 5 * share * PRODUCT)
    assert forward.dtype == backward.dtype == "bf16"


def test_attention_moves_its_operands_and_results_and_no_scores():
    (_, forward_bytes), (_, backward_bytes) = attention_works()
    query, key = 2 * BATCH * QUERIES * HEADS * HEAD_SIZE, 2 * BATCH * KEYS * GROUPS * HEAD_SIZE
    statistics = 4 * BATCH * HEADS * QUERIES
    assert forward_bytes == 2 * query + 2 * key + statistics
    assert backward_bytes == 4 * query + 4 * key + statistics
