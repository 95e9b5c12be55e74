"""Scheduler latencies: seconds that XLA:GPU's scheduler assumes of each instruction, in place of its own.

The scheduler hides collectives by its own estimates of the network; where they are wrong it starts them too late. It
reads a profile instead if it is given one, instruction by instruction; names are the same in every compilation of one
program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax_deepcompile.lowering.compile import Options


@dataclass(frozen=True)
class Latency:
    """What one instruction takes.

    Attributes:
      name: in the scheduled module.
      microseconds: from its start to its end.
    """

    name: str
    microseconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.microseconds < math.inf:
            raise ValueError(f"{self.name!r:.60} is said to take {self.microseconds} microseconds")


def latency_options(latencies: Sequence[Latency]) -> Options:
    """Options that make XLA:GPU schedule by ``latencies``; none for none.

    The value is a text ``ProfiledInstructionsProto``, which XLA and the keys of JAX's caches have as it is: there is no
    file that another process could need, write, or find half written.
    """
    if not latencies:
        return {}
    lines = (f"costs {{ name: {_quoted(each.name)} cost_us: {each.microseconds:.3f} }}\n" for each in latencies)
    return {"fdo_profile": "".join(lines).encode()}


def _quoted(name: str) -> str:
    """A string of text protos: they escape as Python's bytes do."""
    return repr(name.encode()).removeprefix("b")
