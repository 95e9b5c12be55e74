"""How often a compiled program launches each kind of collective."""

from __future__ import annotations

from collections import Counter

from jax_deepcompile.hlo import opcodes
from jax_deepcompile.hlo.trip_counts import trip_count
from jax_deepcompile.hlo.types import Computation, Module


def launches(module: Module) -> Counter[str]:
    """Collectives of one run of ``module``, by opcode without ``-start``.

    A loop of unknown length counts once, and of a conditional's branches the one that launches most.
    """
    return _of(module, module.entry)


def _of(module: Module, computation: Computation) -> Counter[str]:
    counts: Counter[str] = Counter()
    for instruction in computation.instructions:
        opcode, part = opcodes.split(instruction.opcode)
        if opcode in opcodes.COLLECTIVES and part in ("", "-start"):
            counts[opcode] += 1
        elif opcode == "while":
            trips = trip_count(module, instruction)
            inner = _of(module, module.body(instruction))
            counts.update({kind: number * (1 if trips is None else trips) for kind, number in inner.items()})
        elif opcode == "conditional":
            branches = [_of(module, module.computations[name]) for name in instruction.called]
            counts.update(max(branches, key=Counter.total, default=Counter()))
        elif opcode == "call" or instruction.opcode == "async-start":
            counts.update(_of(module, module.body(instruction)))
    return +counts
