"""Which reductions of a microbatch are done in the next one: the fewest, of those ready last."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_deepcompile as deepcompile
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.planner.candidate import Environment
from jax_deepcompile.planner.layers import keep_gathered
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.strategies.delay_reductions import (
    DelayReductions,
    Reductions,
    choose_sums,
    reductions_of,
    with_first_apart,
)
from jax_deepcompile.transforms.delay_reductions import DelayedReductions, find_terms
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from jax_deepcompile.transforms.microbatch_loops import MicrobatchLoop
from tests.planner.situations import START, UNROLLED, WAITS, Clock, accumulating, candidate, eight_layers, unrolled_loss
from tests.transforms.programs import assert_same_values, sharded

CLOCK = Clock(gather_s=2.0)


def proposals(program, mesh, plan: Plan = START, exposed_s: float = 1.0, margins=(0.05, 0.25)):
    best = candidate(program, plan, replace(WAITS, exposed_s=exposed_s))
    return list(DelayReductions(margins).propose(program, best, Environment(mesh, "cuda", CLOCK, None)))


@pytest.fixture(scope="module")
def unrolled():
    return accumulating(unrolled_loss, UNROLLED)


@pytest.mark.cpu_mesh
def test_what_is_proposed_adds_up_to_the_same_bits(unrolled):
    program, mesh = unrolled
    found = proposals(program, mesh)
    assert found
    for proposal in found:
        assert_same_values(proposal.plan.program(program, mesh), program, mesh)


@pytest.mark.pure
@pytest.mark.parametrize(
    "situation",
    [
        {"exposed_s": 0.0},
        {"margins": ()},
        {"plan": Plan("0", (DelayedReductions("microbatches", ("layer0/up",)),))},
        {"plan": Plan("0", (MicrobatchLoop("microbatches", overlap=True),))},
    ],
    ids=["nothing waits", "no margin", "decided already", "another microbatch is beside"],
)
def test_nothing_is_proposed_without_need(unrolled, situation):
    assert proposals(*unrolled, **situation) == []


@pytest.mark.pure
def test_a_step_without_microbatches_has_no_next_one():
    assert proposals(*sharded(unrolled_loss, UNROLLED)) == []


@pytest.mark.pure
def test_the_same_choice_is_proposed_once(unrolled):
    assert len(proposals(*unrolled, margins=(0.1, 0.1))) == 1


@pytest.mark.pure
def test_all_that_a_microbatch_reduces_is_counted(unrolled):
    program, _ = unrolled
    (loop,) = find_loops(program)
    found = reductions_of(loop, program.mesh, CLOCK)
    assert {position for position, *_ in found.terms} == set(find_terms(loop.eqn))
    assert found.others_s == pytest.approx(0)
    assert all(0 < ready_s <= found.compute_s for _, ready_s, _ in found.terms)
    first_layer_last = max(found.terms, key=lambda term: term[1])
    assert first_layer_last[1] == pytest.approx(found.compute_s)


@pytest.mark.cpu_mesh
def test_what_is_gathered_for_all_has_the_first_microbatch_to_hide_under(unrolled):
    program, mesh = unrolled
    kept = START.having(KeptGathers, keep_gathered(program, math.inf))
    apart = proposals(program, mesh, kept)[-1].plan
    assert [each.first_apart for each in apart.of(DelayedReductions)] == [True]
    assert_same_values(apart.program(program, mesh), program, mesh)
    others = [each for proposal in proposals(program, mesh) for each in proposal.plan.of(DelayedReductions)]
    assert not any(each.first_apart for each in others)


@pytest.mark.pure
def test_loops_apart_need_no_sums():
    one, other = DelayedReductions("one", ("up",)), DelayedReductions("other", ("down",))
    assert with_first_apart((one, other), ["other", "third"]) == (
        one,
        DelayedReductions("other", ("down",), True),
        DelayedReductions("third", (), True),
    )


SECONDS = st.floats(0.01, 10.0)


@pytest.mark.pure
@settings(deadline=None)
@given(
    SECONDS,
    st.lists(st.tuples(st.floats(0.0, 1.0), SECONDS), max_size=8),
    st.floats(0.0, 3.0),
    st.sampled_from([0.0, 0.1]),
)
def test_no_other_number_of_sums_is_done_sooner(compute_s, drawn, others_s, margin):
    terms = tuple((position, share * compute_s, takes_s) for position, (share, takes_s) in enumerate(drawn))
    reductions = Reductions(compute_s, terms, others_s)
    chosen = choose_sums(reductions, margin)
    by_readiness = sorted(terms, key=lambda term: term[1])
    assert {each[0] for each in by_readiness[len(terms) - len(chosen) :]} == set(chosen)

    def over_s(delayed: int) -> float:
        free_s = others_s + sum(takes_s for *_, takes_s in by_readiness[len(terms) - delayed :])
        for _, ready_s, takes_s in by_readiness[: len(terms) - delayed]:
            free_s = max(free_s, ready_s) + takes_s
        return max(compute_s, free_s + margin * (others_s + sum(takes_s for *_, takes_s in terms)))

    sooner = [count for count in range(len(terms) + 1) if over_s(count) < over_s(len(chosen)) - 1e-9]
    assert not sooner
    assert all(over_s(count) > over_s(len(chosen)) - 1e-9 for count in range(len(chosen)))


@pytest.mark.h100_aot
def test_microbatches_do_not_wait_for_their_last_reductions():
    """Eight layers of 50 MB, four microbatches of 4096 rows a GPU, on 32 H100s."""
    step, state, batch = eight_layers(rows=4096)
    traced = step.trace(state, batch)
    assert traced.plan().of(DelayedReductions)
    simulated = deepcompile.simulate(traced.lower().compile(), step.mesh)
    (loop,) = simulated.loops
    assert loop.trip.reduced_bytes
    assert loop.trip.exposed_communication_s < 0.02 * loop.trip.compute_s
