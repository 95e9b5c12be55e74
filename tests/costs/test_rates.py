"""Published tables: read as they are written, interpolated between, and each with its source."""

from __future__ import annotations

import csv
import re
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_deepcompile.analysis.work import Attention, Product
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.hardware import B200_SXM, CPU_HOST, H100_SXM, H200_SXM
from jax_deepcompile.costs.network import Network
from jax_deepcompile.costs.overlap import Overlap
from jax_deepcompile.costs.rates import NO_RATES, ProductRates, published_rates, rising_points, seconds_at

pytestmark = pytest.mark.pure

H100 = published_rates("H100 SXM")
PUBLISHED = files("jax_deepcompile.costs") / "published"
SIZES = st.sampled_from([1, 64, 100, 256, 1000, 2048, 4096, 5120, 11_008, 28_672])

KNOTS = st.dictionaries(st.floats(1, 1e15), st.floats(1e-6, 10.0), min_size=1, max_size=8).map(
    lambda found: list(zip(sorted(found), sorted(found.values()), strict=True))
)
"""Points whose sizes increase and whose seconds do not decrease."""


def rows(name: str) -> list[dict[str, str]]:
    text = (PUBLISHED / name).read_text()
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def product_s(batch: int, m: int, n: int, k: int, dtype: str = "bf16") -> float:
    product = Product(batch, m, n, k, dtype)
    rate = H100.product_flops_per_s(product, H100_SXM)
    assert rate is not None
    return product.flops / rate


def test_every_table_names_its_source():
    tables = [file for file in PUBLISHED.iterdir() if file.name.endswith(".csv")]
    assert len(tables) == 4
    for table in tables:
        comment = " ".join(line for line in table.read_text().splitlines() if line.startswith("#"))
        assert re.search(r"(Source: |One node: )\S+/\S+|arXiv \d", comment), table.name


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_products_of_the_table_run_as_it_says(dtype: str):
    for row in rows("products_h100_sxm.csv"):
        if row["dtype"] == dtype:
            shape = (float(row[name]) for name in ("batch", "m", "n", "k"))
            found = H100.product_flops_per_s(Product(*shape, dtype), H100_SXM)
            assert found == pytest.approx(float(row["tflops"]) * 1e12, rel=1e-3)


@given(SIZES, SIZES, SIZES, st.integers(1, 64))
def test_no_product_is_faster_than_the_peak(m: int, n: int, k: int, batch: int):
    product = Product(batch, m, n, k, "bf16")
    assert product.flops / product_s(batch, m, n, k) <= H100_SXM.matmul_flops_per_s["bf16"]


def test_between_and_beyond_the_shapes_of_a_table():
    table = ProductRates.of([((1, 256, 256, 256), 1e12), ((1, 1024, 256, 256), 4e12)])

    def rate(*shape: int) -> float:
        return table.at(Product(*shape, "bf16"))

    assert rate(1, 512, 256, 256) == pytest.approx(2e12)
    assert rate(1, 4096, 256, 256) == pytest.approx(4e12)
    assert rate(1, 128, 256, 256) == pytest.approx(0.5e12), "as long as 256 rows"
    assert product_s(1, 8192, 4096, 4096) == pytest.approx(2 * product_s(1, 4096, 4096, 4096), rel=0.05)
    assert product_s(64, 256, 256, 256) < 8 * product_s(4, 256, 256, 256), "many small ones fill the device"
    assert product_s(64, 256, 256, 256) == pytest.approx(product_s(4, 4096, 256, 256), rel=0.05)
    assert product_s(1, 64, 4096, 4096) == pytest.approx(product_s(1, 256, 4096, 4096), rel=0.01)


def test_a_type_without_a_table_runs_as_bfloat16_by_its_peak():
    product = Product(1, 4096, 4096, 4096, "s8")
    bf16 = H100.product_flops_per_s(Product(1, 4096, 4096, 4096, "bf16"), H100_SXM)
    assert H100.product_flops_per_s(product, H100_SXM) == pytest.approx(2 * (bf16 or 0), rel=1e-3)
    assert H100.product_flops_per_s(Product(1, 8, 8, 8, "s64"), H100_SXM) is None


def test_hardware_without_a_table_has_its_flat_fraction():
    assert published_rates(CPU_HOST.name).products == {}
    assert published_rates(H200_SXM.name).products.keys() == H100.products.keys()
    assert published_rates(B200_SXM.name).products["bf16"].flops_per_s.max() > 1.6e15
    product = (Product(1, 4096, 4096, 4096, "f32"),)
    plain = CostModel(CPU_HOST, rates=published_rates(CPU_HOST.name)).matmul(product, 0)
    assert plain == CostModel(CPU_HOST, rates=NO_RATES).matmul(product, 0)


def attention_rate(
    tokens: int, size: int = 128, seen: float = 1.0, gradient: bool = False, how: str = "cudnn"
) -> float:
    work = Attention(16, tokens, tokens, size, seen, gradient, "bf16")
    return (published_rates("H100 SXM", how).attention_flops_per_s(work) or 0) / 1e12


