"""A plan: decisions in the order they are carried out, XLA options and latencies, and how it came about.

Plans are JSON, compare and print readably, can be edited by hand and given back to ``shard(plan=...)``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jax_deepcompile import errors
from jax_deepcompile.costs import frozen_json
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import Options
from jax_deepcompile.lowering.latencies import Latency, latency_options
from jax_deepcompile.lowering.xla_options import known, objection_to
from jax_deepcompile.summary import Branch, Summarized, Summary, Text, cut, size_text
from jax_deepcompile.transforms import TRANSFORMS, carry_out, in_order
from jax_deepcompile.transforms.decision import Decision, nearest

FORMAT = 13
"""Of the JSON; a plan of another format is replanned."""

D = TypeVar("D", bound=Decision)

Rows = tuple[tuple[str, str], ...]


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
      copy_s: seconds that copies between device and host take, hidden or not.
      exposed_copy_s: seconds spent waiting for them.
      host_bytes: of the host's memory, for each device.
      rematerialized_s: of ``compute_s``, what XLA's own rematerialisation pass added; see ``Simulation``.
    """

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    peak_bytes: int
    bound_s: float = 0.0
    launches: tuple[tuple[str, int], ...] = ()
    rematerialized_s: float = 0.0
    copy_s: float = 0.0
    exposed_copy_s: float = 0.0
    host_bytes: int = 0

    def rows(self, limit_bytes: int | None = None) -> Rows:
        """For a summary."""
        limit = "" if limit_bytes is None else f" of {size_text(limit_bytes)}"
        peak = f"{size_text(self.peak_bytes)} a device{limit}"
        host = f"{size_text(self.host_bytes)} a device; copies {self.copy_s:.3g} s, {self.exposed_copy_s:.3g} s exposed"
        on_host = (("host memory", host),) if self.host_bytes else ()
        return (("expected step", f"{self.step_s:.4g} s, simulated"), ("peak memory", peak), *on_host)


@dataclass(frozen=True, repr=False)
class Record:
    """What became of one strategy's proposal.

    Attributes:
      strategy: its name.
      decision: in words.
      before, after: the program without and with it; ``after`` is None where it could not be compiled.
      accepted: whether it is part of the plan.
      reason: why, or why not.
      wall_s: seconds deciding, rewriting, compiling and simulating took.
      brought: lines of the plan with it that the one without it has not.
    """

    strategy: str
    decision: str
    before: Prediction
    after: Prediction | None
    accepted: bool
    reason: str
    wall_s: float
    brought: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Record({self.strategy}, {_verdict(self)}: {self.decision}: {self.reason})"


def _verdict(record: Record) -> str:
    return "accepted" if record.accepted else "rejected"


