"""What is in a device's memory where most of it is needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import variables
from jax_deepcompile.analysis.first_use import lines_of_first_use
from jax_deepcompile.analysis.gathers import derived
from jax_deepcompile.costs.held import Content, Holds, held_at_peak
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.program import Program, Role
from jax_deepcompile.ir.traversal import reached_from
from jax_deepcompile.planner.plan import Prediction
from jax_deepcompile.planner.session import Planned
from jax_deepcompile.report.origins import Origins
from jax_deepcompile.report.words import bytes_text, line_text, seconds_text, table

_MOST = 6
"""Blocks that are named."""

_ARGUMENTS = {
    Role.PARAM: "parameters",
    Role.OPTIMIZER: "optimizer state",
    Role.BATCH: "batch",
    Role.OTHER: "other arguments",
}
_LOGITS = "logits"
_RESULTS = "results with memory of their own"
_TEMPORARIES = "temporaries, of which nothing is known"
_GAPS = "gaps between blocks, and what XLA assigns otherwise"
_SHARED = "less what XLA assigns to several of these at once"


@dataclass(frozen=True)
class Size:
    """Bytes of all blocks of one role; ``line`` is the user's of those that take most, empty where they have none."""

    role: str
    bytes: int
    line: str = ""


@dataclass(frozen=True)
class Block:
    """What is alike and takes much memory.

    Attributes:
      what: an argument's path, or the operation that makes it.
      line: the user's ``file:line``, of an argument the first that computes with it; empty if unknown.
      role: as of ``Size``.
      bytes: of all ``count`` blocks.
    """

    what: str
    line: str
    role: str
    bytes: int
    count: int


@dataclass(frozen=True)
class PeakMemory:
    """Memory of one device at the peak.

    Attributes:
      peak_bytes: by XLA's buffer assignment; ``roles`` add up to it. None if nothing was compiled.
      limit_bytes: that was planned for; None for none.
      host_bytes: of the host's memory, for each device.
      roles: what it is for.
      largest: the blocks that take most.
      rematerialized_s: what XLA's own rematerialisation repeats to save memory, of ``step_s``.
    """

    peak_bytes: int | None
    limit_bytes: int | None
    host_bytes: int = 0
    roles: tuple[Size, ...] = ()
    largest: tuple[Block, ...] = ()
    rematerialized_s: float = 0.0
    step_s: float = 0.0

    def lines(self) -> list[str]:
        if self.peak_bytes is None:
            lines = ["memory a device, of arguments alone, as nothing was compiled to plan the step:"]
        else:
            limit = "" if self.limit_bytes is None else f" of {bytes_text(self.limit_bytes)}"
            lines = [f"memory at the peak: {bytes_text(self.peak_bytes)} a device{limit}:"]
        whole = self.peak_bytes or sum(each.bytes for each in self.roles) or 1
        lines += table([(bytes_text(each.bytes), f"{each.bytes / whole:.1%}", _said(each)) for each in self.roles])
        lines += ["  largest blocks:"] * bool(self.largest)
        lines += table([(bytes_text(each.bytes), f"{each.count}x", _said(each)) for each in self.largest], "    ")
        lines += [f"  host memory: {bytes_text(self.host_bytes)} for each device"] * bool(self.host_bytes)
        if self.rematerialized_s:
            lines.append(
                f"  XLA's own rematerialisation pass repeats kernels to save memory: "
                f"{seconds_text(self.rematerialized_s)}, {self.rematerialized_s / self.step_s:.1%} of the step; a "
                "lower memory_limit lets the plan choose instead"
            )
        return lines


def _said(told: Size | Block) -> str:
    what = f"{told.role}: {told.what}" if isinstance(told, Block) else told.role
    return f"{what}  {line_text(told.line)}" if told.line else what


def peak_memory_of(program: Program, sharded: Program, planned: Planned | None) -> PeakMemory:
    """Of ``program``, in the global view, and as planned, or else ``sharded``, in the local view."""
    local = sharded if planned is None else planned.program
    blocks = list(_arguments(local, lines_of_first_use(program)))
    expected = None if planned is None else planned.plan.prediction
    if planned is None or expected is None:
        return PeakMemory(None, None if planned is None else planned.limit_bytes, 0, _roles(blocks), _largest(blocks))
    blocks += _temporaries(planned, program, expected, sum(each.bytes for each in blocks))
    return PeakMemory(
        expected.peak_bytes,
        planned.limit_bytes,
        expected.host_bytes,
        _roles(blocks),
        _largest([each for each in blocks if each.what]),
        expected.rematerialized_s,
        expected.step_s,
    )


