"""What the cost model has for what a row measured alone: by the published tables, and by the rates of the hardware."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experiments.gpu_suite.cases import Row
from experiments.gpu_suite.host_copies import BOTH_WAYS
from jax_deepcompile.analysis.work import Attention, Product
from jax_deepcompile.costs.devices import hardware_of
from jax_deepcompile.costs.hardware import Hardware
from jax_deepcompile.costs.overlap import overlap_of
from jax_deepcompile.costs.rates import published_rates


def with_expected(section: str, row: Row, device_kind: str) -> Row:
    """The row; with ``expected_over_measured`` of the seconds, where the model has them and they are not a call's."""
    found = _SECONDS[section](row, hardware_of(device_kind)) if section in _SECONDS else None
    if found is None:
        return row
    measured_s, expected_s, least_s = found
    return row | {"expected_over_measured": expected_s / measured_s} if expected_s >= least_s else row


Found = tuple[float, float, float] | None
"""Seconds that were measured, those expected, and the least that are long beside what calling costs."""


def _matmul(row: Row, hardware: Hardware) -> Found:
    product = Product(1, row["m"], row["n"], row["k"], row["dtype"])
    rate = published_rates(hardware.name).product_flops_per_s(product, hardware)
    return None if rate is None else (row["seconds"], product.flops / rate, _KERNEL_S)


def _attention(row: Row, hardware: Hardware) -> Found:
    if row["implementation"] != "cudnn":
        return None
    shape = row["heads"], row["tokens"], row["tokens"], row["channels"]
    passes = (False,) if row["passes"] == "forward" else (False, True)
    kernels = [Attention(*shape, seen=0.5, is_gradient=again, dtype="bf16") for again in passes]
    rates = [published_rates(hardware.name).attention_flops_per_s(kernel) for kernel in kernels]
    seconds = [kernel.flops / rate for kernel, rate in zip(kernels, rates, strict=True) if rate]
    return (row["seconds"], sum(seconds), _KERNEL_S) if len(seconds) == len(kernels) else None


def _memory(row: Row, hardware: Hardware) -> Found:
    return (row["seconds"], row["size_bytes"] / hardware.memory_rate, _KERNEL_S) if "seconds" in row else None


def _copies(row: Row, hardware: Hardware) -> Found:
    rates = {"to host": hardware.to_host_bytes_per_s, "from host": hardware.from_host_bytes_per_s}
    if row.get("how") == BOTH_WAYS:
        both = sum(rates.values()) * overlap_of(hardware.name).both_ways
        return 1 / row["together_bytes_per_s"], 1 / both, 0.0
    alone = row.get("how") == "alone"
    return (row["seconds"], row["size_bytes"] / rates[row["direction"]], _COPY_S) if alone else None


_KERNEL_S = 2e-5

_COPY_S = 4e-3

_SECONDS: Mapping[str, Callable[[Row, Hardware], Found]] = {
    "matmul": _matmul,
    "attention": _attention,
    "memory": _memory,
    "host_copies": _copies,
    "offload": _copies,
}
