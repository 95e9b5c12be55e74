"""``explain()``: the decisions of the partitioner in a screen of text."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_deepcompile._jax_compat import open_jaxpr, user_line
from jax_deepcompile.analysis.trip_counts import known_counts, trips_of
from jax_deepcompile.analysis.work import work_of
from jax_deepcompile.costs.utilisation import Utilisation
from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.ir.primitives import COLLECTIVES, PRODUCTS, Collective, Scan
from jax_deepcompile.ir.program import Program, Role
from jax_deepcompile.ir.traversal import bodies
from jax_deepcompile.partition.layout import Split
from jax_deepcompile.partition.partition import Partitioned
from jax_deepcompile.partition.reshard import MoveKind, full_bytes, plan_moves
from jax_deepcompile.partition.rules.regions import unmet_annotations
from jax_deepcompile.partition.state import LeafChoice
from jax_deepcompile.planner.session import Planned
from jax_deepcompile.report.planning import explain_plan
from jax_deepcompile.summary import Text, axes_text, size_text

_LINES = 8
"""How many lines a list may take before it is cut."""

_NOTABLE = 0.01
"""The share of a device's matrix products that is worth a line."""


def explain(
    program: Program,
    partitioned: Partitioned,
    sharded: Program,
    reasons: Mapping[str, str],
    planned: Planned | None = None,
    launches: Mapping[str, int] | None = None,
    achieves: Utilisation | None = None,
) -> Text:
    """The text of ``explain()``.

    Args:
      program: the global view.
      partitioned: what was decided for it.
      sharded: the local view.
      reasons: why each argument is what it is, by its name.
      planned: the local view as planned, if it is.
      launches: how often what is compiled launches each collective in a step, if it is.
      achieves: what a step is measured by.
    """
    mesh = program.mesh
    shape = axes_text(mesh.names, mesh.sizes)
    lines = [f"{program.name} on {shape}: {len(partitioned.layout.steps)} equations"]
    lines += [*_arguments(program, sharded, reasons), ""]
    lines += _state(partitioned)
    lines += _like_examples(partitioned)
    lines += ["", *_microbatches(partitioned), *_collectives(sharded, planned, launches)]
    lines += ["", *_moved_activations(partitioned)]
    lines += ["", *_replicated(partitioned)]
    lines += _annotations(partitioned)
    if planned is not None:
        lines += ["", *explain_plan(planned, achieves)]
    return Text("\n".join(lines))


def arguments(program: Program) -> str:
    """What every argument is, in a line."""
    alike: dict[str, list[str]] = {"state": [], "read only": [], "batch": [], "replicated": []}
    for name, kind in _kinds(program).items():
        alike[kind].append(name)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in alike.items() if names)


def _arguments(program: Program, sharded: Program, reasons: Mapping[str, str]) -> list[str]:
    """What every argument is, why, and whether the step has its memory."""
    donated = {_argument(sharded.inputs[source].path) for source, _ in sharded.state_outputs}
    lines = []
    for name, kind in _kinds(program).items():
        given = "" if kind != "state" else ", donated" if name in donated else ", not donated"
        lines.append(f"  {name}: {kind}{given}: {reasons[name]}" if name in reasons else f"  {name}: {kind}{given}")
    return lines


def _kinds(program: Program) -> dict[str, str]:
    """For the name of every argument what it is; of a batch scalars are replicated."""
    kinds: dict[str, str] = {}
    returned = {source for source, _ in program.state_outputs}
    for index, port in enumerate(program.inputs):
        kept = "state" if index in returned else "read only"
        kind = kept if port.role.is_state else "batch" if port.role is Role.BATCH else "replicated"
        name = _argument(port.path)
        kinds[name] = kind if kinds.get(name, "replicated") == "replicated" else kinds[name]
    return kinds


def _argument(path: str) -> str:
    return re.split(r"[.\[]", path)[0]


def _state(partitioned: Partitioned) -> list[str]:
    leaves = partitioned.leaves
    split = [leaf for leaf in leaves if not leaf.placement.is_replicated]
    whole_bytes = sum(leaf.bytes_per_device for leaf in leaves if leaf.placement.is_replicated)
    split_bytes = sum(leaf.bytes_per_device for leaf in split)
    lines = [
        f"state: {len(split)} of {len(leaves)} leaves sharded, {size_text(split_bytes)} a device; "
        f"{len(leaves) - len(split)} replicated, {size_text(whole_bytes)} a device"
    ]
    alike: dict[str, list[LeafChoice]] = defaultdict(list)
    for leaf in leaves:
        if leaf.reason and not leaf.reason.startswith("dimension"):
            alike[leaf.reason].append(leaf)
    sizes = {reason: sum(leaf.bytes_per_device for leaf in group) for reason, group in alike.items()}
    worst = sorted(alike, key=lambda reason: -sizes[reason])
    return lines + _cut([f"  {_first_of(alike[reason], sizes[reason])}: {reason}" for reason in worst])


