"""Where activations are is the best of all there is to choose from, and what is chosen fits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.recomputed import Activation
from jax_deepcompile.analysis.residuals import Residual
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.simulation import Loop, Totals
from jax_deepcompile.costs.streams import Part
from jax_deepcompile.planner.phases import Phases
from jax_deepcompile.planner.places import Places
from jax_deepcompile.planner.recomputation import RecomputeRegion
from jax_deepcompile.planner.residency import Choice, choose
from jax_deepcompile.planner.stacks import Stack

pytestmark = pytest.mark.pure

LAYERS, MIB, GIB = 4, 1 << 20, 1 << 30
LOOPS, INPUT = ("layers @forward", "layers @backward"), "layers input"
PLENTY = 1 << 40
PHASES = Phases(0.3, 0.6, 0.2, 20 * GIB, 50 * GIB, 50 * GIB)
"""Compute takes longest."""


def region(
    reads: Sequence[tuple[int, int]],
    seconds: Sequence[float],
    sizes: dict[int, int],
    residuals: Sequence[int] = (),
    copy_s: float = 1e-5,
    loops: tuple[str, str] = LOOPS,
    given_s: float = 0.0,
) -> RecomputeRegion:
    """A layer whose equations add what two earlier ones made; what none reads is a result.

    Args:
      reads: for each equation which two: 0 is the layer's input, 1 what the first equation made.
      sizes: bytes of those that forward computes too, by position.
      residuals: bytes of what stays from forward to backward as the step was written.
      given_s: what a copy of the first of them takes on the device.
    """

    def layer(x):
        made = [x]
        for one, other in reads:
            made.append(jnp.add(made[one], made[other]))
        read = {each for pair in reads for each in pair}
        return [value for at, value in enumerate(made) if at not in read]

    body = open_jaxpr(jax.make_jaxpr(layer)(1.0))
    activations = [
        Activation(body.eqns[at].outvars[0], (body.eqns[at].outvars[0],), size) for at, size in sizes.items()
    ]
    layers = LAYERS if loops[0] != loops[1] else 1
    return RecomputeRegion(
        loops,
        body,
        tuple(activations),
        tuple(f"value {at}" for at in sizes),
        tuple(seconds),
        layers,
        1,
        (copy_s,) * len(sizes),
        tuple(Residual(f"{INPUT} {at}", at, (at,), size) for at, size in enumerate(residuals)),
        given_s={f"{INPUT} 0": given_s},
    )


def row(*sizes: int, residuals: Sequence[int] = (), **more) -> RecomputeRegion:
    """A chain of equations of 10 ms a layer, each of which but the last forward computes, too."""
    count = len(sizes) + 1
    return region([(at, at) for at in range(count)], [0.01] * count, dict(enumerate(sizes)), residuals, **more)


def stack(size: int) -> Stack:
    return Stack(tuple((loop, "up") for loop in LOOPS), size)


@dataclass(frozen=True)
class Ways:
    """What becomes of everything: positions of what is kept, sent and moved, for each region, and of stacks."""

    kept: tuple[frozenset[int], ...]
    sent: tuple[frozenset[int], ...]
    moved: tuple[frozenset[int], ...]
    gathered: frozenset[int] = frozenset()


def ways_of(choice: Choice, regions: Sequence[RecomputeRegion], stacks: Sequence[Stack]) -> Ways:
    places, kept, sent, moved = choice.places, [], [], []
    for each in regions:
        away = set(places.offloaded.get(each.loops, ()))
        at_hand = set(places.kept.get(each.loops, ()))
        there = frozenset(at for at, name in enumerate(each.names) if name in away)
        assert there <= at_hand
        kept.append(frozenset(at_hand - there))
        sent.append(there)
        moved.append(frozenset(at for at, residual in enumerate(each.residuals) if residual.name in away))
    taken = frozenset(at for at, each in enumerate(stacks) if each in choice.stacks)
    return Ways(tuple(kept), tuple(sent), tuple(moved), taken)


def all_ways(regions: Sequence[RecomputeRegion], stacks: Sequence[Stack], to_host: bool) -> Iterator[Ways]:
    options = []
    for each in regions:
        can = to_host and each.is_of_loops
        places = [("again", "keep", "send")[: 3 if can and one.size_bytes >= MIB else 2] for one in each.activations]
        moves = [("stay", "move")[: 2 if can and one.size_bytes >= MIB else 1] for one in each.residuals]
        options.append([*places, *moves])
    for chosen in itertools.product(*(itertools.product(*each) for each in options)):

        def where(place: str, chosen=chosen) -> tuple[frozenset[int], ...]:
            counts = [len(each.activations) * (place == "move") for each in regions]
            found = zip(counts, chosen, strict=True)
            return tuple(frozenset(at - less for at, one in enumerate(each) if one == place) for less, each in found)

        for count in range(len(stacks) + 1):
            for some in itertools.combinations(range(len(stacks)), count):
                yield Ways(where("keep"), where("send"), where("move"), frozenset(some))


def computed_s(region: RecomputeRegion, at_hand: frozenset[int]) -> float:
    """What a layer's second loop takes where activations are ``at_hand``."""
    given = {region.activations[at].first for at in at_hand}
    needed, seconds = set(region.body.outvars) - given, 0.0
    for eqn, taken in reversed(list(zip(region.body.eqns, region.seconds, strict=True))):
        if needed & set(eqn.outvars):
            needed |= set(eqn.invars) - given
            seconds += taken
    return seconds