def test_attention_by_length_mask_direction_and_kernel():
    assert attention_rate(4096) == pytest.approx(609)
    assert attention_rate(64) == attention_rate(512) == pytest.approx(497)
    assert attention_rate(10**6) == pytest.approx(595)
    assert 574 < attention_rate(1500) < 617
    assert attention_rate(4096, gradient=True) == pytest.approx(499)
    assert attention_rate(4096, seen=0.5) == pytest.approx(518)
    assert attention_rate(4096, seen=0.5, gradient=True) == pytest.approx(499 * 518 / 609), "as much lost as forward"
    assert attention_rate(4096, size=256, gradient=True) == pytest.approx(499), "the nearest size that is known"
    assert attention_rate(4096, how="triton") == pytest.approx(389)
    assert attention_rate(4096, gradient=True, how="triton") == attention_rate(4096, gradient=True, how="fa2")


@given(
    st.sampled_from(["all-gather", "reduce-scatter", "all-reduce"]),
    st.sampled_from([(2, 2), (4, 4), (8, 8), (16, 8), (24, 8), (256, 8), (2048, 8), (2, 1), (4, 1), (64, 1), (8, 4)]),
    st.floats(1, 1e10),
    st.floats(1, 100),
)
def test_more_bytes_and_more_nodes_never_take_less(kind: str, group: tuple[int, int], size: float, times: float):
    costs = CostModel(rates=H100)
    assert costs.collective_s(kind, times * size, *group) >= costs.collective_s(kind, size, *group) > 0
    if group[0] > group[1]:
        assert costs.collective_s(kind, size, 2 * group[0], group[1]) >= 0.999 * costs.collective_s(kind, size, *group)


def test_collectives_of_the_table_take_what_it_says():
    seconds = {(row["kind"], row["gpus_per_node"], row["nodes"], row["bytes"]): float(row["seconds"])
               for row in rows("collectives_h100_sxm.csv")}  # fmt: skip
    costs, size = CostModel(rates=H100), str(1 << 30)
    assert costs.collective_s("all-gather", 1 << 30, 8, 8) == pytest.approx(seconds["all-gather", "8", "1", size])
    assert costs.collective_s("reduce-scatter", 1 << 30, 32, 8) == pytest.approx(
        seconds["reduce-scatter", "8", "4", size]
    )
    assert costs.collective_s("all-reduce", 1 << 30, 4, 1) == pytest.approx(seconds["all-reduce", "1", "4", size])


def test_a_slower_network_scales_what_is_no_latency():
    fast, slow = (CostModel(network=Network(nics_per_node=cards), rates=H100) for cards in (8, 1))
    assert slow.collective_s("all-gather", 8e9, 32, 8) == pytest.approx(
        8 * fast.collective_s("all-gather", 8e9, 32, 8), rel=0.05
    )
    assert slow.collective_s("all-gather", 4, 32, 8) == fast.collective_s("all-gather", 4, 32, 8)
    assert slow.collective_s("all-gather", 8e9, 8, 8) == fast.collective_s("all-gather", 8e9, 8, 8)


def test_products_in_a_step_are_slower_than_alone():
    product = (Product(1, 4096, 4096, 4096, "bf16"),)
    alone, sustained = (CostModel(rates=H100, overlap=Overlap(sustained=share)) for share in (1.0, 0.5))
    assert sustained.matmul(product, 0).seconds == pytest.approx(2 * alone.matmul(product, 0).seconds, rel=0.02)


@given(KNOTS)
def test_interpolation_is_exact_at_its_points(knots):
    points = rising_points(knots)
    assert [seconds_at(points, size) for size, _ in knots] == [seconds for _, seconds in knots]


@given(KNOTS, st.floats(0.1, 1e16), st.floats(0.1, 1e16))
def test_more_work_never_takes_less_time(knots, one, other):
    points = rising_points(knots)
    less, more = sorted((one, other))
    assert seconds_at(points, less) <= seconds_at(points, more) * (1 + 1e-9)


@given(KNOTS, st.floats(0.1, 1e16))
def test_between_two_points_lie_their_seconds(knots, size):
    points = rising_points(knots)
    below = max((seconds for known, seconds in points if known <= size), default=points[0][1])
    above = min((seconds for known, seconds in points if known >= size), default=float("inf"))
    assert below * (1 - 1e-9) <= seconds_at(points, size) <= above * (1 + 1e-9)


def test_in_the_middle_in_logarithms():
    assert seconds_at([(1e9, 1e-6), (1e11, 1e-4)], 1e10) == pytest.approx(1e-5)


def test_beyond_the_largest_the_rate_stays_and_below_the_smallest_the_seconds():
    points = [(1e9, 1e-5), (1e12, 2e-3)]
    assert seconds_at(points, 3e12) == pytest.approx(6e-3)
    assert seconds_at(points, 1.0) == 1e-5


def test_seconds_that_fall_are_raised():
    assert rising_points([(3, 1.0), (1, 2.0), (2, 4.0)]) == [(1, 2.0), (2, 4.0), (3, 4.0)]