def _first_of(leaves: Sequence[LeafChoice], size_bytes: int) -> str:
    """One leaf by its path, several by the first one's and what all take."""
    more = f" and {len(leaves) - 1} more like it, {size_text(size_bytes)} a device" if len(leaves) > 1 else ""
    return leaves[0].path + more


def _like_examples(partitioned: Partitioned) -> list[str]:
    """Replicated inputs as long as the batch; without a batch, those that could be divided."""
    program = partitioned.program
    examples = {port.shape[0] for port in program.inputs if port.role is Role.BATCH}
    paths = [
        f"{port.path} {port.dtype}[{','.join(map(str, port.shape))}]"
        for port in program.inputs
        if port.role is Role.OTHER
        and port.shape
        and (port.shape[0] in examples if examples else port.shape[0] and port.shape[0] % program.mesh.size == 0)
    ]
    if not paths or program.mesh.size == 1:
        return []
    listed = ", ".join(paths[:_LINES]) + (f" and {len(paths) - _LINES} more" if len(paths) > _LINES else "")
    remedy = "to divide examples among the devices name their arguments' positions in shard(..., batch_argnums=...)"
    return [f"replicated, though shaped like a batch: {listed}; {remedy}"]


def _microbatches(partitioned: Partitioned) -> list[str]:
    """How the batch is worked on in parts."""
    mesh, layout = partitioned.layout.mesh, partitioned.layout
    if not mesh.virtual:
        return []
    length = mesh.size_of(mesh.virtual)
    batch = next(port for port in partitioned.program.inputs if port.role is Role.BATCH)
    examples = batch.where.local_shape(batch.shape, partitioned.program.mesh)[0] // length
    steps = [step for step, _ in layout.walk()]
    fetches = [*(fetch for step in steps for fetch in step.fetches), *layout.outputs]
    changes = [(fetch.source, fetch.target) for fetch in fetches]
    changes += [pair for step in steps for pair in zip(step.results, step.kept, strict=True)]
    moves = [move for source, target in changes for move in plan_moves(source, target, mesh)]
    sums = sum(move.kind is MoveKind.ALL_REDUCE and not set(mesh.virtual).isdisjoint(move.axes) for move in moves)
    of = f"{examples} example{'s' if examples > 1 else ''}"
    summed = f"{sums} sums over the loop" if sums else "nothing is summed over the loop, so no gradient is accumulated"
    return [f"gradient accumulation: {length} microbatches of {of} a device; {summed}", ""]


def _collectives(sharded: Program, planned: Planned | None, launches: Mapping[str, int] | None) -> list[str]:
    """Collectives a step launches, and before compilation the bytes each device gathers, or has reduced or exchanged.

    What planning compiled counts as compiled: it is what runs.
    """
    count: Counter = Counter()
    size: dict[str, float] = defaultdict(float)
    for eqn, trips in _executions((sharded if planned is None else planned.program).jaxpr, 1):
        if eqn.primitive.name in COLLECTIVES:
            name = Collective(eqn).kind.removeprefix("collective-").replace("-", "_")
            key = f"{name} over {', '.join(Collective(eqn).axes)}"
            atoms = eqn.outvars if name == "all_gather" else eqn.invars
            count[key] += trips
            size[key] += trips * sum(full_bytes(atom.aval) for atom in atoms)
    lines = [f"  {key}: {count[key]} a step, {size_text(size[key])}" for key in sorted(count)]
    stage = "before planning and compilation" if planned is None else "as planned, before XLA joins any"
    expected = None if planned is None else planned.plan.prediction
    if launches is None and expected is not None and expected.launches:
        launches = dict(expected.launches)
    launched = ", ".join(f"{number} {kind}" for kind, number in sorted((launches or {}).items())) or "none"
    compiled = [f"collectives a step, as compiled: {launched}"] if launches is not None else []
    return [*compiled, f"collectives, {stage}:", *(lines or ["  none"])]


