"""Memory limits as users write them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jax_deepcompile import errors
from jax_deepcompile.planner import limits
from jax_deepcompile.planner.limits import RESERVE_FRACTION, limit_bytes

pytestmark = pytest.mark.pure

DEVICE_BYTES = 80 * 10**9


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (72 * 2**30, 72 * 2**30),
        ("72GiB", 72 * 2**30),
        ("72 gib", 72 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("4096", 4096),
        (0.5, DEVICE_BYTES // 2),
        (1.0, DEVICE_BYTES),
        (None, int(DEVICE_BYTES * (1 - RESERVE_FRACTION))),
    ],
)
def test_limits_are_bytes_a_device(limit, expected):
    assert limit_bytes(limit, DEVICE_BYTES) == expected


def test_by_default_no_more_than_the_allocator_has():
    assert limit_bytes(None, DEVICE_BYTES, DEVICE_BYTES // 2) == DEVICE_BYTES // 2
    assert limit_bytes(None, DEVICE_BYTES, DEVICE_BYTES) == int(DEVICE_BYTES * (1 - RESERVE_FRACTION))
    assert limit_bytes("72GiB", DEVICE_BYTES, DEVICE_BYTES // 2) == 72 * 2**30
    assert limit_bytes("0.5", DEVICE_BYTES) == DEVICE_BYTES // 2, "as the command line has it"


def test_devices_without_memory_of_their_own_have_no_limit():
    assert limit_bytes(None, None) is None


@pytest.mark.parametrize("limit", ["lots", "", "72 parsecs", "-1GiB", "0", 0, -5, 1.5e-9 - 1, True])
def test_other_limits_are_refused(limit):
    with pytest.raises(errors.MemoryLimitError, match=r"is not understood. Give bytes"):
        limit_bytes(limit, DEVICE_BYTES)


def test_a_fraction_of_an_unknown_memory_is_refused():
    with pytest.raises(errors.MemoryLimitError, match=r"memory_limit=0.9"):
        limit_bytes(0.9, None)


def test_of_a_device_that_nobody_knows_the_allocators_memory_is_the_limit():
    assert limit_bytes(None, None, 130 << 30) == 130 << 30
    assert limit_bytes(None, None, None) is None


def test_what_may_be_on_the_host_is_told_of_state_and_batch_that_are_too_much():
    with pytest.raises(errors.MemoryExceededError) as caught:
        limits.require_room("step", 85 << 20, 56 << 20, 10 << 20)
    assert str(caught.value) == (
        "state and batch of step alone take 29.00 MiB a device, with 56.00 MiB of them on the host, 19.00 MiB more "
        'than the limit of 10.00 MiB. Use more devices, or raise memory_limit to at least "29.00MiB" and what '
        "temporaries take besides."
    )


def test_temporaries_are_named_by_lines_of_the_user():
    own = f"{Path(limits.__file__).parents[1] / 'lowering' / 'emit.py'}:61"
    lines = {"loop": own, "product": "/home/me/model.py:7", "copy": ""}
    values = ((30, "loop"), (20, "product"), (10, "copy"))
    module: Any = SimpleNamespace(source_of=lines.get)
    memory: Any = SimpleNamespace(peak_values=values)
    assert limits.largest_temporaries(module, memory) == [
        (30, "what loops carry and stack"),
        (20, "/home/me/model.py:7"),
        (10, "copy"),
    ]
