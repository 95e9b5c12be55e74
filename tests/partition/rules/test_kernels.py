"""Rules of ragged and scaled matrix products and of cuDNN attention."""

import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.interpreters import mlir

from jax_deepcompile.partition.rules.base import Kind
from jax_deepcompile.partition.rules.families import REGISTRY
from tests.cases import examples
from tests.partition.rules.harness import check, integers, normals, rules_of, seeds, sizes
from tests.partition.rules.ways import splittable

pytestmark = pytest.mark.cpu_mesh


def _group_sizes(shape, total, seed):
    """Sizes of groups along the last dimension, which together leave some of ``total`` rows over."""
    random = np.random.default_rng(seed)
    cuts = np.sort(random.integers(0, total + 1, shape), axis=-1)
    return np.diff(cuts, axis=-1, prepend=0).astype(np.int32)


@st.composite
def ragged_products(draw):
    """A legal ``ragged_dot_general`` in any mode, dimensions in any order, and its operands."""
    mode = draw(st.sampled_from(("free", "contract", "batch")))
    extent = {}

    def letters(kind, least, most):
        names = [f"{kind}{i}" for i in range(draw(st.integers(least, most)))]
        extent.update({name: draw(sizes) for name in names})
        return names

    batch = letters("b", mode == "batch", 2 if mode == "batch" else 1)
    free = letters("m", mode == "free", 2 if mode == "free" else 1)
    contract = letters("k", 1 if mode == "contract" else 0, 2 if mode == "contract" else 1)
    columns = letters("n", 0, 1)
    extent["g"] = draw(st.integers(1, 4))
    x = draw(st.permutations([*batch, *free, *contract]))
    y = draw(st.permutations([*batch, *contract, *columns, *(["g"] if mode == "free" else [])]))
    in_order = {"batch": batch, "contract": contract, "free": [name for name in x if name in free]}[mode]
    ragged = draw(st.sampled_from(in_order))
    outer = in_order[: in_order.index(ragged)]
    prefix = outer if mode == "batch" else [*batch, *outer]
    sizes_shape = [extent[name] for name in (prefix if draw(st.booleans()) else [])]
    numbers = lax.RaggedDotDimensionNumbers(
        (
            ([x.index(name) for name in contract], [y.index(name) for name in contract]),
            ([x.index(name) for name in batch], [y.index(name) for name in batch]),
        ),
        [x.index(ragged)],
        [y.index("g")] if mode == "free" else [],
    )
    seed = draw(seeds)
    return (
        numbers,
        integers([extent[name] for name in x], seed),
        integers([extent[name] for name in y], seed + 1),
        _group_sizes((*sizes_shape, extent["g"]), extent[ragged], seed + 2),
    )


@examples(22)
@given(ragged_products())
def test_ragged_dot_general(product):
    numbers, x, y, sizes = product
    check(
        lambda *args: lax.ragged_dot_general(*args, ragged_dot_dimension_numbers=numbers),
        x,
        y,
        sizes,
        primitives=["ragged_dot_general"],
    )


def test_gradient_of_ragged_dot_for_a_batch():
    x, y = integers((2, 16, 8), 0), integers((2, 3, 8, 4), 1)
    sizes = _group_sizes((2, 3), 16, 2)

    def loss(x, y):
        return jnp.sum(jax.vmap(lax.ragged_dot)(x, y, sizes))

    check(jax.grad(loss, (0, 1)), x, y, primitives=["ragged_dot_general"])


def test_groups_are_never_split():
    x, y, sizes = np.zeros((16, 8), np.float32), np.zeros((8, 8, 32), np.float32), np.full(8, 2, np.int32)
    ((_, rule),) = rules_of(lax.ragged_dot, x, y, sizes, primitive="ragged_dot_general")
    assert splittable(rule) == ([{0, 1}, {1, 2}, set()], [{0, 1}])
    assert [factor.kind for factor in rule.factors].count(Kind.SUM) == 1


