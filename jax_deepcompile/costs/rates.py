"""Rates that matrix products and attention attain, by shape, and what collectives take: from published tables."""

from __future__ import annotations

import csv
import functools
import logging
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import accumulate, groupby
from types import MappingProxyType

import numpy as np

from jax_deepcompile.analysis.work import Attention, Product
from jax_deepcompile.costs.hardware import TERA, Hardware
from jax_deepcompile.costs.network import DGX_NETWORK, Network

Points = Sequence[tuple[float, float]]
"""Pairs (size of the work, seconds) with sizes that increase and seconds that do not decrease."""

_NEAREST = 8
"""Shapes of a table between which is interpolated: the corners of a cell, in three dimensions."""

_SAME = 1e-9
"""Squared distance of logarithms of sizes below which shapes are the same."""


@dataclass(frozen=True, eq=False)
class ProductRates:
    """FLOP/s of products of one type.

    Attributes:
      shapes: logarithms to base 2 of batch, m, n and k; a row a shape.
      flops_per_s: of each.
    """

    shapes: np.ndarray
    flops_per_s: np.ndarray

    @classmethod
    def of(cls, rows: Iterable[tuple[Sequence[float], float]]) -> ProductRates:
        """Of pairs ((batch, m, n, k), FLOP/s)."""
        shapes, rates = zip(*rows, strict=True)
        return cls(np.log2(np.array(shapes, float)), np.array(rates, float))

    def at(self, product: Product) -> float:
        """FLOP/s of a product, between those of the nearest shapes in logarithms.

        Rows and columns beyond the largest shape are further tiles, as another product of the batch would be, and
        products beyond the largest batch, as further rows would be; a shape smaller than all takes as long as the
        smallest.
        """
        smallest, largest = self.shapes.min(axis=0), self.shapes.max(axis=0)
        wanted = np.log2([max(size, 1.0) for size in (product.batch, product.m, product.n, product.k)])
        wanted[0] += np.maximum(wanted - largest, 0.0)[1:3].sum()
        more_rows = np.array([0.0, max(wanted[0] - largest[0], 0.0), 0.0, 0.0])
        at = np.clip(wanted + more_rows, smallest, largest)
        distances = ((self.shapes - at) ** 2).sum(axis=1)
        near = np.argsort(distances, kind="stable")[:_NEAREST]
        weights = 1 / np.maximum(distances[near], _SAME)
        rate = np.exp((weights * np.log(self.flops_per_s[near])).sum() / weights.sum())
        return float(rate * 2 ** np.minimum(wanted - smallest, 0.0)[1:].sum())


@dataclass(frozen=True)
class AttentionRates:
    """FLOP/s of fused attention of one head size in one direction, as pairs (tokens, FLOP/s) with rising tokens."""

    points: tuple[tuple[float, float], ...]

    def at(self, tokens: float) -> float:
        """Between the nearest lengths in logarithms; beyond them as at the ends."""
        lengths, rates = zip(*self.points, strict=True)
        return float(np.interp(math.log(max(tokens, 1.0)), np.log(lengths), rates))


def rising_points(known: Iterable[tuple[float, float]]) -> Points:
    """Pairs (size of the work, seconds), no two of one size, in order of size: more work never takes less time."""
    points = sorted(known)
    return list(zip((size for size, _ in points), accumulate((seconds for _, seconds in points), max), strict=True))


def seconds_at(points: Points, size: float) -> float:
    """Seconds for work of ``size``: straight between ``points`` in logarithms of both.

    Less than the smallest takes as long as that, as short kernels do; beyond the largest the rate stays.
    """
    sizes = [known for known, _ in points]
    after = bisect_left(sizes, size)
    if after == len(points):
        largest, seconds = points[-1]
        return seconds * (size / largest)
    high, high_s = points[after]
    if after == 0 or size == high:
        return high_s
    low, low_s = points[after - 1]
    share = math.log(size / low) / math.log(high / low)
    return min(high_s, low_s * (high_s / low_s) ** share)


@dataclass(frozen=True)
class CollectiveTimes:
    """Seconds of one kind of collective over ``nodes`` of them, by rising bytes.

    Attributes:
      by_nodes: pairs (nodes, points); points are pairs (bytes, seconds).
    """

    by_nodes: tuple[tuple[int, Points], ...]

    def at(self, nodes: int, size_bytes: float, slower: float) -> float:
        """Seconds, between the nearest numbers of nodes in logarithms; beyond the most of them each adds its latency.

        Args:
          nodes: over which it goes.
          size_bytes: as the table counts them.
          slower: how many times slower the network is than that of the table.
        """
        times = rising_points((count, _slowed(points, size_bytes, slower)) for count, points in self.by_nodes)
        most, most_s = times[-1]
        if nodes <= most or len(times) == 1:
            return seconds_at(times, nodes)
        (before, fewer), (_, points) = self.by_nodes[-2:]
        return most_s + (nodes - most) * max(0.0, points[0][1] - fewer[0][1]) / (most - before)


def _slowed(points: Points, size_bytes: float, slower: float) -> float:
    """What is not latency takes longer by so much."""
    latency_s = points[0][1]
    return latency_s + slower * (seconds_at(points, size_bytes) - latency_s)


