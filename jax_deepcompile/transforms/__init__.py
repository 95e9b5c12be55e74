"""Rewrites of fully sharded programs, one schedule primitive a file; here is the order they are carried out in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jax_deepcompile.analysis.names import keeping_loop_names
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program, View
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.transforms.accumulate_in_loops import AccumulateInLoops
from jax_deepcompile.transforms.compute_once import ComputeOnce
from jax_deepcompile.transforms.compute_whole import ComputedWhole
from jax_deepcompile.transforms.decision import Decision, refused
from jax_deepcompile.transforms.delay_reductions import DelayedReductions
from jax_deepcompile.transforms.gradients_in_turn import GradientsInTurn
from jax_deepcompile.transforms.join_collectives import JoinedCollectives
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from jax_deepcompile.transforms.keep_on_device import KeptOnDevice
from jax_deepcompile.transforms.microbatch_loops import MicrobatchLoop
from jax_deepcompile.transforms.narrow_stacks import NarrowStacks
from jax_deepcompile.transforms.offload_activations import OffloadedActivations
from jax_deepcompile.transforms.offload_parameters import OffloadedParameters
from jax_deepcompile.transforms.offload_state import OffloadedState
from jax_deepcompile.transforms.offload_values import OffloadedValues
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.prefetch import Prefetch
from jax_deepcompile.transforms.products_after_loops import ProductsAfterLoop
from jax_deepcompile.transforms.reduce_in_order import OrderedReductions
from jax_deepcompile.transforms.rematerialize import Rematerialized
from jax_deepcompile.transforms.rematerialize_segments import RematerializedSegments
from jax_deepcompile.transforms.save_gathered import SavedGathers
from jax_deepcompile.transforms.stack_collectives import StackCollectives
from jax_deepcompile.transforms.unshard import ReusedGathers
from jax_deepcompile.transforms.update_in_loops import UpdatedInLoop
from jax_deepcompile.transforms.wait_at_loops import GatherAfterLoops, ReduceBeforeLoops

TRANSFORMS: tuple[type[Decision], ...] = (
    KeptOnDevice,
    ProductsAfterLoop,
    Rematerialized,
    RematerializedSegments,
    StackCollectives,
    SavedGathers,
    KeptActivations,
    OffloadedActivations,
    OffloadedValues,
    GradientsInTurn,
    AccumulateInLoops,
    UpdatedInLoop,
    NarrowStacks,
    OffloadedParameters,
    LoopSchedule,
    ComputeOnce,
    ReduceBeforeLoops,
    KeptGathers,
    GatherAfterLoops,
    DelayedReductions,
    MicrobatchLoop,
    ReusedGathers,
    Prefetch,
    OrderedReductions,
    ComputedWhole,
    JoinedCollectives,
    OffloadedState,
)
"""The list: what layer loops gather, what they keep, how they run, what surrounds them, then code outside of loops."""


def in_order(kinds: Iterable[type[Decision]]) -> list[type[Decision]]:
    """``kinds``, each once, as they are carried out; those that are not listed right after what they come after."""
    names = [each.kind for each in TRANSFORMS]

    def place(kind: type[Decision]) -> tuple[float, str]:
        if kind in TRANSFORMS:
            return names.index(kind.kind), ""
        return max((names.index(each) for each in kind.follows if each in names), default=len(names)) + 0.5, kind.kind

    return sorted(dict.fromkeys(kinds), key=place)


def carry_out(
    program: Program, mesh: AnyMesh, decisions: Sequence[Decision], until: type[Decision] | None = None
) -> Program:
    """``program``, fully sharded, rewritten by ``decisions``, kind by kind up to ``until``; itself if none changes it.

    Raises:
      PlanError: a decision speaks of what ``program`` does not have.
      InvariantError: a transform made no program.
    """
    if program.view is not View.LOCAL:
        raise refused(f"it is carried out on the {program.view} view of {program.name}, which has no collectives")
    kinds = in_order([type(each) for each in decisions] + ([until] if until else []))
    for kind in kinds[: kinds.index(until) + 1] if until else kinds:
        mine = [each for each in decisions if type(each) is kind]
        _refuse_twice(mine)
        for each in mine:
            each.check(program)
        after = kind.apply(program, mesh, mine) if mine else program
        if after is not program:
            verify(after, kind.kind)
            after = keeping_loop_names(after, program) if after.loop_names is program.loop_names else after
        program = after
    return program


def _refuse_twice(decisions: Sequence[Decision]) -> None:
    seen: set[str] = set()
    for each in decisions:
        for subject in each.subjects():
            if subject in seen:
                what = repr(subject) if subject else "code outside of loops"
                raise refused(f"it says what becomes of {what} twice ({each.kind})")
            seen.add(subject)
