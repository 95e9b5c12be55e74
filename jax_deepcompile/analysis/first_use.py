"""Where a program first computes with each of its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax_deepcompile._jax_compat import open_jaxpr, user_function, user_source
from jax_deepcompile.analysis.dataflow import paired, variables
from jax_deepcompile.analysis.gathers import derived
from jax_deepcompile.ir.primitives import Cond, While
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.traversal import bodies


def lines_of_first_use(program: Program) -> dict[str, str]:
    """The user's ``file:line`` that first computes with each input, by its path; none of what is passed on only."""
    jaxpr = open_jaxpr(program.jaxpr)
    paths = [port.path for port in program.inputs]
    found: dict[str, str] = {}
    for path, line in _uses(jaxpr, dict(zip(jaxpr.invars, paths, strict=True))):
        found.setdefault(path, line)
    return found


def _uses(jaxpr: Any, given: dict[Any, str]) -> Iterator[tuple[str, str]]:
    """Of what is ``given`` of some variables, wherever equations compute with what is cheaply made of one of them."""
    known = derived(jaxpr, given)
    for eqn in jaxpr.eqns:
        read = [known[atom] for atom in variables(eqn.invars) if atom in known]
        if not read or all(var in known for var in eqn.outvars):
            continue
        inside = [(open_jaxpr(body), operands) for body, operands in zip(bodies(eqn), _operands(eqn), strict=True)]
        for body, operands in inside:
            yield from _uses(body, dict(paired(body.invars, operands, known)))
        line = "" if inside or not user_function(eqn) else user_source(eqn)
        yield from ((each, line) for each in read if line)


def _operands(eqn: Any) -> list[list[Any]]:
    """What each of the ``bodies`` of ``eqn`` is given."""
    match eqn.primitive.name:
        case "while":
            conditions, constants, carry = While(eqn).operands
            return [[*conditions, *carry], [*constants, *carry]]
        case "cond":
            return [Cond(eqn).operands for _ in Cond(eqn).branches]
    return [eqn.invars for _ in bodies(eqn)]
