"""Arguments that a step was jitted with as static ones: values, for each of which there is a program of its own."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import jit_info


@dataclass(frozen=True)
class Rest:
    """A call without its static arguments.

    Attributes:
      fun: of what is left.
      names: and positions among the parameters of the user's step, of every argument left.
      args, kwargs: what is left.
      static: the names of the others, and their values.
    """

    fun: Callable
    names: list[tuple[str, int]]
    args: tuple
    kwargs: dict
    static: tuple[tuple[str, Hashable], ...] = ()


Parameters = frozenset[int | str]
"""Some of a function's parameters, by position and by name."""


def static_and_donated(fun: Callable) -> tuple[Parameters, Parameters]:
    """Which parameters ``fun`` was jitted with as static, and which to donate; of what is not jitted none are."""
    bound = 0
    while isinstance(fun, functools.partial | types.MethodType):
        if isinstance(fun, functools.partial):
            bound, fun = bound + len(fun.args), fun.func
        else:
            bound, fun = bound + 1, fun.__func__
    info = jit_info(fun)
    if info is None:
        return frozenset(), frozenset()

    total = len(info.fun_signature.parameters) if info.fun_signature else 0

    def left(positions: Sequence[int], names: Sequence[str]) -> Parameters:
        counted = (position if position >= 0 else position + total for position in positions)
        return frozenset((*(position - bound for position in counted if position >= bound), *names))

    return left(info.static_argnums, info.static_argnames), left(info.donate_argnums, info.donate_argnames)


def without_static(
    parameters: Parameters, fun: Callable, names: Sequence[tuple[str, int]], args: tuple, kwargs: dict
) -> Rest:
    """``fun(*args, **kwargs)`` with the static ``parameters`` fixed.

    Raises:
      StaticArgumentError: the value of one has no hash.
    """
    fixed = {place: args[place] for place, each in enumerate(names) if not parameters.isdisjoint(each)}
    named = {name: value for name, value in kwargs.items() if name in parameters}
    if not fixed and not named:
        return Rest(fun, list(names), args, kwargs)
    static = (*((names[place][0], value) for place, value in fixed.items()), *named.items())
    for name, value in static:
        try:
            hash(value)
        except TypeError as error:
            raise errors.StaticArgumentError(name, value, str(error)) from error

    count = len(args)

    def called(*rest: Any, **others: Any) -> Any:
        waiting = iter(rest)
        values = [fixed[place] if place in fixed else next(waiting) for place in range(count)]
        return fun(*values, **named, **others)

    left = [place for place in range(len(args)) if place not in fixed]
    others = {name: value for name, value in kwargs.items() if name not in named}
    return Rest(called, [names[place] for place in left], tuple(args[place] for place in left), others, static)