@examples(4)
@given(st.sampled_from((2, 3, 8)), sizes, sizes, seeds)
def test_scaled_dot(batch, rows, columns, seed):
    shapes = [(batch, rows, 8), (batch, 8, columns), (batch, rows, 2), (batch, 4, columns)]
    x, y, x_scale, y_scale = (integers(shape, seed + i).astype(jnp.bfloat16) for i, shape in enumerate(shapes))
    check(
        lambda x, y, a, b: lax.scaled_dot(x, y, lhs_scale=a, rhs_scale=b, preferred_element_type=np.float32),
        x.astype(jnp.float8_e4m3fn),
        y.astype(jnp.float8_e4m3fn),
        jnp.abs(x_scale).astype(jnp.float8_e8m0fnu),
        jnp.abs(y_scale).astype(jnp.float8_e8m0fnu),
        primitives=["scaled_dot"],
    )


def test_scaled_blocks_are_never_split():
    x, y = np.ones((8, 16, 64), np.float32), np.ones((8, 32, 64), np.float32)
    scales = np.ones((8, 16, 8), np.float32), np.ones((8, 32, 8), np.float32)
    numbers = (((2,), (2,)), ((0,), (0,)))
    product = lambda x, y, a, b: lax.scaled_dot(  # noqa: E731
        x, y, lhs_scale=a, rhs_scale=b, dimension_numbers=numbers, preferred_element_type=np.float32
    )
    eqn = jax.make_jaxpr(product)(x, y, *scales).eqns[0]
    assert splittable(REGISTRY.find(eqn)) == ([{0, 1}] * 4, [{0, 1, 2}])


CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
WRAPPERS = ["dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"]
CLOSE = {"rtol": 0.05, "atol": 0.02, "ways": 3}


@pytest.fixture
def cudnn(monkeypatch):
    """cuDNN attention with a plain implementation for the CPU."""
    module = importlib.import_module(CUDNN)
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91000)
    for forward in (True, False):
        primitive = getattr(module, f"_dot_product_attention_{'fwd' if forward else 'bwd'}_p")
        plain = _plain_forward if forward else _plain_backward
        mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=True), platform="cpu")
    return module.dot_product_attention


