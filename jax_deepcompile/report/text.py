"""``explain()``: the decisions of the partitioner in a screen of text."""

from __future__ import annotations

from collections import Counter, defaultdict

from jax_deepcompile._jax_compat import user_line
from jax_deepcompile.ir.program import Program
from jax_deepcompile.partition.layout import Split
from jax_deepcompile.partition.partition import Partitioned
from jax_deepcompile.partition.reshard import full_bytes, plan_moves

_LINES = 8
"""How many lines a list may take before it is cut."""


def explain(program: Program, partitioned: Partitioned) -> str:
    """The text of ``explain()``."""
    mesh = program.mesh
    shape = " x ".join(f"{name}={size}" for name, size in zip(mesh.names, mesh.sizes, strict=True))
    lines = [f"{program.name} on {shape}: {len(partitioned.layout.steps)} equations", ""]
    lines += _state(partitioned)
    lines += ["", *_collectives(partitioned)]
    lines += ["", *_moved_activations(partitioned)]
    lines += ["", *_replicated(partitioned)]
    return "\n".join(lines)


def _state(partitioned: Partitioned) -> list[str]:
    leaves = partitioned.leaves
    split = [leaf for leaf in leaves if not leaf.placement.is_replicated]
    whole_bytes = sum(leaf.bytes_per_device for leaf in leaves if leaf.placement.is_replicated)
    split_bytes = sum(leaf.bytes_per_device for leaf in split)
    lines = [
        f"state: {len(split)} of {len(leaves)} leaves sharded, {_size(split_bytes)} a device; "
        f"{len(leaves) - len(split)} replicated, {_size(whole_bytes)} a device"
    ]
    notable = [leaf for leaf in leaves if not leaf.reason.startswith("dimension") and leaf.reason]
    notable.sort(key=lambda leaf: -leaf.bytes_per_device)
    return lines + _cut([f"  {leaf.path}: {leaf.reason}" for leaf in notable])


def _collectives(partitioned: Partitioned) -> list[str]:
    """Collectives a step launches, and the bytes of the whole values they assemble or reduce."""
    mesh = partitioned.program.mesh
    count: Counter = Counter()
    size: dict[str, float] = defaultdict(float)

    def add(aval, fetch, trips: int) -> None:
        for move in plan_moves(fetch.source, fetch.target, mesh):
            if move.kind.communicates:
                key = f"{move.kind} over {', '.join(move.axes)}"
                count[key] += trips
                size[key] += trips * full_bytes(aval)

    for step, trips in partitioned.layout.walk():
        for atom, fetch in zip(step.eqn.invars, step.fetches, strict=True):
            add(atom.aval, fetch, trips)
    for layout, trips in partitioned.layout.nested_layouts():
        for atom, fetch in zip(layout.jaxpr.outvars, layout.outputs, strict=True):
            add(atom.aval, fetch, trips)
    lines = [f"  {key}: {count[key]} a step, {_size(size[key])}" for key in sorted(count)]
    return ["collectives:", *(lines or ["  none"])]


def _moved_activations(partitioned: Partitioned) -> list[str]:
    """Where what the batch had split had to be gathered or exchanged, most bytes first."""
    where: dict[str, float] = defaultdict(float)
    for step, trips in partitioned.layout.walk():
        for atom, fetch in zip(step.eqn.invars, step.fetches, strict=True):
            if fetch.moves_activation:
                where[f"{step.eqn.primitive.name} at {user_line(step.eqn)}"] += trips * full_bytes(atom.aval)
    if not where:
        return ["activations moved between devices: none"]
    worst = sorted(where.items(), key=lambda item: -item[1])
    return ["activations moved between devices:", *_cut([f"  {text}: {_size(size)} a step" for text, size in worst])]


def _replicated(partitioned: Partitioned) -> list[str]:
    """Equations that every device computes whole for want of a way to split them."""
    where: Counter = Counter()
    for step, _ in partitioned.layout.walk():
        if isinstance(step.how, Split) and step.how.rule.reported and not any(step.how.splits):
            where[f"  {step.eqn.primitive.name} at {user_line(step.eqn)}: {step.how.rule.reported}"] += 1
    if not where:
        return ["computed whole on every device: nothing that could be split"]
    lines = [text if number == 1 else f"{text} ({number} times)" for text, number in where.items()]
    return ["computed whole on every device:", *_cut(lines)]


def _cut(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _LINES else [*lines[: _LINES - 1], f"  … and {len(lines) - _LINES + 1} more"]


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
