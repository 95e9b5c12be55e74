"""A plan: every decision of every pass, as plain data.

Plans are JSON, compare and print readably, can be edited by hand with ``plan.replace`` and given back to
``shard(plan=...)``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax_deepcompile import errors
from jax_deepcompile.costs import frozen_json
from jax_deepcompile.lowering.compile import Options
from jax_deepcompile.lowering.latencies import Latency, latency_options
from jax_deepcompile.lowering.xla_options import known, objection_to
from jax_deepcompile.planner.shown import expected_rows, plan_rows
from jax_deepcompile.summary import Summarized, Summary, Text
from jax_deepcompile.transforms.delay_reductions import DelayedReductions
from jax_deepcompile.transforms.hand_over import HandOver
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.prefetch import Prefetch
from jax_deepcompile.transforms.stack_collectives import StackCollectives

FORMAT = 8
"""Of the JSON; a plan of another format is replanned."""


@dataclass(frozen=True)
class KeptGathers:
    """What one loop gathers once, before it starts, instead of in every iteration.

    Attributes:
      loop: the loop's name.
      gathers: positions among the gathers in it that are the same every iteration.
    """

    loop: str
    gathers: tuple[int, ...]


@dataclass(frozen=True)
class Prediction:
    """What a compiled program is expected to take on one device.

    Attributes:
      step_s: simulated seconds a step.
      compute_s: of them, kernels.
      communication_s: seconds the network is busy.
      exposed_s: seconds spent waiting for the network.
      peak_bytes: XLA's figure: arguments and temporaries.
      bound_s: what no schedule of the same operations beats; see ``Simulation.bound_s``.
      launches: of collectives a step, by their names in HLO.
    """

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    peak_bytes: int
    bound_s: float = 0.0
    launches: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, repr=False)
class Record:
    """What became of one pass's proposal.

    Attributes:
      pass_name: the pass.
      decision: in words.
      before, after: the program without and with it; ``after`` is None where it could not be compiled.
      taken: whether it is part of the plan.
      reason: why, or why not.
      wall_s: seconds deciding, rewriting, compiling and simulating took.
    """

    pass_name: str
    decision: str
    before: Prediction
    after: Prediction | None
    taken: bool
    reason: str
    wall_s: float

    def __repr__(self) -> str:
        verdict = "accepted" if self.taken else "rejected"
        return f"Record({self.pass_name}, {verdict}: {self.decision}: {self.reason})"


_IN_LOOPS = frozenset({"stacks", "handed_over", "activations", "loops", "kept"})
_OF_LOOPS = _IN_LOOPS | {"delayed", "overlapped"}
_POSITIONS_AFTER = {"delayed": _IN_LOOPS, "unsharded": _OF_LOOPS, "prefetches": _OF_LOOPS | {"unsharded"}}


@dataclass(frozen=True, repr=False)
class Plan(Summarized):
    """The decisions for one program on one mesh.

    Attributes:
      fingerprint: of the program, the mesh, the device kind and the versions it was made for; empty where nothing was
        there to decide.
      stacks: what is gathered and reduced for all layers at once, outside of their loop.
      handed_over: what forward loops leave gathered for backward loops.
      activations: what is kept where it would be computed again: by backward loops, outside of loops, in an iteration.
      loops: how layer loops are pipelined.
      kept: what stays gathered over a loop.
      delayed: what loops reduce an iteration later.
      overlapped: loops over microbatches that run the next one's forward pass beside this one's backward pass.
      unsharded: positions, among the straight-line gathers that repeat an earlier one, of those that reuse it.
      prefetches: when straight-line gathers start, in the program that all of the above makes.
      reduction_bucket_bytes: so much of straight-line reductions follows one another in the order gradients are ready;
        0 where that is left to XLA.
      options: XLA options, by name; those of ``lowering.xla_options`` only.
      latencies: what XLA's scheduler is told that instructions take; empty for its own estimates.
      prediction: for the planned program; None for a plan written by hand.
      records: what was proposed on the way.
    """

    fingerprint: str
    stacks: tuple[StackCollectives, ...] = ()
    handed_over: tuple[HandOver, ...] = ()
    activations: tuple[KeptActivations, ...] = ()
    loops: tuple[LoopSchedule, ...] = ()
    kept: tuple[KeptGathers, ...] = ()
    delayed: tuple[DelayedReductions, ...] = ()
    overlapped: tuple[str, ...] = ()
    unsharded: tuple[int, ...] = ()
    prefetches: tuple[Prefetch, ...] = ()
    reduction_bucket_bytes: int = 0
    options: tuple[tuple[str, bool | int | str], ...] = ()
    latencies: tuple[Latency, ...] = ()
    prediction: Prediction | None = None
    records: tuple[Record, ...] = ()

    def __post_init__(self) -> None:
        for name, value in self.options:
            if why := objection_to(name, value):
                raise errors.PlanError("the plan", why)

    def replace(self, **changes) -> Plan:
        """A copy with some decisions changed, whose prediction nobody knows; ``options`` may be given as a mapping.

        ``delayed``, ``unsharded`` and ``prefetches`` are positions in the program that the decisions before them make:
        where one of those changes they are dropped, unless they are given too.
        """
        for positions, before in _POSITIONS_AFTER.items():
            if any(changes.get(name, getattr(self, name)) != getattr(self, name) for name in before):
                changes.setdefault(positions, ())
        if not changes.keys() <= {"fingerprint", "prediction", "records"}:
            changes.setdefault("prediction", None)
        if isinstance(changes.get("options"), Mapping):
            changes["options"] = tuple(sorted(changes["options"].items()))
        return dataclasses.replace(self, **changes)

    def compiler_options(self) -> Options:
        """All that XLA is told, as far as the installed one knows it."""
        return known(dict(self.options)) | latency_options(self.latencies)

    def to_json(self) -> str:
        return frozen_json.dump(_Document(FORMAT, self))

    @classmethod
    def from_json(cls, text: str, where: str = "the plan") -> Plan:
        """Reads what ``to_json`` wrote.

        Raises:
          PlanError: ``text`` is not a plan, or one of another format, or sets what plans may not.
        """
        try:
            data = frozen_json.parse(text)
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            return frozen_json.read(_Document, data).plan
        except errors.PlanError as error:
            raise errors.PlanError(where, error.why) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise errors.PlanError(where, f"it cannot be read ({error})") from error

    def diff(self, other: Plan) -> str:
        """The decisions that differ, one a line."""
        mine, theirs = _decisions(self), _decisions(other)
        lines = [f"- {line}" for line in mine if line not in theirs] + [
            f"+ {line}" for line in theirs if line not in mine
        ]
        return Text("\n".join(lines))

    def _summary(self) -> Summary:
        return Summary("Plan", (*plan_rows(self), *expected_rows(self.prediction)))

    def __str__(self) -> str:
        return "\n".join(_decisions(self)) or "fully sharded, nothing more"


def _decisions(plan: Plan) -> list[str]:
    lines = [f"loop {stack.loop}: {_outside(stack)} outside, for all layers" for stack in plan.stacks]
    lines += [
        f"loops {each.forward} and {each.backward}: {', '.join(map(str, each.shared))} gathered by the first only"
        for each in plan.handed_over
    ]
    lines += [f"{_where(each)}: activations {_ranges(each.values)} computed once" for each in plan.activations]
    lines += [
        f"loop {loop.loop}: gathers {loop.prefetch_layers} layer ahead, reduces {loop.delay_layers} behind, "
        f"first {loop.first_layers} and last {loop.last_layers} layers apart"
        for loop in plan.loops
    ]
    lines += [f"loop {kept.loop}: gathers {_ranges(kept.gathers)} once" for kept in plan.kept]
    lines += [f"loop {each.loop}: {_delayed(each)}" for each in plan.delayed]
    lines += [f"loop {loop}: forward of the next microbatch beside backward" for loop in plan.overlapped]
    if plan.unsharded:
        lines.append(f"repeated gathers {_ranges(plan.unsharded)}: reuse the first")
    lines += [f"gather {early.gather}: starts after equation {early.after}" for early in plan.prefetches]
    if plan.reduction_bucket_bytes:
        lines.append(f"reductions follow one another, {plan.reduction_bucket_bytes / 2**20:.0f} MiB at a time")
    lines += [f"option {name} = {value}" for name, value in plan.options]
    return lines + [f"schedule by {len(plan.latencies)} latencies of the cost model"] * bool(plan.latencies)


def _where(kept: KeptActivations) -> str:
    if kept.forward != kept.backward:
        return f"loops {kept.forward} and {kept.backward}"
    return f"loop {kept.forward}" if kept.forward else "outside of loops"


def _delayed(choice: DelayedReductions) -> str:
    sums = [f"sums {_ranges(choice.sums)} reduced in the next iteration"] * bool(choice.sums)
    return ", ".join([*sums, *["first iteration apart"] * choice.first_apart])


def _ranges(positions: Sequence[int]) -> str:
    """Positions in order, such as ``0 to 3, 7``."""
    runs: list[list[int]] = []
    for position in sorted(positions):
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _outside(stack: StackCollectives) -> str:
    parts = (("gathers", stack.gathers), ("reductions", stack.reductions))
    return " and ".join(f"{name} {', '.join(map(str, positions))}" for name, positions in parts if positions)


@dataclass(frozen=True)
class _Document:
    format: int
    plan: Plan