def device_bytes(ways: Ways, regions: Sequence[RecomputeRegion], stacks: Sequence[Stack]) -> int:
    taken = sum(stacks[at].size_bytes for at in ways.gathered)
    for each, kept, sent, moved in zip(regions, ways.kept, ways.sent, ways.moved, strict=True):
        taken += each.layers * sum(each.activations[at].size_bytes for at in kept)
        taken += 3 * sum(each.activations[at].size_bytes for at in sent)
        taken += (3 - each.layers) * sum(each.residuals[at].size_bytes for at in moved)
    return taken


def host_bytes(ways: Ways, regions: Sequence[RecomputeRegion]) -> int:
    return sum(
        each.layers * (sum(each.activations[at].size_bytes for at in sent))
        + each.layers * sum(each.residuals[at].size_bytes for at in moved)
        for each, sent, moved in zip(regions, ways.sent, ways.moved, strict=True)
    )


def step_s(ways: Ways, regions: Sequence[RecomputeRegion], stacks: Sequence[Stack], phases: Phases) -> float:
    """What layer loops and what is beside them take; copies within the device count three times."""
    copied = host_bytes(ways, regions)
    gathered = sum(stacks[at].size_bytes for at in ways.gathered)
    forward = max(phases.forward_s, copied / (0.95 * phases.to_host_bytes_per_s))
    backward, beside = phases.backward_s, 0.0
    for each, moved, *at_hand in zip(regions, ways.moved, ways.kept, ways.sent, strict=True):
        beside += sum(each.layers * each.given_s.get(each.residuals[at].name, 0.0) for at in moved)
        less = each.layers * (computed_s(each, frozenset()) - computed_s(each, frozenset.union(*at_hand)))
        backward -= less if each.is_of_loops else 0.0
        beside -= 0.0 if each.is_of_loops else less
        beside += 3 * each.layers * sum(each.copy_s[at] for at in frozenset.union(*at_hand))
    network = 0.9 * (phases.network_s - gathered / phases.bytes_per_s)
    return forward + max(backward, network, copied / (0.95 * phases.from_host_bytes_per_s)) + beside


def breaks_ties_s(ways: Ways, regions: Sequence[RecomputeRegion], stacks: Sequence[Stack]) -> float:
    """What copies count although they are hidden: a millisecond for a GiB, a thousandth of what the network takes."""
    gathered = sum(stacks[at].size_bytes for at in ways.gathered)
    return 1e-3 * (host_bytes(ways, regions) / GIB + gathered / PHASES.bytes_per_s)


@st.composite
def layers(draw, loops: tuple[str, str] = LOOPS, most: int = 4) -> RecomputeRegion:
    count = draw(st.integers(2, 6))
    reads = [(draw(st.integers(0, at)), draw(st.integers(0, at))) for at in range(count)]
    seconds = draw(st.lists(st.sampled_from([1e-3, 1e-2, 3e-2]), min_size=count, max_size=count))
    size = st.sampled_from([MIB // 2, 50 * MIB, 100 * MIB, 300 * MIB, GIB])
    shared = draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=most))
    sizes = {at: draw(size) for at in sorted(shared)}
    residuals = draw(st.lists(size, max_size=2)) if loops == LOOPS else []
    copy_s, given_s = draw(st.sampled_from([1e-5, 1e-3])), draw(st.sampled_from([0.0, 1e-3]))
    return region(reads, seconds, sizes, residuals, copy_s, loops, given_s)