@dataclass(frozen=True)
class Rates:
    """What is known of one kind of device; where nothing is, its flat fraction of the peak holds.

    Attributes:
      products: by type of the factors.
      attention: by head size, whether a causal mask is known to the kernel, and whether it is the gradient.
      collectives: by kind, how many GPUs of each node take part, and whether they are of one node; between nodes with a
        400 Gbit/s card a GPU.
    """

    products: Mapping[str, ProductRates] = field(default_factory=dict, hash=False)
    attention: Mapping[tuple[int, bool, bool], AttentionRates] = field(default_factory=dict, hash=False)
    collectives: Mapping[tuple[str, int, bool], CollectiveTimes] = field(default_factory=dict, hash=False)

    def product_flops_per_s(self, product: Product, hardware: Hardware) -> float | None:
        """Of a type without a table: as of bfloat16, by the quotient of the peaks."""
        known = self.products.get(product.dtype)
        if known is not None:
            return known.at(product)
        peaks = hardware.matmul_flops_per_s
        if "bf16" not in self.products or product.dtype not in peaks:
            return None
        _say_nearest(hardware.name, product.dtype)
        return self.products["bf16"].at(product) * peaks[product.dtype] / peaks["bf16"]

    def attention_flops_per_s(self, attention: Attention) -> float | None:
        """Of a head size without a table: as of the nearest one."""
        kind = attention.seen < 1, attention.is_gradient
        sizes = [size for size, *known in self.attention if tuple(known) == kind]
        if not sizes:
            return None
        size = min(sizes, key=lambda size: abs(math.log(size / attention.head_size)))
        return self.attention[size, *kind].at(attention.keys)

    def collective_s(
        self, kind: str, size_bytes: float, group_size: int, ranks_per_node: int, network: Network
    ) -> float | None:
        """Seconds of a collective; None if it has some GPUs of each of several nodes, neither one nor all."""
        nodes = math.ceil(group_size / ranks_per_node)
        ranks, is_whole = ranks_per_node, ranks_per_node == network.gpus_per_node
        if nodes > 1:
            ranks = DGX_NETWORK.gpus_per_node if is_whole else ranks_per_node
        known = self.collectives.get((kind, ranks, nodes == 1))
        if known is None:
            return None
        slower = DGX_NETWORK.node_bytes_per_s / network.node_bytes_per_s
        if not is_whole:
            slower *= network.gpus_per_node / DGX_NETWORK.gpus_per_node
        return known.at(nodes, size_bytes, slower if nodes > 1 else 1.0)


NO_RATES = Rates()


@functools.cache
def _say_nearest(name: str, dtype: str) -> None:
    """Once for each type."""
    logging.getLogger("jax_deepcompile").info(
        "no table has matrix products of %s on %s: simulated as those of bf16, by their peaks", dtype, name
    )


@functools.cache
def published_rates(hardware_name: str, attention: str = "cudnn") -> Rates:
    """Those of the tables in the folder ``published``, whose comments name their sources.

    Args:
      hardware_name: as of a ``Hardware``; an H200 and a GH200 have an H100's chip.
      attention: the implementation: ``cudnn``, ``fa2`` (FlashAttention-2) or ``triton``; what nobody published of it
        is as of ``fa2``.
    """
    name = _SAME_CHIP.get(hardware_name, hardware_name)
    products: dict[str, list] = defaultdict(list)
    for row in _rows(name, "products"):
        shape = [float(row[name]) for name in ("batch", "m", "n", "k")]
        products[row["dtype"]].append((shape, float(row["tflops"]) * TERA))
    kernels: dict[tuple[int, bool, bool], dict[float, float]] = {}
    attentions = list(_rows(name, "attention"))
    for implementation in ("fa2", attention):
        found = [row for row in attentions if row["implementation"] == implementation]
        for key, rows in groupby(sorted(found, key=_attention_key), _attention_key):
            kernels[key] = {float(row["tokens"]): float(row["tflops"]) * TERA for row in rows}
    times: dict[tuple[str, int, bool], dict[int, list]] = defaultdict(lambda: defaultdict(list))
    for row in _rows(name, "collectives"):
        nodes = int(row["nodes"])
        key = row["kind"], int(row["gpus_per_node"]), nodes == 1
        times[key][nodes].append((float(row["bytes"]), float(row["seconds"])))
    return Rates(
        MappingProxyType({dtype: ProductRates.of(rows) for dtype, rows in products.items()}),
        MappingProxyType({key: AttentionRates(tuple(sorted(of.items()))) for key, of in _with_masks(kernels).items()}),
        MappingProxyType({key: _by_nodes(of) for key, of in times.items()}),
    )


_SAME_CHIP = {"H200 SXM": "H100 SXM", "GH200": "H100 SXM"}


def _with_masks(kernels: Mapping[tuple[int, bool, bool], dict[float, float]]) -> dict[tuple, dict[float, float]]:
    """A gradient with a causal mask that nobody published loses as much by the mask as the forward pass does."""
    found = dict(kernels)
    for size in {size for size, *_ in kernels}:
        gradient, masked, whole = (
            kernels.get((size, *kind), {}) for kind in ((False, True), (True, False), (False, False))
        )
        lengths = gradient.keys() & masked.keys() & whole.keys()
        if lengths and (size, True, True) not in kernels:
            found[size, True, True] = {each: gradient[each] * masked[each] / whole[each] for each in lengths}
    return found


def _attention_key(row: Mapping[str, str]) -> tuple[int, bool, bool]:
    return int(row["head_size"]), row["causal"] == "yes", row["direction"] == "backward"


def _by_nodes(times: Mapping[int, Iterable[tuple[float, float]]]) -> CollectiveTimes:
    return CollectiveTimes(tuple((nodes, tuple(rising_points(points))) for nodes, points in sorted(times.items())))


def _rows(hardware_name: str, what: str) -> Iterable[dict[str, str]]:
    """The lines of one table; none where nobody published it."""
    file = files("jax_deepcompile.costs") / "published" / f"{what}_{hardware_name.lower().replace(' ', '_')}.csv"
    if not file.is_file():
        return ()
    return csv.DictReader(line for line in file.read_text().splitlines() if not line.startswith("#"))