def _executions(jaxpr: Any, trips: int) -> Iterator[tuple[Any, int]]:
    """Every equation with how often a step runs it; loops of unknown length count once."""
    known = known_counts(jaxpr)
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn, trips
        is_scan, is_while = (eqn.primitive.name == name for name in ("scan", "while"))
        repeats = Scan(eqn).length if is_scan else trips_of(eqn, known) if is_while else 1
        for body in bodies(eqn):
            yield from _executions(body, trips * (1 if repeats is None else repeats))


def _moved_activations(partitioned: Partitioned) -> list[str]:
    """Where what the batch had split had to be gathered or exchanged, most bytes first."""
    where: dict[str, float] = defaultdict(float)
    for step, trips in partitioned.layout.walk():
        for atom, fetch in zip(step.eqn.invars, step.fetches, strict=True):
            if fetch.moves_activation:
                where[f"{step.eqn.primitive.name} at {_line(step.eqn)}"] += trips * full_bytes(atom.aval)
    if not where:
        return ["activations moved between devices: none"]
    worst = sorted(where.items(), key=lambda item: -item[1])
    return [
        "activations moved between devices:",
        *_cut([f"  {text}: {size_text(size)} a step" for text, size in worst]),
    ]


def _replicated(partitioned: Partitioned) -> list[str]:
    """Equations that every device computes whole: for want of a way to split them, or because that moves less."""
    where: Counter = Counter()
    for step, _ in partitioned.layout.walk():
        if isinstance(step.how, Split) and step.how.rule.reported and not any(step.how.splits):
            where[f"  {step.eqn.primitive.name} at {_line(step.eqn)}: {step.how.rule.reported}"] += 1
    lines = [text if number == 1 else f"{text} ({number} times)" for text, number in where.items()]
    lines += _whole_products(partitioned)
    if not lines:
        batch = any(port.role is Role.BATCH for port in partitioned.program.inputs)
        return [
            "computed whole on every device: nothing that could be split"
            + ("" if batch else "; no argument is a batch")
        ]
    return ["computed whole on every device:", *_cut(lines, names=True)]


def _whole_products(partitioned: Partitioned) -> list[str]:
    """Matrix products outside of loops that are not split, though they are a notable part of those; largest first."""
    mesh = partitioned.layout.mesh
    if partitioned.program.mesh.size == 1:
        return []
    whole: dict[str, float] = defaultdict(float)
    total = 0.0
    for step in partitioned.layout.steps:
        if step.eqn.primitive.name not in PRODUCTS or not isinstance(step.how, Split):
            continue
        axes = [name for names in step.how.splits for name in names if name not in mesh.virtual]
        flops = work_of(step.eqn).flops / mesh.size_of(axes)
        total += flops
        if not axes:
            whole[f"{step.eqn.primitive.name} at {_line(step.eqn)}"] += flops
    shares = sorted(((flops / total, text) for text, flops in whole.items() if flops > _NOTABLE * total), reverse=True)
    return [f"  {text}: {share:.0%} of products outside of loops; split, it would move more" for share, text in shares]


def _annotations(partitioned: Partitioned) -> list[str]:
    """The user's sharding constraints that are not how values are divided here."""
    where: Counter = Counter()
    for layout, _ in partitioned.layout.nested_layouts() if partitioned.layout.mesh.size > 1 else ():
        for eqn, constraint in unmet_annotations(layout):
            where[f"  {constraint} at {_line(eqn)}"] += 1
    lines = [text if number == 1 else f"{text} ({number} times)" for text, number in where.items()]
    return ["", "sharding annotations not followed, as divisions are derived here:", *_cut(lines)] if lines else []


def _line(eqn: Equation) -> str:
    """The user's line, its file as seen from here if that is shorter; of a notebook's cell nobody knows the file."""
    path, colon, rest = user_line(eqn).partition(":")
    if _CELL.search(path):
        return f"a cell's line {rest}"
    return min(path, os.path.relpath(path), key=len) + colon + rest if colon else path


_CELL = re.compile(r"ipykernel_\d+/\d+\.py$")
"""The file that a kernel compiles a cell as."""


def _cut(lines: list[str], names: bool = False) -> list[str]:
    """The first lines, and how many others there are; with the different ``names`` that those begin with."""
    if len(lines) <= _LINES:
        return lines
    shown, rest = lines[: _LINES - 1], lines[_LINES - 1 :]
    listed = f": {', '.join(dict.fromkeys(line.split()[0] for line in rest))}" if names else ""
    return [*shown, f"  … and {len(rest)} more{listed}"]
