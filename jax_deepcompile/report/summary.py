"""What a step and its stages show of themselves; everything is read from programs, nothing from arrays."""

from __future__ import annotations

from jax.sharding import AbstractMesh, Mesh

from jax_deepcompile.analysis.gathered import gathered_in
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.session import Planned
from jax_deepcompile.report.division import arguments
from jax_deepcompile.summary import Summary, axes_text


def summary_of_step(name: str, mesh: Mesh | AbstractMesh, traced: Summary | None) -> Summary:
    """Of a ``ShardedStep``, with that of the ``TracedStep`` that it last made, if any."""
    axes = axes_text(mesh.axis_names, mesh.axis_sizes)
    kind = "abstract" if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].device_kind
    rows = (("mesh", f"{axes} ({kind})"),)
    if traced is None:
        return Summary(f"ShardedStep {name}", (*rows, ("shapes", "none yet: call it, or trace(...) it")))
    return Summary(f"ShardedStep {name}", (*rows, *traced.rows[1:]), traced.trees)


def summary_of_trace(program: Program, sharded: Program, planned: Planned | None) -> Summary:
    """Of a ``TracedStep``."""
    rows = (("mesh", program.mesh_text), ("arguments", arguments(program)), *sharded.state_rows())
    planning = (("plan", "not planned yet"),) if planned is None else planned.rows()
    placed = sharded if planned is None else planned.program
    return Summary(f"TracedStep {program.name}", (*rows, *planning), (placed.state_tree(gathered_in(placed, sharded)),))


def summary_of_stage(kind: str, planned: Planned) -> Summary:
    """Of what came of a planned program: a stage called ``kind``."""
    program = planned.program
    rows = (("mesh", program.mesh_text), *program.state_rows(), *planned.rows())
    return Summary(f"{kind} {program.name}", rows)
