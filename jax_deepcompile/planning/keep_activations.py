"""Which activations are kept for the backward pass: those that take longest to compute again for their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_deepcompile.costs.simulation import Totals
from jax_deepcompile.ir.program import Program
from jax_deepcompile.passes.keep_activations import KeptActivations
from jax_deepcompile.planning.apply import apply_gathers
from jax_deepcompile.planning.pass_manager import WORTH_TRYING, Environment, Proposal, Trial
from jax_deepcompile.planning.stacks import Stack, handing_over, turning_stacks
from jax_deepcompile.planning.turns import Turn, find_turns
from jax_deepcompile.planning.unshard import every_layer, keep_over_loops, layer_stacks


@dataclass(frozen=True)
class KeepActivations:
    """What a checkpointed layer computes again stays from the forward pass, as far as memory holds it and time gains.

    Once backward waits for the network, computing less does not make it faster: then parameters stay gathered, until it
    waits for compute again, and so on until memory is full.
    """

    name: str = "keep_activations"

    def propose(self, base: Program, now: Trial, environment: Environment) -> Iterator[Proposal]:
        if environment.limit_bytes is None:
            return
        free_bytes = environment.limit_bytes - now.prediction.peak_bytes
        gathers = apply_gathers(base, environment.mesh, now.plan)
        turns = find_turns(gathers, environment.costs)
        stacks = turning_stacks(base, environment, now.plan, layer_stacks(gathers, now.plan)) if turns else []
        already = {(each.forward, each.backward): each.values for each in now.plan.activations}
        proposal = None
        for share in _SHARES:
            choice = choose(turns, stacks, already, share * free_bytes, Backward.of(now))
            plan = now.plan.replace(activations=kept(choice.activations))
            if choice.saved_s < WORTH_TRYING * now.prediction.step_s:
                continue
            if choice.stacks:
                plan = plan.replace(handed_over=handing_over(choice.stacks))
            if plan.kept:
                plan = keep_over_loops(base, plan, environment)
            if proposal is None or plan != proposal.plan:
                proposal = Proposal(plan, _decision(choice, turns), otherwise=proposal)
        if proposal is not None:
            yield proposal


def _decision(choice: Choice, turns: Sequence[Turn]) -> str:
    size = sum(turn.kept_bytes(choice.activations.get(turn.loops, ())) for turn in turns)
    count = sum(map(len, choice.activations.values()))
    decision = f"{count} activations of every layer are kept, {size / 2**30:.2f} GiB"
    return f"{decision}; {every_layer(choice.stacks)}" if choice.stacks else decision


_SHARES = (0.6, 0.8, 0.92)
"""Of the memory that is left: the most is tried first, less if that does not fit. The rest is for schedules that hide
more and hold more meanwhile."""


Kept = dict[tuple[str, str], tuple[int, ...]]
"""For the names of two loops the positions of the activations that the first leaves for the second."""


def kept(chosen: Kept) -> tuple[KeptActivations, ...]:
    """``chosen`` as a plan has it."""
    return tuple(KeptActivations(*loops, positions) for loops, positions in chosen.items())


@dataclass(frozen=True)
class Backward:
    """What the loops that reduce gradients take in a step.

    Attributes:
      compute_s: of kernels; infinite where no loop reduces any, and nothing but compute counts.
      network_s: of collectives.
      bytes_per_s: gathered and reduced.
    """

    compute_s: float
    network_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, now: Trial) -> Backward:
        loops = [loop for loop in now.simulation.loops if loop.is_innermost and loop.trip.reduced_bytes]
        trips = Totals()
        for loop in loops:
            trips = trips.plus(loop.trip, loop.executions * loop.trip_count)
        moved = trips.gathered_bytes + trips.reduced_bytes
        return cls(
            trips.compute_s if loops else math.inf, trips.communication_s, moved / max(trips.communication_s, 1e-12)
        )


@dataclass(frozen=True)
class Choice:
    """What is kept for backward loops.

    Attributes:
      activations: not computed again.
      stacks: parameters that are not gathered again.
      saved_s: computed less.
    """

    activations: Kept
    stacks: tuple[Stack, ...]
    saved_s: float


def choose(
    turns: Sequence[Turn], stacks: Sequence[Stack], already: Kept, free_bytes: float, backward: Backward
) -> Choice:
    """What is kept: one after the other what saves most for its bytes of what backward waits for.

    Args:
      turns: where activations are computed again.
      stacks: of parameters that are gathered again.
      already: activations that are kept now.
      free_bytes: for what is kept besides.
      backward: what it takes now.
    """
    chosen = {turn.loops: tuple(already.get(turn.loops, ())) for turn in turns}
    left, gathered = list(stacks), list[Stack]()
    compute_s, network_s, saved_s = backward.compute_s, backward.network_s, 0.0
    while True:
        if compute_s < network_s:
            fitting = [stack for stack in left if stack.size_bytes <= free_bytes]
            if not fitting:
                break
            largest = max(fitting, key=lambda stack: stack.size_bytes)
            left.remove(largest)
            gathered.append(largest)
            free_bytes -= largest.size_bytes
            network_s -= largest.size_bytes / backward.bytes_per_s
            continue
        more = [each for turn in turns for each in _more(turn, chosen[turn.loops], free_bytes)]
        if not more:
            break
        best = max(more, key=lambda each: each.worth)
        loops = best.turn.loops
        chosen[loops] = tuple(sorted({*chosen[loops], best.position}))
        free_bytes -= best.turn.kept_bytes([best.position])
        compute_s, saved_s = compute_s - best.saved_s, saved_s + best.saved_s
    return Choice({loops: positions for loops, positions in chosen.items() if positions}, tuple(gathered), saved_s)


@dataclass(frozen=True)
class _More:
    """One more activation to keep.

    Attributes:
      turn: where.
      position: among its activations.
      saved_s: in a step.
    """

    turn: Turn
    position: int
    saved_s: float

    @property
    def worth(self) -> float:
        """Seconds saved for every byte."""
        return self.saved_s / self.turn.kept_bytes([self.position])


def _more(turn: Turn, chosen: Sequence[int], free_bytes: float) -> Iterator[_More]:
    now_s = turn.step_s(chosen)
    for position, activation in enumerate(turn.activations):
        saved_s = now_s - turn.step_s([*chosen, position])
        handing_s = turn.layers * turn.times * turn.copy_s(activation.size_bytes)
        fits = turn.kept_bytes([position]) <= free_bytes
        if position not in chosen and fits and saved_s > handing_s:
            yield _More(turn, position, saved_s)
