"""A plan's decisions carried out on a program."""

from __future__ import annotations

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import closed_consts, open_jaxpr
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.passes.accumulate_in_loops import accumulate_in_loops
from jax_deepcompile.passes.compute_once import compute_once
from jax_deepcompile.passes.gather_after_loops import gather_after_loops
from jax_deepcompile.passes.hand_over import hand_over
from jax_deepcompile.passes.keep_activations import keep_activations
from jax_deepcompile.passes.narrow_stacks import narrow_stacks
from jax_deepcompile.passes.overlap_microbatches import overlapped
from jax_deepcompile.passes.pipeline_loops import pipeline_loops
from jax_deepcompile.passes.prefetch import parameter_gathers, prefetch
from jax_deepcompile.passes.reduce_before_loops import reduce_before_loops
from jax_deepcompile.passes.reduce_in_order import reduce_in_order
from jax_deepcompile.passes.replace_loops import replace_loops
from jax_deepcompile.passes.stack_collectives import stack_collectives
from jax_deepcompile.passes.uncounted_loops import uncounted
from jax_deepcompile.passes.unshard import keep_over_microbatches, keep_until_backward, regathers
from jax_deepcompile.planning.plan import Plan


def apply_plan(program: Program, mesh: AnyMesh, plan: Plan) -> Program:
    """``program`` rewritten as ``plan`` says; the same object where it says nothing.

    Raises:
      PlanError: the plan speaks of a loop or a gather that ``program`` does not have.
    """
    planned = _around(apply_kept(program, mesh, plan), mesh, plan)
    if plan.unsharded:
        planned = _unshard(planned, plan)
    if plan.prefetches:
        planned = _prefetch(planned, plan)
    if plan.reduction_bucket_bytes:
        planned = reduce_in_order(planned, plan.reduction_bucket_bytes)
    if planned is not program:
        verify(planned)
    return planned


def apply_kept(program: Program, mesh: AnyMesh, plan: Plan) -> Program:
    """``program`` with what ``plan`` says of its layer loops, and of what loops around them keep gathered."""
    planned = apply_loops(program, mesh, plan)
    known = {loop.name for loop in find_loops(planned.jaxpr)}
    for kept in plan.kept:
        if kept.loop not in known:
            raise errors.PlanError("the plan", f"it keeps gathers over {kept.loop}, which the program does not have")
    planned = keep_over_microbatches(planned, mesh, {kept.loop: kept.gathers for kept in plan.kept})
    return gather_after_loops(planned) if plan.loops else planned


def apply_loops(program: Program, mesh: AnyMesh, plan: Plan) -> Program:
    """``program`` with what ``plan`` says of its layer loops alone: what they read and leave, and how they run."""
    known = {loop.name for loop in find_loops(program.jaxpr)}
    named = [choice.loop for choice in (*plan.stacks, *plan.loops)]
    named += [name for each in (*plan.handed_over, *plan.activations) for name in (each.forward, each.backward)]
    for name in named:
        if name and name not in known:
            raise errors.PlanError("the plan", f"it speaks of {name}, which the program does not have")
    kept = keep_activations(apply_gathers(program, mesh, plan), mesh, plan.activations)
    if not plan.loops:
        return kept
    narrowed = narrow_stacks(accumulate_in_loops(kept, mesh), mesh)
    pipelined = pipeline_loops(narrowed, mesh, plan.loops)
    return reduce_before_loops(compute_once(pipelined))


def apply_gathers(program: Program, mesh: AnyMesh, plan: Plan) -> Program:
    """``program`` with what ``plan`` says of the collectives that its layer loops share or leave to whole stacks."""
    return hand_over(stack_collectives(program, mesh, plan.stacks), mesh, plan.handed_over)


def _around(program: Program, mesh: AnyMesh, plan: Plan) -> Program:
    """``program`` with the loops around the pipelined ones as they should run."""
    around = loops_around(plan)
    for name in plan.overlapped:
        if name not in around:
            raise errors.PlanError("the plan", f"it overlaps the iterations of {name}, which has no pipelined loops")
    return replace_loops(program, mesh, {name: overlapped if name in plan.overlapped else uncounted for name in around})


def loops_around(plan: Plan) -> set[str]:
    """The names of the loops around those that ``plan`` pipelines."""
    pipelined = [schedule.loop.split("/") for schedule in plan.loops]
    return {"/".join(parts[:depth]) for parts in pipelined for depth in range(1, len(parts))}


def _unshard(program: Program, plan: Plan) -> Program:
    jaxpr = open_jaxpr(program.jaxpr)
    pairs = regathers(jaxpr, jaxpr.invars)
    if max(plan.unsharded) >= len(pairs):
        raise errors.PlanError("the plan", f"it keeps repeated gather {max(plan.unsharded)} of {len(pairs)}")
    again = {pairs[position][1].position for position in plan.unsharded}
    kept = keep_until_backward(jaxpr, jaxpr.invars, again)
    return program.replace(jaxpr=type(program.jaxpr)(kept, closed_consts(program.jaxpr)))


def _prefetch(program: Program, plan: Plan) -> Program:
    gathers, equations = len(parameter_gathers(program)), len(open_jaxpr(program.jaxpr).eqns)
    last, latest = max(each.gather for each in plan.prefetches), max(each.after for each in plan.prefetches)
    if last >= gathers or latest >= equations:
        raise errors.PlanError(
            "the plan", f"it starts gather {last} of {gathers}, and one after equation {latest} of {equations}"
        )
    return prefetch(program, plan.prefetches)