phases = st.builds(
    Phases,
    st.floats(0.05, 0.5),
    st.floats(0.6, 1.0),
    st.floats(0.0, 1.2),
    st.just(PHASES.bytes_per_s),
    st.sampled_from([10.0 * GIB, 50.0 * GIB]),
    st.sampled_from([10.0 * GIB, 50.0 * GIB]),
)


@settings(max_examples=200, deadline=None)
@given(
    layers(),
    st.none() | layers(("", ""), most=1),
    st.lists(st.sampled_from([stack(GIB), stack(3 * GIB)]), max_size=2, unique=True),
    phases,
    st.integers(-1024, 8192).map(MIB.__mul__),
    st.sampled_from([0, GIB, 3 * GIB, 100 * GIB]),
)
def test_no_other_way_is_faster_within_both_limits(one, beside, stacks, phases, on_device, on_host):
    regions = [one] if beside is None else [one, beside]
    found = choose(regions, stacks, phases, on_device, on_host)
    fitting = [
        ways
        for ways in all_ways(regions, stacks, on_host > 0)
        if device_bytes(ways, regions, stacks) <= on_device and host_bytes(ways, regions) <= on_host
    ]
    assert (found is None) == (not fitting)
    if found is None:
        return
    chosen = ways_of(found, regions, stacks)
    assert found.device_bytes == device_bytes(chosen, regions, stacks) <= on_device
    assert found.host_bytes == host_bytes(chosen, regions) <= on_host
    best_s = min(
        1.001 * step_s(ways, regions, stacks, phases) + breaks_ties_s(ways, regions, stacks) for ways in fitting
    )
    assert step_s(chosen, regions, stacks, phases) <= best_s + 1e-6


def chosen(*regions: RecomputeRegion, on_device: float = PLENTY, on_host: float = PLENTY, phases: Phases = PHASES):
    found = choose(regions, (), phases, on_device, on_host)
    assert found is not None
    return found


def test_where_the_device_holds_everything_nothing_goes_to_the_host():
    found = chosen(row(GIB, GIB, residuals=[GIB]))
    assert found.places.kept == {LOOPS: (1,)}
    assert found.places.offloaded == {}


def test_what_it_does_not_hold_does():
    found = chosen(row(GIB, GIB), on_device=3 * GIB)
    assert found.places.kept == {LOOPS: (1,)}
    assert found.places.offloaded == {LOOPS: ("value 1",)}
    assert (found.device_bytes, found.host_bytes) == (3 * GIB, LAYERS * GIB)