@dataclass(frozen=True, repr=False)
class Plan(Summarized):
    """The decisions for one program on one mesh.

    >>> from jax_deepcompile.transforms.keep_gathered import KeptGathers
    >>> plan = Plan("", (KeptGathers("microbatches", ("head/kernel @forward",)),))
    >>> print(plan)
    microbatches: gathers head/kernel @forward once
    >>> Plan.from_json(plan.to_json()) == plan
    True
    >>> print(plan.diff(Plan("")))
    - microbatches: gathers head/kernel @forward once

    Attributes:
      fingerprint: of the program, the mesh, the device kind and the versions it was made for; empty where nothing was
        there to decide.
      decisions: in the order they are carried out.
      options: XLA options, by name; those of ``lowering.xla_options`` only.
      latencies: of instructions, for XLA's scheduler; empty for its own estimates.
      prediction: for the planned program; None for a plan written by hand.
      records: what was proposed on the way.
      where: what errors call it.
    """

    fingerprint: str
    decisions: tuple[Decision, ...] = ()
    options: tuple[tuple[str, bool | int | str], ...] = ()
    latencies: tuple[Latency, ...] = ()
    prediction: Prediction | None = None
    records: tuple[Record, ...] = ()
    where: str = field(default="the plan", compare=False)

    def __post_init__(self) -> None:
        for name, value in self.options:
            if why := objection_to(name, value):
                raise errors.PlanError("the plan", why)
        kinds = in_order(map(type, self.decisions))
        object.__setattr__(self, "decisions", tuple(sorted(self.decisions, key=lambda each: kinds.index(type(each)))))

    def of(self, kind: type[D]) -> tuple[D, ...]:
        """The decisions of one kind."""
        return tuple(each for each in self.decisions if type(each) is kind)

    def having(self, kind: type[D], decisions: Iterable[D]) -> Plan:
        """A copy with ``decisions`` as all of this kind.

        Where that changes anything, decisions that are made after this kind are dropped: what they name may be gone.
        """
        decisions = tuple(decisions)
        if decisions == self.of(kind):
            return self
        others = [each for each in self.decisions if type(each) is not kind and kind.kind not in each.follows]
        return self.replace(decisions=(*others, *decisions))

    def without(self, *kinds: type[Decision]) -> Plan:
        """A copy with no decision of these kinds, nor any that was made after one of them."""
        plan = self
        for kind in kinds:
            plan = plan.having(kind, ())
        return plan

    def replace(self, **changes) -> Plan:
        """A copy with some attributes changed, whose prediction nobody knows; ``options`` may be given as a mapping."""
        if not changes.keys() <= {"fingerprint", "prediction", "records"}:
            changes.setdefault("prediction", None)
        if isinstance(changes.get("options"), Mapping):
            changes["options"] = tuple(sorted(changes["options"].items()))
        return dataclasses.replace(self, **changes)

    def program(self, base: Program, mesh: AnyMesh, until: type[Decision] | None = None) -> Program:
        """``base``, fully sharded, as this plan makes it; with ``until``, as its decisions up to that kind do.

        Raises:
          PlanError: a decision speaks of what ``base`` does not have.
        """
        try:
            return carry_out(base, mesh, self.decisions, until)
        except errors.PlanError as error:
            raise errors.PlanError(self.where, error.why) from error

    def compiler_options(self) -> Options:
        """All options for XLA, as far as the installed one knows them."""
        return known(dict(self.options)) | latency_options(self.latencies)

    def to_json(self) -> str:
        data: dict[str, Any] = {"format": FORMAT} | dataclasses.asdict(self)
        kinds = [{"kind": each.kind} for each in self.decisions]
        del data["where"]
        data["decisions"] = [kind | fields for kind, fields in zip(kinds, data["decisions"], strict=True)]
        data["digest"] = _digest(data)
        return json.dumps(data, allow_nan=False, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "the plan", decisions: Sequence[type[Decision]] = TRANSFORMS) -> Plan:
        """Reads what ``to_json`` wrote, or ``deepcompile plan --json``.

        What was edited has no prediction and no records: they are another plan's.

        Raises:
          PlanError: ``text`` is not a plan, or one of another format, or sets what plans may not.
        """
        try:
            data = frozen_json.document_in(frozen_json.parse(text), "plan")
            if not isinstance(data, dict) or not {"format", "options"} <= data.keys():
                raise ValueError("it is no plan as `deepcompile plan --out FILE` writes it")
            if data["format"] != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            digest = _digest(data)
            found = _read_decisions(data.pop("decisions", None), {each.kind: each for each in decisions})
            rest = frozen_json.read(_Document, data)
            history = {"prediction": rest.prediction, "records": rest.records} if rest.digest == digest else {}
            return cls(rest.fingerprint, found, rest.options, rest.latencies, **history, where=where)
        except errors.PlanError as error:
            raise errors.PlanError(where, error.why) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise errors.PlanError(where, f"it cannot be read ({error})") from error

    def diff(self, other: Plan) -> str:
        """The decisions that differ, one a line."""
        mine, theirs = self.lines(), other.lines()
        lines = [f"- {line}" for line in mine if line not in theirs] + [
            f"+ {line}" for line in theirs if line not in mine
        ]
        return Text("\n".join(lines))

    def _summary(self) -> Summary:
        told = tuple(Branch(each.describe()) for each in self.decisions)
        became = tuple(Branch(each.strategy, (_verdict(each), each.decision, each.reason)) for each in self.records)
        trees = Branch("decisions", (f"{len(told)}",), told), Branch("candidates", (f"{len(became)}",), became)
        return Summary("Plan", (*self.rows(), *self.expected_rows()), tuple(tree for tree in trees if tree.parts))

    def rows(self) -> Rows:
        """Decisions, the first of many, and what they came of."""
        decisions = [each.describe() for each in self.decisions]
        accepted = sum(record.accepted for record in self.records)
        evaluated = f"{len(self.records)} evaluated, {accepted} accepted; plan.records has them" if self.records else ""
        given = [f"{len(self.options)} options"] * bool(self.options)
        given += [f"{len(self.latencies)} latencies to schedule by"] * bool(self.latencies)
        return (
            ("decisions", "\n".join(cut(decisions)) or "fully sharded, nothing more"),
            ("given to XLA", ", ".join(given)),
            ("candidates", evaluated),
        )

    def expected_rows(self, limit_bytes: int | None = None) -> Rows:
        """What the planned step is expected to take."""
        return (("expected step", "not simulated"),) if self.prediction is None else self.prediction.rows(limit_bytes)

    @property
    def undecided_s(self) -> float | None:
        """What its records say that the step took before any change; None without records."""
        began = [record for record in self.records if record.accepted] or self.records
        return began[0].before.step_s if began else None

    def lines(self) -> list[str]:
        """The decisions, and what XLA is told, one a line."""
        lines = [each.describe() for each in self.decisions]
        lines += [f"option {name} = {value}" for name, value in self.options]
        return lines + ["scheduled by latencies of the cost model"] * bool(self.latencies)

    def __str__(self) -> str:
        return "\n".join(self.lines()) or "fully sharded, nothing more"


@dataclass(frozen=True)
class _Document:
    """All of a plan's JSON but its decisions.

    Attributes:
      digest: of all that the prediction is of, as it was written.
    """

    format: int
    digest: str
    fingerprint: str
    options: tuple[tuple[str, bool | int | str], ...]
    latencies: tuple[Latency, ...]
    prediction: Prediction | None
    records: tuple[Record, ...]


def _digest(data: Mapping[str, Any]) -> str:
    decided = [data.get(name) for name in ("decisions", "options", "latencies")]
    return hashlib.sha256(json.dumps(decided).encode()).hexdigest()


def _read_decisions(data: Any, kinds: Mapping[str, type[Decision]]) -> tuple[Decision, ...]:
    if not isinstance(data, list):
        raise ValueError("decisions: expected a list")
    found = []
    for place, each in enumerate(data):
        kind = each.pop("kind", None) if isinstance(each, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise ValueError(f"decisions[{place}].kind: {kind!r:.40} is none{nearest(str(kind)[:40], kinds)}")
        try:
            found.append(frozen_json.read(kinds[kind], _defaults(kinds[kind]) | each))
        except ValueError as error:
            raise ValueError(f"decisions[{place}] ({kind}): {error}") from error
    return tuple(found)


def _defaults(kind: type[Decision]) -> dict[str, Any]:
    """What a decision may leave out in JSON."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    return json.loads(
        json.dumps({each.name: each.default for each in fields if each.default is not dataclasses.MISSING})
    )
