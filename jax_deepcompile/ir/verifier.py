"""What must hold of every program, whoever rewrote it last.

1. Every variable is defined before it is used, and only once.
2. The program has one port for each input and output, with its dtype and, through its placement, its shape, and in the
   local view its memory kind.
3. In the global view there is no collective; in the local view collectives run over axes of the mesh.
4. Every placement splits dimensions that exist and divide evenly.
5. No output is a partial sum.
6. A state output has the shape, dtype, placement and memory kind of the input whose buffer it takes, and no two outputs
   take the same one.
"""

from __future__ import annotations

from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import is_drop_var, open_jaxpr
from jax_deepcompile.errors import InvariantError
from jax_deepcompile.ir.memory import HOST_KIND, is_on_host
from jax_deepcompile.ir.primitives import NAMES_AXES, axis_names
from jax_deepcompile.ir.program import Program, View
from jax_deepcompile.ir.traversal import bodies, equations, nested_jaxprs, variables


def verify(program: Program, made_by: str = "") -> None:
    """Raises ``InvariantError`` with the number of the first invariant that does not hold, and who made ``program``."""
    try:
        _check(program)
    except InvariantError as error:
        if not made_by:
            raise
        raise error.after(made_by) from error


def _check(program: Program) -> None:
    jaxpr = open_jaxpr(program.jaxpr)
    _check_definitions(jaxpr)
    _check_placements(program)
    _check_ports(program, jaxpr)
    _check_collectives(program)
    _check_aliases(program)


def _check_definitions(jaxpr: jex.Jaxpr) -> None:
    given = [*jaxpr.constvars, *jaxpr.invars]
    defined = set(given)
    if len(defined) != len(given):
        raise InvariantError(1, "defined once", "an input appears twice")
    for eqn in jaxpr.eqns:
        for atom in variables(eqn.invars):
            if atom not in defined:
                raise InvariantError(1, "defined before used", f"{eqn.primitive.name} reads {atom} before it exists")
        for var in eqn.outvars:
            if var in defined and not is_drop_var(var):
                raise InvariantError(1, "defined once", f"{eqn.primitive.name} defines {var} again")
            defined.add(var)
        for inner in nested_jaxprs(eqn):
            _check_definitions(open_jaxpr(inner))
    for atom in variables(jaxpr.outvars):
        if atom not in defined:
            raise InvariantError(1, "defined before used", f"output {atom} is never made")


def _check_ports(program: Program, jaxpr: Any) -> None:
    for ports, atoms, what in ((program.inputs, jaxpr.invars, "input"), (program.outputs, jaxpr.outvars, "output")):
        if len(ports) != len(atoms):
            raise InvariantError(2, "a port for each", f"{len(ports)} {what} ports for {len(atoms)} {what}s")
        for port, atom in zip(ports, atoms, strict=True):
            is_global = program.view is View.GLOBAL
            shape = port.shape if is_global else port.where.local_shape(port.shape, program.mesh)
            aval = atom.aval
            if (tuple(aval.shape), str(aval.dtype)) != (shape, port.dtype):
                found = f"{what} {port.path} is {aval.dtype}{list(aval.shape)}, its port says {port.dtype}{list(shape)}"
                raise InvariantError(2, "ports tell shapes and dtypes", found)
            if not is_global and isinstance(atom, jex.Var) and is_on_host(atom) != (port.memory_kind == HOST_KIND):
                found = f"{what} {port.path} is in {aval.memory_space}, its port says {port.memory_kind}"
                raise InvariantError(2, "ports tell memory kinds", found)


def _check_collectives(program: Program) -> None:
    own_regions = _inside_manual_regions(program)
    for eqn in equations(program.jaxpr):
        if eqn.primitive.name not in NAMES_AXES or id(eqn) in own_regions:
            continue
        axes = set(axis_names(eqn))
        if program.view is View.GLOBAL or not axes <= set(program.mesh.names):
            found = f"{eqn.primitive.name} over {', '.join(sorted(map(str, axes)))} in the {program.view} view"
            raise InvariantError(3, "collectives over the mesh's axes, in the local view", found)


def _inside_manual_regions(program: Program) -> set[int]:
    """Equations of the user's own ``shard_map`` regions, which have axes of their own."""
    regions = (eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "shard_map")
    return {id(inner) for eqn in regions for body in bodies(eqn) for inner in equations(body)}


def _check_placements(program: Program) -> None:
    for port in (*program.inputs, *program.outputs):
        if port.placement is None:
            if program.view is View.LOCAL:
                raise InvariantError(4, "placements fit", f"{port.path} has none in the local view")
            continue
        if not port.placement.fits(port.shape, program.mesh):
            found = f"{port.path} {list(port.shape)} cannot be {port.placement.describe(program.mesh)}"
            raise InvariantError(4, "placements fit", found)
    for port in program.outputs:
        if port.placement is not None and port.placement.is_partial:
            raise InvariantError(5, "no output is a partial sum", port.path)


def _check_aliases(program: Program) -> None:
    for indices, what in zip(zip(*program.state_outputs, strict=True), ("input", "output"), strict=False):
        if len(set(indices)) != len(indices):
            raise InvariantError(6, "a buffer is taken once", f"an {what} appears twice in {program.state_outputs}")
    for source, target in program.state_outputs:
        before, after = program.inputs[source], program.outputs[target]
        for field in ("shape", "dtype", "placement", "memory_kind"):
            if getattr(before, field) != getattr(after, field):
                found = f"{before.path}: {field} {getattr(before, field)} becomes {getattr(after, field)}"
                raise InvariantError(6, "state keeps its form", found)