def test_what_the_step_keeps_anyway_makes_room():
    found = chosen(row(GIB // 4, residuals=[GIB]), on_device=0)
    assert found.places.kept == {LOOPS: (0,)}
    assert found.places.offloaded == {LOOPS: (f"{INPUT} 0",)}


def test_what_layers_are_given_stays_where_what_they_compute_makes_as_much_room():
    """On its way to the host it would be copied on the device, too."""
    found = chosen(row(GIB // 4, residuals=[GIB, GIB], given_s=1e-3), on_device=0)
    assert found.places.offloaded == {LOOPS: (f"{INPUT} 1",)}


def test_of_a_product_and_what_is_added_to_it_the_sum_stays():
    """It spares the product, and the sum; unless it would be written for that alone."""
    body = open_jaxpr(jax.make_jaxpr(lambda x: jnp.sin((x @ x + x) * 2.0))(jnp.ones((2, 2))))
    activations = tuple(Activation(eqn.outvars[0], tuple(eqn.outvars), GIB) for eqn in body.eqns[:2])
    seconds = (0.01, *[1e-5] * (len(body.eqns) - 1))
    layer = RecomputeRegion(LOOPS, body, activations, ("product", "sum"), seconds, LAYERS, 1, (4e-3, 4e-3))
    for written, kept in (({0}, (0,)), ({0, 1}, (1,))):
        region = replace(layer, written=frozenset(written))
        assert chosen(region, on_device=LAYERS * GIB, on_host=0).places.kept == {LOOPS: kept}


def test_a_program_that_does_not_fit_fits_by_what_goes_to_the_host():
    found = chosen(row(GIB, residuals=[GIB]), on_device=-GIB)
    assert found.places == Places(offloaded={LOOPS: (f"{INPUT} 0",)})
    assert found.device_bytes == -(LAYERS - 3) * GIB


@pytest.mark.parametrize(
    "nowhere",
    [
        row(GIB),
        row(GIB, residuals=[MIB // 2]),
        replace(row(GIB, residuals=[GIB], loops=("", "")), stays=frozenset([f"{INPUT} 0"])),
    ],
    ids=["nothing stays anyway", "little does", "what does is read at once"],
)
def test_without_anything_to_move_there_is_no_way(nowhere):
    assert choose([nowhere], (), PHASES, -1.0 * MIB, PLENTY) is None


def test_where_no_loop_runs_layers_passes_wait_for_copies_that_take_longer():
    nowhere = replace(row(residuals=[GIB], loops=("", "")), passes_s=(0.001, 0.1))
    found = chosen(nowhere, on_device=-GIB)
    assert found.places == Places(offloaded={("", ""): (f"{INPUT} 0",)})
    copied_s = GIB / (0.95 * PHASES.to_host_bytes_per_s)
    assert found.gained_s == pytest.approx(-(copied_s - 0.001))


def test_without_memory_of_the_host_nothing_goes_there():
    assert choose([row(GIB, residuals=[GIB])], (), PHASES, -1.0 * GIB, 0) is None
    assert chosen(row(GIB, residuals=[GIB]), on_device=3 * GIB, on_host=0).places == Places()


def test_what_is_small_is_not_copied():
    assert chosen(row(MIB - 1), on_device=3 * MIB).places == Places()
    assert chosen(row(MIB), on_device=3 * MIB).places.offloaded == {LOOPS: ("value 0",)}


def test_what_the_host_does_not_hold_is_computed_again():
    assert chosen(row(GIB), on_device=3 * GIB, on_host=LAYERS * GIB - MIB).places == Places()


@pytest.mark.parametrize("rate", ["to_host_bytes_per_s", "from_host_bytes_per_s"])
def test_copies_that_take_longer_than_what_they_spare_are_not_made(rate):
    slow = replace(PHASES, **{rate: LAYERS * GIB / 10})
    assert chosen(row(GIB), on_device=3 * GIB, phases=slow).places == Places()


def test_what_there_is_no_compute_to_copy_beside_is_computed_again():
    """Two values of 0.28 s or 0.14 s each, forward loops of 0.3 s."""
    regions = [row(GIB, loops=(f"{name} @forward", f"{name} @backward")) for name in "ab"]
    for taken_s, at_hand in ((0.14, 2), (0.28, 1)):
        phases = replace(PHASES, to_host_bytes_per_s=LAYERS * GIB / taken_s, from_host_bytes_per_s=math.inf)
        found = chosen(*regions, on_device=6 * GIB, phases=phases)
        assert sum(map(len, found.places.kept.values())) == at_hand


def test_where_backward_waits_for_the_network_nothing_is_gained():
    waiting = replace(PHASES, network_s=1.0)
    assert chosen(row(GIB), phases=waiting).places == Places()


def test_chosen_again_it_gains_nothing():
    one = row(GIB, GIB, residuals=[GIB], copy_s=1e-4)
    first = chosen(one, on_device=2 * GIB)
    assert first.gained_s > 0
    spared = replace(PHASES, backward_s=PHASES.backward_s - LAYERS * 0.02)
    again = choose([one], (), spared, 2 * GIB, PLENTY, first.places)
    assert again is not None
    assert again.places == first.places
    assert again.gained_s == pytest.approx(0.0, abs=1e-9)


def test_where_no_loop_reduces_forward_is_a_third_of_what_is_not_computed_again():
    """As on one device."""
    forward = Totals(compute_s=1.0, kernels_s={Part.PRODUCTS: 1.0})
    backward = Totals(compute_s=3.0, kernels_s={Part.PRODUCTS: 2.0, Part.AGAIN: 1.0})
    loops = [Loop(name, "", 1, True, each.compute_s, each) for name, each in (("f", forward), ("b", backward))]
    best: Any = SimpleNamespace(simulation=SimpleNamespace(loops=loops))
    phases = Phases.of(best, CostModel())
    assert (phases.forward_s, phases.backward_s) == pytest.approx((1.0, 3.0))
