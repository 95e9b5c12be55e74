"""What no schedule beats: operations by hand, and any schedule of any of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_deepcompile.costs.least import least_s
from jax_deepcompile.costs.simulator import simulate
from jax_deepcompile.costs.streams import Queue
from tests.costs.snippets import COSTS, GATHER, GROUPS, module

pytestmark = pytest.mark.pure

QUEUES = (Queue.COMPUTE, Queue.NETWORK)


def text_of(operands: list[set[int]]) -> str:
    """A program whose operation number ``n`` reads those that ``operands[n]`` has."""
    read = [", ".join(f"%op{each}" for each in sorted(each)) or "%x" for each in operands]
    return "%x = f32[] parameter(0)\n" + "\n".join(f"%op{n} = f32[] fusion({names})" for n, names in enumerate(read))


def least_of(*operations: tuple[set[int], Queue, float]) -> float:
    """Of operations, each with what it reads, its queue and its seconds."""
    computation = module(text_of([operands for operands, _, _ in operations])).entry
    return least_s(computation, {f"op{n}": {queue: seconds} for n, (_, queue, seconds) in enumerate(operations)})


def test_what_nothing_needs_runs_side_by_side():
    assert least_of((set(), Queue.COMPUTE, 3.0), (set(), Queue.NETWORK, 2.0)) == 3.0


def test_a_pass_that_only_gathers_is_followed_by_one_that_only_computes():
    gathers = [(set(), Queue.NETWORK, 0.2)] * 2
    assert least_of(*gathers, ({0, 1}, Queue.COMPUTE, 0.2), ({2}, Queue.COMPUTE, 0.8)) == pytest.approx(1.4)


def test_each_half_is_divided_again():
    """Gathers, the head, reductions, the clipped update: three phases, of which no two have the same queue busy."""
    phases = [
        *[(set(), Queue.NETWORK, 1.0)] * 3,
        ({0, 1, 2}, Queue.COMPUTE, 0.5),
        *[({3}, Queue.NETWORK, 1.5)] * 2,
        ({4, 5}, Queue.COMPUTE, 0.01),
        *[({6}, Queue.COMPUTE, 0.4)] * 2,
    ]
    assert least_of(*phases) == pytest.approx(3.0 + 0.5 + 3.0 + 0.01 + 0.8)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[set[int], Queue, float]]:
    count = draw(st.integers(1, 12))
    earlier = [st.sets(st.integers(0, n - 1), max_size=3) if n else st.just(set[int]()) for n in range(count)]
    return [(draw(each), draw(st.sampled_from(QUEUES)), draw(st.floats(0.01, 2.0))) for each in earlier]


@given(programs())
def test_no_schedule_beats_it_and_it_beats_each_queue_alone(operations: list[tuple[set[int], Queue, float]]):
    free: dict[Queue, float] = dict.fromkeys(QUEUES, 0.0)
    ends = list[float]()
    for operands, queue, seconds in operations:
        begin = max([free[queue], *(ends[each] for each in operands)])
        free[queue] = begin + seconds
        ends.append(free[queue])
    least = least_of(*operations)
    busiest = max(sum(each[2] for each in operations if each[1] is queue) for queue in QUEUES)
    assert (1 - 1e-5) * busiest <= least <= (1 + 1e-5) * max(ends)


def test_of_a_compiled_program_what_is_read_counts_not_the_schedule():
    """A gather that is needed, 0.75 s, the copy of what it made, 0.2 s; another copy hides under the gather."""
    entry = f"""{GATHER}%start = (f32[6250]{{0}}, f32[25000]{{0}}) all-gather-start(%w), {GROUPS}, dimensions={{0}}
    %done = f32[25000]{{0}} all-gather-done(%start)
    %copy = f32[62500]{{0}} copy(%x)
    ROOT %last = f32[25000]{{0}} copy(%done)
    """
    run = simulate(module(entry), COSTS)
    assert (run.step_s, run.bound_s) == pytest.approx((0.75 + 0.5 + 0.2, 0.75 + 0.2))
