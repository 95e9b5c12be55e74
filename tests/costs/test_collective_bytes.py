"""What one device of four sends in a collective, in bytes."""

from __future__ import annotations

import pytest

from jax_deepcompile.costs.collective_bytes import sent_bytes
from jax_deepcompile.costs.simulator import simulate
from tests.costs.snippets import ADDER, COSTS, GROUPS, module

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-gather", 300),
        ("reduce-scatter", 300),
        ("all-to-all", 300),
        ("ragged-all-to-all", 300),
        ("all-reduce", 600),
        ("collective-permute", 400),
        ("collective-broadcast", 400),
    ],
)
def test_a_ring_of_four(kind: str, sent: int):
    assert sent_bytes(kind, 400, 4) == sent


def test_a_device_alone_sends_nothing():
    assert sent_bytes("all-reduce", 400, 1) == 0


def test_a_program_sends_what_its_collectives_do():
    """Each device gathers 100 f32 out of 25 and sums 100 with the others."""
    run = simulate(
        module(
            f"""%w = f32[25]{{0}} parameter(0)
            %whole = f32[100]{{0}} all-gather(%w), {GROUPS}, dimensions={{0}}
            %sum = f32[100]{{0}} all-reduce(%whole), {GROUPS}, to_apply=%adder""",
            ADDER,
        ),
        COSTS,
    )
    assert [(event.kind, event.sent_bytes) for event in run.timeline] == [("all-gather", 300), ("all-reduce", 600)]
    assert run.sent_bytes == 900
