"""How much device memory a step may take."""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

import jax

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import users_line
from jax_deepcompile.costs.memory import MemoryUse, memory_of
from jax_deepcompile.hlo.reader import Module, read
from jax_deepcompile.lowering.compile import peak_bytes

MemoryLimit = int | float | str | None
"""Bytes, a fraction of the device's memory (a float up to 1), text such as "72GiB", or None for the device's own."""

RESERVE_FRACTION = 0.08
"""Left to what XLA's buffer assignment does not see: the CUDA context, NCCL's channels, cuBLAS workspaces.

JAX itself preallocates three quarters of a GPU by default for the same reason; 6.4 GB of an H100's 80 GB is what NCCL's
32 channels and a context take with room to spare.
"""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def limit_bytes(limit: MemoryLimit, device_bytes: int | None, allocator_bytes: int | None = None) -> int | None:
    """The limit in bytes a device; None for none.

    Args:
      limit: as the user gives it.
      device_bytes: the device's memory, None where it has no own (virtual CPU devices) or nobody knows.
      allocator_bytes: of it, what programs of this process may take; None where nobody knows.

    Raises:
      MemoryLimitError: ``limit`` is not understood, or a fraction of an unknown memory.
    """
    if limit is None:
        if device_bytes is None:
            return allocator_bytes
        own_bytes = int(device_bytes * (1 - RESERVE_FRACTION))
        return own_bytes if allocator_bytes is None else min(own_bytes, allocator_bytes)
    if isinstance(limit, str):
        number = _number(limit)
        return _parse(limit) if number is None else limit_bytes(number, device_bytes, allocator_bytes)
    if isinstance(limit, bool) or not isinstance(limit, numbers.Real) or not 0 < limit < _MOST_BYTES:
        raise errors.MemoryLimitError(limit)
    if isinstance(limit, numbers.Integral):
        return int(limit)
    if limit > 1:
        return _whole_bytes(float(limit))
    if device_bytes is None:
        raise errors.MemoryLimitError(limit)
    return int(device_bytes * limit)


def host_limit_bytes(limit: MemoryLimit, host_bytes: int | None) -> int:
    """Likewise, of the memory of its host what a step may take for each device; 0 is none."""
    is_none = limit in (0, "0") and not isinstance(limit, bool)
    return 0 if is_none else limit_bytes(limit, host_bytes) or 0


def refuse_unknown(limit: MemoryLimit, option: str = "memory_limit") -> None:
    """Raises MemoryLimitError if ``limit``, given as ``option``, is not understood, whatever the device."""
    understood = host_limit_bytes if option == "host_memory_limit" else limit_bytes
    try:
        understood(limit, _ANY_DEVICE_BYTES)
    except errors.MemoryLimitError:
        raise errors.MemoryLimitError(limit, option) from None


def require_room(
    function: str, argument_bytes: int, movable_bytes: int, limit_bytes: int | None, unread_bytes: int = 0
) -> None:
    """Makes sure, before anything is compiled, that what a step is given fits, but for what may be on the host.

    Args:
      unread_bytes: of the arguments, what it reads nothing of.

    Raises:
      MemoryExceededError: they take more by themselves.
    """
    held_bytes = argument_bytes - movable_bytes
    if limit_bytes is not None and held_bytes > limit_bytes:
        known = function, held_bytes, limit_bytes, held_bytes
        raise errors.MemoryExceededError(*known, movable_bytes=movable_bytes, unread_bytes=unread_bytes)


def require_fit(function: str, compiled: jax.stages.Compiled, limit_bytes: int | None) -> None:
    """Makes sure that a compiled program keeps its limit.

    Raises:
      MemoryExceededError: it takes more.
    """
    memory: Any = compiled.memory_analysis()
    if limit_bytes is None or memory is None or peak_bytes(memory) <= limit_bytes:
        return
    module = read(compiled.as_text() or "")
    arguments, largest = memory.argument_size_in_bytes, largest_temporaries(module, memory_of(module))
    raise errors.MemoryExceededError(function, peak_bytes(memory), limit_bytes, arguments, largest)


def largest_temporaries(module: Module, memory: MemoryUse) -> list[tuple[int, str]]:
    """What is largest at the peak of a compiled program: bytes, and the user's line where that is known."""
    lines = [(size, name, module.source_of(name)) for size, name in memory.peak_values]
    return [(size, users_line(line) or ("what loops carry and stack" if line else name)) for size, name, line in lines]


def _whole_bytes(number: float) -> int:
    """Bytes as a float, such as 72e9. What is little above 1 was meant to be something else."""
    if number < _SMALLEST_FLOAT or not number.is_integer():
        raise errors.MemoryLimitError(number)
    return int(number)


_SMALLEST_FLOAT = float(2**20)

_ANY_DEVICE_BYTES = 2**30

_MOST_BYTES = 2**63


def _number(text: str) -> int | float | None:
    """``text`` as the number it is; None if it has a unit."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return None


def _parse(text: str) -> int:
    found = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", text)
    try:
        size = float(found[1]) * _UNITS[found[2].upper()]  # type: ignore[index]
    except (TypeError, KeyError, ValueError):
        raise errors.MemoryLimitError(text) from None
    if not 1 <= size < math.inf:
        raise errors.MemoryLimitError(text)
    return int(size)