def _plain_forward(query, key, value, bias, q_seqlen, kv_seqlen, *_, scale, mask_type, layout, is_training, **params):
    """Attention by its definition, and the logarithm of the softmax's denominator."""
    query, key, value = (x if layout == 1 else jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    key, value = (jnp.repeat(x, query.shape[1] // x.shape[1], axis=1) for x in (key, value))
    logits = scale * jnp.einsum("bntd,bnsd->bnts", query, key, preferred_element_type=jnp.float32)
    if bias.ndim == 4:
        logits += bias
    rows, columns = (lax.broadcasted_iota(jnp.int32, logits.shape, dim) for dim in (2, 3))
    if "CAUSAL" in mask_type.name:
        logits = jnp.where(columns <= rows, logits, -1e9)
    if "PADDING" in mask_type.name:
        logits = jnp.where(columns < kv_seqlen[:, None, None, None], logits, -1e9)
    outputs = jnp.einsum("bnts,bnsd->bntd", jax.nn.softmax(logits), value.astype(jnp.float32))
    if "PADDING" in mask_type.name:
        outputs = jnp.where(rows[..., :1] < q_seqlen[:, None, None, None], outputs, 0)
    outputs = (outputs if layout == 1 else jnp.swapaxes(outputs, 1, 2)).astype(query.dtype)
    return [outputs, jax.nn.logsumexp(logits, axis=-1)] if is_training else [outputs]


def _plain_backward(query, key, value, bias, *rest, **params):
    *lengths_and_pages, _, _, gradient = rest
    differentiable = (query, key, value, bias) if params["variadic_args"][1] else (query, key, value)

    def forward(*args):
        all_args = (*args, *(query, key, value, bias)[len(args) :], *lengths_and_pages)
        return _plain_forward(*all_args, is_training=False, **params)[0]

    return list(jax.vjp(forward, *differentiable)[1](gradient))


def _attention_operands(batch, heads, shared_heads, heads_first=False):
    shapes = [(batch, 6, heads, 8), (batch, 10, shared_heads, 8), (batch, 10, shared_heads, 8)]
    if heads_first:
        shapes = [(shape[0], shape[2], shape[1], shape[3]) for shape in shapes]
    return [normals(shape, i).astype(jnp.bfloat16) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("layout", "batch", "heads", "shared_heads"),
    [("BTNH", 8, 4, 4), ("BNTH", 4, 8, 4), ("BTNH", 2, 16, 8), ("BNTH", 3, 2, 1)],
)
def test_attention_and_its_gradient(cudnn, layout, batch, heads, shared_heads):
    def loss(*args):
        return jnp.sum(cudnn(*args, scale=0.3, qkv_layout=layout).astype(jnp.float32) ** 2)

    operands = _attention_operands(batch, heads, shared_heads, layout == "BNTH")
    check(jax.value_and_grad(loss, (0, 1, 2)), *operands, primitives=WRAPPERS, **CLOSE)


@pytest.mark.parametrize("bias_shape", [(8, 4), (1, 4), (8, 1)])
def test_attention_with_a_bias_and_lengths(cudnn, bias_shape):
    mask = importlib.import_module(CUDNN).MaskType.PADDING_CAUSAL
    lengths = np.arange(8, dtype=np.int32) % 5 + 2

    def loss(query, key, value, bias):
        attended = cudnn(query, key, value, bias, None, lengths, lengths + 1, mask_type=mask, scale=0.3)
        return jnp.sum(attended.astype(jnp.float32) ** 2)

    operands = [*_attention_operands(8, 4, 4), normals((*bias_shape, 6, 10), 3).astype(jnp.bfloat16)]
    check(jax.value_and_grad(loss, (0, 1, 2, 3)), *operands, primitives=WRAPPERS, **CLOSE)


def test_the_gradient_of_a_shared_bias_is_a_partial_sum(cudnn):
    operands = [*_attention_operands(8, 8, 8), np.zeros((1, 8, 6, 10), jnp.bfloat16)]
    gradient = jax.grad(lambda *args: jnp.sum(cudnn(*args).astype(jnp.float32)), (0, 1, 2, 3))
    ((_, rule),) = rules_of(gradient, *operands, primitive="dot_product_attention_bwd_wrapper")
    batch, heads = rule.results[0][0][0], rule.results[0][2][0]
    assert rule.factors[batch].kind is Kind.SUM
    assert rule.factors[heads].kind is Kind.MAP
    assert splittable(rule)[1] == [{0, 2}, {0, 2}, {0, 2}, {1}]


def test_heads_that_share_keys_stay_together(cudnn):
    operands = _attention_operands(3, 8, 1)
    ((_, rule),) = rules_of(cudnn, *operands, primitive="dot_product_attention_fwd_wrapper")
    assert not any(map(set.union, *splittable(rule)))


def test_attention_that_depends_on_the_whole_batch_is_reported(cudnn):
    operands = _attention_operands(8, 4, 4)
    traced = jax.make_jaxpr(lambda *args: cudnn(*args, dropout_rate=0.1, seed=1))(*operands)
    (eqn,) = [eqn for eqn in _inner_equations(traced.jaxpr) if "attention" in eqn.primitive.name]
    rule = REGISTRY.find(eqn)
    assert rule.reported == "cuDNN attention draws its dropout by position in the batch it is given"
    assert math.prod(len(dims) for dims in rule.operands[:3]) == 64
    assert all(factor.kind is Kind.WHOLE for factor in rule.factors)


def _inner_equations(jaxpr):
    for eqn in jaxpr.eqns:
        inner = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
        if inner is None:
            yield eqn
        else:
            yield from _inner_equations(inner.jaxpr)
