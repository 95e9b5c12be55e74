"""A program to read: its inputs and outputs with placement and bytes, an operation a line, a loop as what it gathers,
computes and reduces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from jax_deepcompile._jax_compat import open_jaxpr, user_function, user_source
from jax_deepcompile.analysis.gathers import find_gathers, outermost
from jax_deepcompile.analysis.loops import Path, computing_scans
from jax_deepcompile.analysis.names import gather_names, value_names
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.program_time import EquationTime, equation_times
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.primitives import COLLECTIVES, DEVICE_SUMS, Scan
from jax_deepcompile.ir.program import Port, Program, View
from jax_deepcompile.ir.traversal import equations, nested_jaxprs
from jax_deepcompile.summary import size_text


def readable(program: Program, costs: CostModel | None = None) -> str:
    """``program`` as text; by ``costs`` with seconds beside each operation of the local view."""
    costs = costs if program.view is View.LOCAL else None
    lines = [f"{program.name}, {program.view} view on {program.mesh_text}", "", "inputs:"]
    lines += [_port(port, program) for port in program.inputs]
    lines += ["", "operations:", *_body(program, program.jaxpr, (), costs, "  ")]
    taken = {target for _, target in program.state_outputs}
    lines += ["", "outputs:"]
    for place, port in enumerate(program.outputs):
        lines.append(_port(port, program) + ", in the memory of the input" * (place in taken))
    return "\n".join(lines) + "\n"


def changed_counts(before: Program, after: Program) -> str:
    """What a rewrite did to the operations, loops' bodies counted once: ``+2 all_gather, -80 dot_general``."""
    old, new = (Counter(eqn.primitive.name for eqn in equations(each.jaxpr)) for each in (before, after))
    changed = {name: new[name] - old[name] for name in sorted(old | new) if new[name] != old[name]}
    return ", ".join(f"{count:+d} {name}" for name, count in changed.items()) or "as many of each operation"


def _port(port: Port, program: Program) -> str:
    shape = f"{port.dtype}[{','.join(map(str, port.shape))}]"
    where = "" if port.placement is None else f" {port.placement.describe(program.mesh)}"
    memory = "" if port.memory_kind == "device" else f" in {port.memory_kind}"
    return f"  {port.path}: {port.role} {shape}{where}{memory}"


def _body(program: Program, jaxpr: Any, path: Path, costs: CostModel | None, indent: str) -> Iterator[str]:
    flat = open_jaxpr(jaxpr)
    names, scans = value_names(flat, phased=not path), computing_scans(flat)
    times = equation_times(flat, program.mesh, costs) if costs is not None else [None] * len(flat.eqns)
    for eqn, time in zip(flat.eqns, times, strict=True):
        place = next((place for place, scan in enumerate(scans) if scan is eqn), None)
        if place is None:
            yield indent + _operation(eqn, names, time)
            for inner in nested_jaxprs(eqn):
                yield from _body(program, inner, (*path, -1), costs, f"{indent}  ")
        else:
            yield from _loop(program, eqn, (*path, place), costs, time, indent)


def _operation(eqn: Any, names: dict, time: EquationTime | None) -> str:
    results = [var for var in eqn.outvars if var in names]
    name = names[results[0]] if results else eqn.primitive.name
    size = size_text(sum(map(size_bytes, results)))
    line = user_source(eqn) if user_function(eqn) else ""
    return f"{name}: {', '.join(map(_type, results))} {size}{_seconds(time)}" + f"  {line}" * bool(line)


def _loop(
    program: Program, eqn: Any, path: Path, costs: CostModel | None, time: EquationTime | None, indent: str
) -> Iterator[str]:
    scan, name = Scan(eqn), program.loop_names.get(path, "loop")
    order = ", last layer first" if scan.reverse else ""
    yield f"{indent}loop {name}: {scan.length} iterations{order}{_seconds(time)}"
    body = list(equations(scan.body))
    for verb, kinds in (("gathers", {"all_gather"}), ("reduces", DEVICE_SUMS)):
        moved = [each for each in body if each.primitive.name in kinds]
        atoms: Sequence[Any] = [atom for each in moved for atom in (each.outvars if verb == "gathers" else each.invars)]
        names = _gathered(program, scan.body, path) if verb == "gathers" else ""
        yield f"{indent}  {verb}: {len(moved)} values, {size_text(sum(map(size_bytes, atoms)))} an iteration{names}"
    computed = Counter(each.primitive.name for each in body if each.primitive.name not in COLLECTIVES)
    most = ", ".join(f"{count} {kind}" for kind, count in computed.most_common(_MOST))
    yield f"{indent}  computes: {sum(computed.values())} operations: {most}"
    yield from _body(program, scan.body, path, costs, f"{indent}    ")


def _gathered(program: Program, body: Any, path: Path) -> str:
    """The parameters that a loop gathers, as plans call them."""
    names = gather_names(program, path, outermost(find_gathers(body, body.invars))) if -1 not in path else []
    return f": {', '.join(names)}" if names else ""


_MOST = 5
"""Kinds of operations that the head of a loop names."""


def _type(var: Any) -> str:
    return f"{var.aval.dtype}[{','.join(map(str, var.aval.shape))}]"


def _seconds(time: EquationTime | None) -> str:
    if time is None:
        return ""
    parts = ((time.compute_s, "compute"), (time.network_s, "network"))
    return "".join(f", {1e3 * seconds:.3g} ms {what}" for seconds, what in parts if seconds)
