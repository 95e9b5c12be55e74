"""Streams that the operations of a step run on, and how one of them runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from jax_deepcompile.analysis.work import Attention, Product
from jax_deepcompile.costs.overlap import NONE, Taken


class Queue(StrEnum):
    """What runs operations one after another.

    Collectives wait for each other whatever their kind: they share NICs and NVLink, and XLA:GPU issues them on one
    stream (``AsyncStreamKind`` in xla/backends/gpu/collectives/gpu_clique_key.h); permutations have others.
    """

    COMPUTE = "compute"
    NETWORK = "network"
    PEERS = "peers"
    TO_HOST = "to host"
    FROM_HOST = "from host"


class Stream(StrEnum):
    """What an operation belongs to: compute, collectives of one kind, copies in one direction."""

    COMPUTE = "compute"
    ALL_GATHER = "all-gather"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "collective-broadcast"
    PERMUTE = "collective-permute"
    RAGGED_ALL_TO_ALL = "ragged-all-to-all"
    REDUCE_SCATTER = "reduce-scatter"
    TO_HOST = "to host"
    FROM_HOST = "from host"

    @property
    def is_copy(self) -> bool:
        return self in (Stream.TO_HOST, Stream.FROM_HOST)

    @property
    def queue(self) -> Queue:
        """Where its operations wait, for each other and for those of other streams."""
        if self is Stream.COMPUTE or self.is_copy:
            return Queue(self.value)
        return Queue.PEERS if self is Stream.PERMUTE else Queue.NETWORK


class Part(StrEnum):
    """What a kernel is a part of: of what its FLOPs are, or of what the step computes a second time."""

    PRODUCTS = "matrix products"
    ATTENTION = "fused attention"
    OTHER = "elementwise and other"
    AGAIN = "computed again"

    @classmethod
    def of(cls, work: Sequence[Product | Attention], op_name: str, name: str = "") -> Part:
        """Of a kernel that does ``work``, by the path of scopes it came from, and its instruction's name."""
        if AGAIN in op_name or REMATERIALIZED.search(name):
            return cls.AGAIN
        if any(isinstance(each, Attention) for each in work):
            return cls.ATTENTION
        return cls.PRODUCTS if work else cls.OTHER


AGAIN = "rematted_computation"
"""What JAX puts into the name stack of all that ``jax.checkpoint`` computes again."""

REMATERIALIZED = re.compile(r"\.remat\d*(\.|$)")
"""In the name of an instruction that XLA's ``HloRematerialization`` made."""


@dataclass(frozen=True)
class Timing:
    """How one operation runs.

    Attributes:
      stream: where.
      seconds: how long.
      kind: its opcode, without ``-start``.
      bytes: of a collective or copy, as ``CostModel`` counts them; 0 for kernels.
      is_sync: whether XLA runs it on the compute stream although it is written as asynchronous.
      sent_bytes: that one device sends to others, in a ring.
      is_memory_bound: of a kernel: whether it waits for device memory rather than for arithmetic.
      taken: of a collective or copy: what it takes from kernels beside it.
      both_ways: of a copy: how many times longer it takes while one the other way runs.
      part: of a kernel: what it is a part of.
      is_within_node: of a collective: whether it is known that all that take part in it share a node.
    """

    stream: Stream
    seconds: float
    kind: str
    bytes: int = 0
    is_sync: bool = False
    sent_bytes: int = 0
    is_memory_bound: bool = False
    taken: Taken = NONE
    both_ways: float = 1.0
    part: Part = Part.OTHER
    is_within_node: bool = False
