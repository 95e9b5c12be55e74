"""Random numbers: every device computes its slice of the global stream, so results do not depend on the mesh.

Threefry in its partitionable form (``jax_threefry_partitionable``, the default) makes number ``i`` of an array from the
key and ``i`` alone, so a block of the array needs only the indices of the block.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from jax_deepcompile._jax_compat import gamma_variables, threefry_is_partitionable
from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.rules.base import Dims, LocalEquation, OpRule, RuleBuilder, replicated_rule
from jax_deepcompile.partition.rules.elementwise import elementwise
from jax_deepcompile.partition.rules.registry import rule

_WORD = 0xFFFFFFFF
_NOT_SLICED = "this generator's stream cannot be sliced: every device draws the whole array"
_UINT = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}


@rule("random_gamma")
def random_gamma(eqn: Equation) -> OpRule:
    """``keys[*k], alpha[*k, *shape] -> samples[*k, *shape]``.

    A key is split into one for each of its samples, in order: all ways on each device, which then draws its own.
    """
    if not _is_threefry(eqn):
        return replicated_rule(eqn, reported=_NOT_SLICED)
    builder = RuleBuilder()
    keys = builder.dims(eqn.invars[0].aval.shape)
    shape = eqn.outvars[0].aval.shape[len(keys) :]
    drawn = builder.dims(shape)

    def emit(local: LocalEquation, key_block: jax.Array, alpha_block: jax.Array):
        if not any(local.splits[factor] for factors in drawn for factor in factors):
            return local.bind(key_block, alpha_block)
        split = jax.vmap(functools.partial(jax.random.split, num=math.prod(shape)))(key_block.reshape(-1))
        starts = [0] * key_block.ndim + [local.start(factors) for factors in drawn]
        own = lax.dynamic_slice(split.reshape(*key_block.shape, *shape), starts, alpha_block.shape)
        return [gamma_variables(own, alpha_block, **local.params)]

    return builder.build([keys, [*keys, *drawn]], [[*keys, *drawn]], emit=emit)


@rule("random_seed", "random_clone", "random_fold_in")
def per_key(eqn: Equation) -> OpRule:
    """One result a key; keys, and numbers that are folded into them, are broadcast as operands of ``add`` are."""
    is_made_alone = eqn.primitive.name != "random_fold_in" or _is_threefry(eqn)
    return elementwise(eqn) if is_made_alone else replicated_rule(eqn)


@rule("random_split")
def split_keys(eqn: Equation) -> OpRule:
    """``keys[*k] -> keys[*k, *shape]``: each device splits the keys it has, all ways."""
    builder = RuleBuilder()
    keys = _keys(builder, eqn)
    return builder.build([keys], [[*keys, *builder.whole_dims(eqn.params["shape"])]])


@rule("random_bits")
def random_bits(eqn: Equation) -> OpRule:
    """``keys[*k] -> bits[*k, *shape]``."""
    builder = RuleBuilder()
    keys = _keys(builder, eqn)
    shape, width = eqn.params["shape"], eqn.params["bit_width"]
    sliceable = _is_threefry(eqn) and threefry_is_partitionable()
    bits = builder.dims(shape) if sliceable else builder.whole_dims(shape)

    def emit(local: LocalEquation, key_block: jax.Array):
        if not any(local.splits[factor] for factors in bits for factor in factors):
            return local.bind(key_block)
        starts = [local.start(factors) for factors in bits]
        block = tuple(local.dim_size(factors) for factors in bits)
        return [_threefry_block(key_block, shape, block, starts, width)]

    return builder.build([keys], [[*keys, *bits]], emit=emit, reported="" if sliceable else _NOT_SLICED)


def _is_threefry(eqn: Equation) -> bool:
    return str(eqn.invars[0].aval.dtype) == "key<fry>"


def _keys(builder: RuleBuilder, eqn: Equation) -> Dims:
    """The dimensions of the keys that are drawn from.

    XLA's generator, given many keys at once, draws for all of them from the first, so that they stay together.
    """
    shape = eqn.invars[0].aval.shape
    return builder.dims(shape) if _is_threefry(eqn) else builder.whole_dims(shape)


def _threefry_block(keys, shape, block, starts, bit_width: int) -> jax.Array:
    """Bits of the block at ``starts`` of an array ``shape``, for each key: ``[*keys.shape, *block]``."""
    high_index, low_index = _global_index(shape, block, starts)
    words = jax.random.key_data(keys)
    first, second = (words[..., word].reshape(keys.shape + (1,) * len(block)) for word in (0, 1))
    counts = (index.reshape((1,) * keys.ndim + block) for index in (high_index, low_index))
    high, low = threefry2x32_p.bind(first, second, *counts)
    if bit_width == 64:
        return lax.shift_left(high.astype(jnp.uint64), jnp.uint64(32)) | low.astype(jnp.uint64)
    return (high ^ low).astype(_UINT[bit_width])


def _global_index(shape, block, starts) -> tuple[jax.Array, jax.Array]:
    """High and low words of the row-major index, in an array ``shape``, of every element of the block."""
    high = low = jnp.zeros(block, jnp.uint32)
    stride = 1
    for dim in reversed(range(len(shape))):
        position = lax.broadcasted_iota(jnp.uint32, block, dim) + jnp.asarray(starts[dim]).astype(jnp.uint32)
        if math.prod(shape) <= 2**32:
            low = low + position * jnp.uint32(stride & _WORD)
        else:
            more_high, more_low = _multiply_wide(position, stride)
            low = low + more_low
            high = high + more_high + (low < more_low).astype(jnp.uint32)
        stride *= shape[dim]
    return high, low


def _multiply_wide(position: jax.Array, stride: int) -> tuple[jax.Array, jax.Array]:
    """High and low words of ``position * stride`` modulo 2**64, from 16-bit limbs of the low product."""
    low_stride, high_stride = stride & _WORD, stride >> 32 & _WORD
    p0, p1 = position & jnp.uint32(0xFFFF), position >> jnp.uint32(16)
    s0, s1 = jnp.uint32(low_stride & 0xFFFF), jnp.uint32(low_stride >> 16)
    middle = (p0 * s0 >> jnp.uint32(16)) + (p0 * s1 & jnp.uint32(0xFFFF)) + (p1 * s0 & jnp.uint32(0xFFFF))
    high = p1 * s1 + (p0 * s1 >> jnp.uint32(16)) + (p1 * s0 >> jnp.uint32(16)) + (middle >> jnp.uint32(16))
    return high + position * jnp.uint32(high_stride), position * jnp.uint32(low_stride)


@rule("rng_bit_generator", "rng_uniform")
def stateful_generator(eqn: Equation) -> OpRule:
    return replicated_rule(eqn, reported=_NOT_SLICED)
