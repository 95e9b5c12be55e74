"""A plan from elsewhere looked at as one that is made here: compiled and simulated, after each kind of decision too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import isclose

from jax.sharding import Mesh

from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.emit import lower
from jax_deepcompile.planner.candidate import Candidate, Environment, compiled
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.search import sharing_kernels
from jax_deepcompile.planner.session import Planned, PlanOptions, environment_of, first_options
from jax_deepcompile.runtime.parallel import results_of
from jax_deepcompile.runtime.progress import Progress
from jax_deepcompile.transforms import carry_out, in_order


def examined(
    planned: Planned,
    base: Program,
    mesh: AnyMesh,
    platform: str,
    options: PlanOptions,
    in_steps: bool = False,
    assume: bool = False,
) -> Planned:
    """``planned`` with what compiler and simulator make of it.

    What a foreign plan says of how it came about is left out, unless it begins with what ``base`` takes here.

    Args:
      base: what its plan rewrites.
      in_steps: also of ``base``, and after each kind of decision that changes it, unless that is known.
      assume: also for a CPU of which nothing is measured.
    """
    is_known, are_steps_known = planned.evaluation is not None, bool(planned.way) or not in_steps
    is_checked = not planned.is_foreign or planned.before_s is not None
    is_assumed = platform == "cpu" and planned.plan.prediction is None and planned.profile is None
    if (is_assumed and not assume) or not isinstance(mesh, Mesh) or (is_known and are_steps_known and is_checked):
        return planned
    environment = environment_of(mesh, platform, replace(options, profile=planned.profile))
    undecided = planned.plan.replace(decisions=(), latencies=(), records=(), options=first_options(base, environment))
    steps = [("", base, undecided)] if not (are_steps_known and is_checked) else []
    steps += [] if are_steps_known else _in_steps(planned.plan, base, mesh)
    with Progress(f"compiling {base.name} by its plan"), sharing_kernels(environment) as shared:
        calls = [partial(_made, program, plan, shared) for _, program, plan in steps]
        made = (lambda: planned) if is_known else partial(_made, planned.program, planned.plan, shared)
        last, *others = results_of([made, *calls])
    costs = environment.costs.calibrated(last.simulation)
    if costs is not environment.costs:
        last, *others = (each.simulated_by(costs) for each in (last, *others))
    way = [(name, each.simulation) for (name, *_), each in zip(steps, others, strict=True)] if in_steps else []
    after = [("", last.simulation)] * in_steps
    plan = planned.plan.replace(prediction=last.prediction)
    before_s = others[0].prediction.step_s if others else planned.before_s
    if planned.is_foreign and plan.undecided_s is not None and not isclose(plan.undecided_s, before_s or 0.0):
        plan = plan.replace(records=())
    known = {"evaluation": last.evaluation, "way": planned.way or (*way, *after), "before_s": before_s}
    return replace(planned, plan=plan, **known)


def _in_steps(plan: Plan, base: Program, mesh: Mesh) -> Iterator[tuple[str, Program, Plan]]:
    """What ``base`` is after each kind of decision but the last that changes it, with the plan so far."""
    program, so_far = base, plan.replace(decisions=(), latencies=(), records=())
    kind = ""
    for each in in_order(map(type, plan.decisions)):
        after = carry_out(program, mesh, plan.of(each))
        if after is not program:
            if kind:
                yield kind, program, so_far
            program, kind = after, each.kind
        so_far = so_far.replace(decisions=(*so_far.decisions, *plan.of(each)))
    if kind:
        yield kind, program, so_far


def _made(program: Program, plan: Plan, environment: Environment) -> Candidate:
    return compiled(program, lower(program, environment.mesh, environment.platform), plan, environment)
