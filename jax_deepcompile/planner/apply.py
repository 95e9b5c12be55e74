"""A plan's decisions carried out on a program: one pass after the other, its contract before it, the verifier after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jax_deepcompile._jax_compat import closed_consts, open_jaxpr
from jax_deepcompile.errors import InvariantError
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.planner import contracts
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.transforms.accumulate_in_loops import accumulate_in_loops
from jax_deepcompile.transforms.compute_once import compute_once
from jax_deepcompile.transforms.delay_reductions import delay_reductions
from jax_deepcompile.transforms.gather_after_loops import gather_after_loops
from jax_deepcompile.transforms.hand_over import hand_over
from jax_deepcompile.transforms.keep_activations import keep_activations
from jax_deepcompile.transforms.narrow_stacks import narrow_stacks
from jax_deepcompile.transforms.overlap_microbatches import overlapped
from jax_deepcompile.transforms.pipeline_loops import pipeline_loops
from jax_deepcompile.transforms.prefetch import prefetch
from jax_deepcompile.transforms.reduce_before_loops import reduce_before_loops
from jax_deepcompile.transforms.reduce_in_order import reduce_in_order
from jax_deepcompile.transforms.replace_loops import replace_loops
from jax_deepcompile.transforms.stack_collectives import stack_collectives
from jax_deepcompile.transforms.uncounted_loops import uncounted
from jax_deepcompile.transforms.unshard import keep_over_microbatches, keep_until_backward, regathers


@dataclass(frozen=True)
class Rewrite:
    """A pass as plans ask for it.

    Attributes:
      name: the pass.
      run: a program rewritten as a plan says; the same object where it says nothing.
      contract: raises ``PlanError`` where a program is not what the plan's decisions are for.
    """

    name: str
    run: Callable[[Program, AnyMesh, Plan], Program]
    contract: Callable[[Program, Plan], None] = contracts.is_local


def apply_plan(program: Program, mesh: AnyMesh, plan: Plan) -> Program:
    """``program`` rewritten as ``plan`` says; the same object where it says nothing.

    Raises:
      PlanError: the plan speaks of a loop or a gather that ``program`` does not have.
      InvariantError: a pass made no program.
    """
    return _rewritten(program, mesh, plan, (*_OF_GATHERS, *_OF_LOOPS, *_AROUND_LOOPS, *_OF_STRAIGHT_LINES))


def apply_kept(program: Program, mesh: AnyMesh, plan: Plan) -> Program:
    """``program`` with what ``plan`` says of its layer loops, and of what loops around them keep and delay."""
    return _rewritten(program, mesh, plan, (*_OF_GATHERS, *_OF_LOOPS, *_AROUND_LOOPS))


def apply_loops(program: Program, mesh: AnyMesh, plan: Plan) -> Program:
    """``program`` with what ``plan`` says of its layer loops alone: what they read and leave, and how they run."""
    return _rewritten(program, mesh, plan, (*_OF_GATHERS, *_OF_LOOPS))


def apply_gathers(program: Program, mesh: AnyMesh, plan: Plan) -> Program:
    """``program`` with what ``plan`` says of the collectives that its layer loops share or leave to whole stacks."""
    return _rewritten(program, mesh, plan, _OF_GATHERS)


def _rewritten(program: Program, mesh: AnyMesh, plan: Plan, rewrites: Sequence[Rewrite]) -> Program:
    contracts.is_local(program, plan)
    for rewrite in rewrites:
        rewrite.contract(program, plan)
        after = rewrite.run(program, mesh, plan)
        if after is not program:
            _verify(after, rewrite.name)
        program = after
    return program


def _verify(program: Program, made_by: str) -> None:
    try:
        verify(program)
    except InvariantError as error:
        raise error.after(made_by) from error


def _in_pipelined_loops(run: Callable[[Program, AnyMesh], Program]) -> Callable[[Program, AnyMesh, Plan], Program]:
    """``run`` where the plan pipelines loops."""
    return lambda program, mesh, plan: run(program, mesh) if plan.loops else program


def _keep(program: Program, mesh: AnyMesh, plan: Plan) -> Program:
    return keep_over_microbatches(program, mesh, {kept.loop: kept.gathers for kept in plan.kept})


def _overlap(program: Program, mesh: AnyMesh, plan: Plan) -> Program:
    """The loops around the pipelined ones as they should run."""
    around = contracts.loops_around(plan)
    return replace_loops(program, mesh, {name: overlapped if name in plan.overlapped else uncounted for name in around})


def _unshard(program: Program, mesh: AnyMesh, plan: Plan) -> Program:
    if not plan.unsharded:
        return program
    jaxpr = open_jaxpr(program.jaxpr)
    pairs = regathers(jaxpr, jaxpr.invars)
    kept = keep_until_backward(jaxpr, jaxpr.invars, {pairs[position][1].position for position in plan.unsharded})
    return program.replace(jaxpr=type(program.jaxpr)(kept, closed_consts(program.jaxpr)))


def _reduce_in_order(program: Program, mesh: AnyMesh, plan: Plan) -> Program:
    """Loops that are pipelined have an order of their own."""
    if not plan.reduction_bucket_bytes:
        return program
    return reduce_in_order(program, plan.reduction_bucket_bytes, in_loops=not plan.loops)


_OF_GATHERS = (
    Rewrite(
        "stack_collectives",
        lambda program, mesh, plan: stack_collectives(program, mesh, plan.stacks),
        contracts.stacks_are_there,
    ),
    Rewrite(
        "hand_over",
        lambda program, mesh, plan: hand_over(program, mesh, plan.handed_over),
        contracts.handed_over_are_shared,
    ),
)
_OF_LOOPS = (
    Rewrite(
        "keep_activations",
        lambda program, mesh, plan: keep_activations(program, mesh, plan.activations),
        contracts.activations_have_loops,
    ),
    Rewrite("accumulate_in_loops", _in_pipelined_loops(accumulate_in_loops)),
    Rewrite("narrow_stacks", _in_pipelined_loops(narrow_stacks)),
    Rewrite(
        "pipeline_loops",
        lambda program, mesh, plan: pipeline_loops(program, mesh, plan.loops),
        contracts.schedules_are_possible,
    ),
    Rewrite("compute_once", _in_pipelined_loops(lambda program, mesh: compute_once(program))),
    Rewrite("reduce_before_loops", _in_pipelined_loops(lambda program, mesh: reduce_before_loops(program))),
)
_AROUND_LOOPS = (
    Rewrite("keep_over_microbatches", _keep, contracts.kept_are_repeated),
    Rewrite("gather_after_loops", _in_pipelined_loops(lambda program, mesh: gather_after_loops(program))),
    Rewrite(
        "delay_reductions",
        lambda program, mesh, plan: delay_reductions(program, mesh, plan.delayed),
        contracts.delayed_are_added,
    ),
)
_OF_STRAIGHT_LINES = (
    Rewrite("overlap_microbatches", _overlap, contracts.overlapped_are_around),
    Rewrite("unshard", _unshard, contracts.unsharded_are_repeated),
    Rewrite(
        "prefetch",
        lambda program, mesh, plan: prefetch(program, plan.prefetches),
        contracts.prefetched_are_gathered,
    ),
    Rewrite("reduce_in_order", _reduce_in_order, contracts.buckets_have_bytes),
)
