"""Rewriting a local program by tracing it again: the one way a pass makes new equations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import bind, closed_consts, open_jaxpr, scan_counts
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.traversal import equations, nested_jaxprs

Replacement = Callable[[Any, list], Sequence]
"""``(equation, operands) -> results``, traced in the place of an equation."""


def trace_blocks(body: Callable[..., Sequence], program: Program, mesh: AnyMesh) -> jex.ClosedJaxpr:
    """The jaxpr of ``body(consts, *blocks) -> blocks`` on one device.

    Args:
      body: computes one device's blocks of the outputs from ``program``'s constants and blocks of its inputs.
      program: names the inputs' and outputs' placements, and holds the constants.
      mesh: the axes ``body`` may communicate over.
    """
    consts = closed_consts(program.jaxpr)
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(jax.sharding.PartitionSpec(), *(port.where.spec(program.mesh) for port in program.inputs)),
        out_specs=[port.where.spec(program.mesh) for port in program.outputs],
        axis_names=frozenset(program.mesh.names),
        check_vma=False,
    )
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in open_jaxpr(program.jaxpr).constvars]
    blocks = [jax.ShapeDtypeStruct(port.shape, port.dtype) for port in program.inputs]
    return _close_over(jax.make_jaxpr(mapped)(tuple(shapes), *blocks), consts)


def _close_over(traced: jex.ClosedJaxpr, consts: Sequence) -> jex.ClosedJaxpr:
    """The body of the one ``shard_map`` in ``traced``, its leading inputs and hoisted constants closed over again."""
    outer = open_jaxpr(traced)
    (eqn,) = (eqn for eqn in outer.eqns if eqn.primitive.name == "shard_map")
    body = open_jaxpr(eqn.params["jaxpr"])
    values = dict(zip(outer.constvars, closed_consts(traced), strict=True))
    values |= dict(zip(outer.invars[: len(consts)], consts, strict=True))
    arguments = dict(zip(eqn.invars, body.invars, strict=True))
    invars = [arguments[var] for var in outer.invars[len(consts) :]]
    closed = [(var, values[atom]) for atom, var in zip(eqn.invars, body.invars, strict=True) if atom in values]
    flat = body.replace(constvars=[*body.constvars, *(var for var, _ in closed)], invars=invars)
    return jex.ClosedJaxpr(flat, [*closed_consts(eqn.params["jaxpr"]), *(value for _, value in closed)])


def replace_equations(program: Program, mesh: AnyMesh, replacements: Mapping[int, Replacement]) -> Program:
    """``program`` with some equations computed differently, those inside scans too.

    Args:
      program: in the local view.
      mesh: its mesh.
      replacements: by ``id`` of the equation.
    """
    jaxpr = open_jaxpr(program.jaxpr)

    def body(consts, *blocks):
        return _evaluate(jaxpr, consts, blocks, replacements)

    return program.replace(jaxpr=trace_blocks(body, program, mesh))


def _evaluate(jaxpr: Any, consts: Sequence, values: Sequence, replacements: Mapping[int, Replacement]) -> list:
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, jex.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if id(eqn) in replacements:
            results = replacements[id(eqn)](eqn, operands)
        elif eqn.primitive.name == "scan" and _holds(eqn, replacements):
            results = _rescan(eqn, operands, replacements)
        else:
            results = bind(eqn, operands)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _holds(eqn, replacements: Mapping[int, Replacement]) -> bool:
    return any(id(inner) in replacements for body in nested_jaxprs(eqn) for inner in equations(body))


def _rescan(eqn, operands: list, replacements: Mapping[int, Replacement]) -> list:
    num_consts, num_carry = scan_counts(eqn)
    closed = eqn.params["jaxpr"]

    def body(carry, slices):
        arguments = (*operands[:num_consts], *carry, *slices)
        results = _evaluate(open_jaxpr(closed), closed_consts(closed), arguments, replacements)
        return results[:num_carry], results[num_carry:]

    carry, stacked = lax.scan(
        body,
        operands[num_consts : num_consts + num_carry],
        operands[num_consts + num_carry :],
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *stacked]
