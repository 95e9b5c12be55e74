"""Named loops computed differently, inner ones before those around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Compute, replace_equations


def replace_loops(program: Program, mesh: AnyMesh, ways: Mapping[str, Callable[[Loop], Compute]]) -> Program:
    """``program`` with each loop that ``ways`` names run as it says; the same object if it names none.

    A loop keeps its name, whatever becomes of loops beside it.
    """
    depths = {len(loop.path) for loop in find_loops(program) if loop.name in ways}
    for depth in sorted(depths, reverse=True):
        loops = [loop for loop in find_loops(program) if loop.name in ways and len(loop.path) == depth]
        program = replace_equations(program, mesh, {id(loop.eqn): ways[loop.name](loop) for loop in loops})
    return program