def _arguments(local: Program, lines: Mapping[str, str]) -> Iterator[Block]:
    for var, port in zip(open_jaxpr(local.jaxpr).invars, local.inputs, strict=True):
        if port.memory_kind == "device":
            yield Block(port.path, lines.get(port.path, ""), _ARGUMENTS[port.role], size_bytes(var), 1)


def _temporaries(planned: Planned, program: Program, expected: Prediction, given_bytes: int) -> Iterator[Block]:
    """All else, of a plan from elsewhere in one; without a name what nobody can tell apart."""
    evaluation = planned.evaluation
    if evaluation is None:
        yield Block("", "", _TEMPORARIES, expected.peak_bytes - given_bytes, 1)
        return
    known, left_bytes = vocabularies(program), expected.peak_bytes - given_bytes
    for block in held_blocks(evaluation.simulation, planned.program, known):
        left_bytes -= block.bytes
        yield block
    results_bytes = evaluation.simulation.memory.output_bytes
    yield Block("", "", _RESULTS, results_bytes, 1)
    left_bytes -= results_bytes
    yield Block("", "", _GAPS if left_bytes >= 0 else _SHARED, left_bytes, 1)


def held_blocks(simulation: Simulation, local: Program, words: frozenset[int]) -> Iterator[Block]:
    """The temporaries where most memory is needed, each by itself; none of what is not compiled.

    Args:
      local: the program that was compiled, in the local view.
      words: its ``vocabularies``.
    """
    module, memory = simulation.module, simulation.memory
    if module is None or not memory.live_bytes:
        return
    origins = Origins.of(module, local)
    for each in held_at_peak(module, memory, batch_of(local)):
        what, line = origins.said(each.name, each.op_name, each.source)
        yield Block(what, line, role_of(each, words), each.bytes, 1)


def role_of(held: Content, words: frozenset[int]) -> str:
    """What ``held`` is for: logits depend on the examples, and have a number for every word of ``vocabularies``."""
    is_logits = held.holds in (Holds.KEPT, Holds.WORKING) and held.dims[-1:] and held.dims[-1] in words
    return _LOGITS if is_logits else str(held.holds)


def batch_of(program: Program) -> list[int]:
    """Which of its inputs hold examples."""
    return [place for place, port in enumerate(program.inputs) if port.role is Role.BATCH]


def vocabularies(program: Program) -> frozenset[int]:
    """How many words there are: rows of the parameters that the batch looks up, outside of loops."""
    jaxpr = open_jaxpr(program.jaxpr)
    inputs = zip(jaxpr.invars, program.inputs, strict=True)
    known = derived(
        jaxpr, {var: port.shape for var, port in inputs if port.role is Role.PARAM and len(port.shape) == 2}
    )
    batch = [var for var, port in zip(jaxpr.invars, program.inputs, strict=True) if port.role is Role.BATCH]
    words = reached_from(jaxpr.eqns, batch)
    lookups = [eqn.invars for eqn in jaxpr.eqns if eqn.primitive.name == "gather"]
    tables: list[Any] = [table for table, *where in lookups if words.intersection(variables(where))]
    return frozenset(known[table][0] for table in tables if table in known)


def _roles(blocks: list[Block]) -> tuple[Size, ...]:
    lines: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for block in blocks:
        lines[block.role][block.line] += block.bytes
    sizes = [Size(role, sum(of.values()), max(of, key=of.__getitem__)) for role, of in lines.items()]
    return tuple(
        sorted((each for each in sizes if each.bytes), key=lambda each: (each.role in (_GAPS, _SHARED), -each.bytes))
    )


def _largest(blocks: list[Block]) -> tuple[Block, ...]:
    alike: dict[tuple[str, str, str], list[Block]] = defaultdict(list)
    for block in blocks:
        alike[block.what, block.line, block.role].append(block)
    joined = [Block(*key, sum(each.bytes for each in same), len(same)) for key, same in alike.items()]
    return tuple(sorted(joined, key=lambda block: -block.bytes)[:_MOST])
