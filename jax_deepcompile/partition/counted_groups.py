"""Whether sizes of groups are how often each key occurs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from jax_deepcompile.ir.known_values import Makers, between, values_of
from jax_deepcompile.ir.primitives import ELEMENTWISE

_MOST_BYTES = 1 << 32
"""Of one value, to try it out."""

_MOVES = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim", "copy"})
_STEPS = _MOVES | {
    "max",
    "min",
    "clamp",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "and",
    "or",
    "not",
    "select_n",
    "add",
    "sub",
}
"""What is written of keys that may be any number: a function in steps, which begin where one of its numbers is."""


def are_counted(sizes: Any, keys: Any, makers: Makers) -> bool:
    """Whether ``sizes[g]`` is how many of ``keys`` are ``g``, or 0 where they are negative.

    So it is if ones are added up for each key, or those equal to each group are, as ``jnp.bincount`` and a sum of
    ``one_hot`` do, and if that is right of each number that keys may be. These are tried.

    Args:
      sizes, keys: variables of one jaxpr, of one dimension each.
      makers: of its variables.
    """
    source = _behind(keys, makers, _MOVES, _keeps_numbers)
    if isinstance(source, jex.Literal):
        return False
    eqns = between([source], [keys, sizes], makers)
    added = _added_up(sizes, keys.aval.shape[0], makers)
    if eqns is None or added is None:
        return False
    known = _known_range(source, makers)
    allowed = _STEPS if known is None else _MOVES | ELEMENTWISE
    if not _is_of_each(added, source, makers, allowed):
        return False
    groups = sizes.aval.shape[0]
    numbers = np.arange(*known) if known else _beginnings(eqns, groups, source.aval.dtype)
    for values in _trials(source.aval, numbers):
        tried = values_of([keys, sizes], makers, _MOST_BYTES, {source: values})
        if tried is None or not np.array_equal(_counts(tried[0], groups), tried[1]):
            return False
    return True


def _counts(keys: np.ndarray, groups: int) -> np.ndarray:
    found = np.maximum(keys.astype(np.int64), 0)
    return np.bincount(found[found < groups], minlength=groups)


def _behind(atom: Any, makers: Makers, names: frozenset[str], converts: Any) -> Any:
    """What ``atom`` is made of by equations of one operand."""
    while not isinstance(atom, jex.Literal) and (maker := makers.get(atom)) is not None and len(maker.invars) == 1:
        if maker.primitive.name not in names and not (
            maker.primitive.name == "convert_element_type" and converts(maker)
        ):
            break
        (atom,) = maker.invars
    return atom


def _keeps_numbers(convert: Any) -> bool:
    """Whether a conversion is one of whole numbers, and changes none."""
    before, after = convert.invars[0].aval.dtype, convert.outvars[0].aval.dtype
    whole = jnp.issubdtype(before, jnp.integer) and jnp.issubdtype(after, jnp.integer)
    return whole and bool(np.can_cast(before, after, "safe"))


def _added_up(sizes: Any, most: int, makers: Makers) -> Any:
    """What decides for each key where one is added; None if sizes are made otherwise, or could not be ``most``."""
    total = _behind(sizes, makers, frozenset({"copy"}), lambda convert: _counts_up_to(convert.outvars[0], most))
    maker = makers.get(total)
    if not _counts_up_to(total, most):
        return None
    if maker is not None and maker.primitive.name == "scatter-add":
        nothing, indices, ones = maker.invars
        numbers = maker.params["dimension_numbers"]
        counts = nothing.aval.shape == sizes.aval.shape and not numbers.update_window_dims
        return indices if counts and _is_all(nothing, 0, makers) and _is_all(ones, 1, makers) else None
    if maker is None or maker.primitive.name != "reduce_sum":
        return None
    compared = makers.get(_behind(maker.invars[0], makers, frozenset({"copy"}), lambda _: True))
    if compared is None or compared.primitive.name != "eq":
        return None
    (kept,) = set(range(maker.invars[0].aval.ndim)) - set(maker.params["axes"])
    for keys, groups in (compared.invars, compared.invars[::-1]):
        values = None if isinstance(groups, jex.Literal) else values_of([groups], makers, _MOST_BYTES)
        if values is not None and bool((np.moveaxis(values[0], kept, -1) == np.arange(sizes.aval.shape[0])).all()):
            return keys
    return None


def _counts_up_to(var: Any, most: int) -> bool:
    """Whether its type has all whole numbers up to ``most``."""
    dtype = var.aval.dtype
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).max >= most
    return jnp.issubdtype(dtype, jnp.floating) and 2 ** (jnp.finfo(dtype).nmant + 1) >= most


def _is_all(atom: Any, number: int, makers: Makers) -> bool:
    if isinstance(atom, jex.Literal):
        return bool(np.all(atom.val == number))
    values = values_of([atom], makers, _MOST_BYTES)
    return values is not None and bool((values[0] == number).all())


def _is_of_each(atom: Any, source: Any, makers: Makers, allowed: frozenset[str]) -> bool:
    """Whether ``atom`` is made of each element of ``source`` alone, the same of all."""
    waiting, seen = [atom], {source}
    while waiting:
        var = waiting.pop()
        if isinstance(var, jex.Literal) or var in seen:
            continue
        seen.add(var)
        maker = makers[var]
        name = maker.primitive.name
        if name in allowed or (name == "convert_element_type" and (name in allowed or _keeps_numbers(maker))):
            waiting += maker.invars
            continue
        values = values_of([var], makers, _MOST_BYTES)
        if values is None or np.unique(values[0]).size > 1:
            return False
    return True


def _known_range(source: Any, makers: Makers) -> tuple[int, int] | None:
    """Of whole numbers that are places among others."""
    maker = makers.get(source)
    if maker is None or maker.primitive.name not in ("top_k", "argmax", "argmin"):
        return None
    shape = maker.invars[0].aval.shape
    if maker.primitive.name != "top_k":
        return 0, shape[maker.params["axes"][0]]
    return (0, shape[maker.params.get("axis", -1)]) if source is maker.outvars[1] else None


def _beginnings(eqns: Sequence[Any], groups: int, dtype: Any) -> np.ndarray:
    """Where something may begin of what ``eqns`` make of a whole number: at their numbers, and sums of two."""
    literals = {int(atom.val) for eqn in eqns for atom in eqn.invars if _is_whole(atom)}
    sums = {sign * one + other for sign in (-1, 1) for one in literals for other in literals}
    limits = jnp.iinfo(dtype)
    numbers = {number + more for number in (*literals, *sums) for more in (-1, 0, 1)}
    numbers |= {*range(-2, groups + 3), int(limits.min), int(limits.max)}
    return np.array(sorted(number for number in numbers if limits.min <= number <= limits.max))


def _is_whole(atom: Any) -> bool:
    return isinstance(atom, jex.Literal) and not np.shape(atom.val) and float(atom.val).is_integer()


def _trials(aval: Any, numbers: np.ndarray) -> Iterator[np.ndarray]:
    """Arrays that together have all ``numbers``, each some times, at places by chance."""
    random, size = np.random.default_rng(0), int(np.prod(aval.shape))
    for start in range(0, len(numbers), max(size, 1)):
        some = numbers[start : start + size]
        more = random.choice(numbers, size - len(some))
        yield random.permutation(np.concatenate([some, more])).reshape(aval.shape).astype(aval.dtype)
    yield random.choice(numbers, aval.shape).astype(aval.dtype)
