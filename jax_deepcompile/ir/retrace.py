"""Rewriting a local program by tracing it again: the one way a pass makes new equations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from jax_deepcompile import _jax_compat, errors
from jax_deepcompile._jax_compat import (
    bind,
    closed_consts,
    eval_local,
    is_typed_literal,
    line_of,
    open_jaxpr,
    provenance,
)
from jax_deepcompile.ir.memory import HOST_KIND
from jax_deepcompile.ir.placement import AnyMesh, around
from jax_deepcompile.ir.primitives import Cond, Scan, ShardMap, While, axis_names
from jax_deepcompile.ir.program import Port, Program
from jax_deepcompile.ir.traversal import equations, inline_calls, inside

Compute = Callable[[Any, list], Sequence]
"""``(equation, operands) -> results``, traced in the place of an equation."""


@dataclass(frozen=True)
class ReadingMore:
    """A replacement that needs more than the equation's own operands.

    Attributes:
      compute: gets them behind the operands.
      atoms: of the jaxpr that the equation is in, made before it.
    """

    compute: Compute
    atoms: tuple

    def __call__(self, eqn, operands: list) -> Sequence:
        return self.compute(eqn, operands)


Replacement = Compute | ReadingMore


def trace_blocks(body: Callable[..., Sequence], program: Program, mesh: AnyMesh) -> jex.ClosedJaxpr:
    """The jaxpr of ``body(consts, *blocks) -> blocks`` on one device.

    Args:
      body: computes one device's blocks of the outputs from ``program``'s constants and blocks of its inputs.
      program: names the inputs' and outputs' placements, and holds the constants.
      mesh: the axes ``body`` may communicate over; to those of ``program.mesh`` that are virtual it may refer too.
    """
    consts = closed_consts(program.jaxpr)
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(jax.sharding.PartitionSpec(), *(port.where.spec(program.mesh) for port in program.inputs)),
        out_specs=[port.where.spec(program.mesh) for port in program.outputs],
        axis_names=frozenset(program.mesh.devices.names),
        check_vma=False,
    )
    loops = [(name, program.mesh.size_of((name,))) for name in program.mesh.virtual]
    jaxpr = open_jaxpr(program.jaxpr)
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in jaxpr.constvars]
    abstract = mesh.abstract_mesh if isinstance(mesh, jax.sharding.Mesh) else mesh
    blocks = [
        jax.ShapeDtypeStruct(port.shape, var.aval.dtype, sharding=_on_host(port, program, abstract))
        for port, var in zip(program.inputs, jaxpr.invars, strict=True)
    ]
    with around(mesh):
        traced = jax.make_jaxpr(mapped, axis_env=loops)(tuple(shapes), *blocks)
    return _close_over(traced, consts)


def _on_host(port: Port, program: Program, mesh: jax.sharding.AbstractMesh) -> jax.sharding.NamedSharding | None:
    """What tells JAX that ``port`` is on the host; None where it is not."""
    if port.memory_kind != HOST_KIND:
        return None
    return jax.sharding.NamedSharding(mesh, port.where.spec(program.mesh), memory_kind=HOST_KIND)


def _close_over(traced: jex.ClosedJaxpr, consts: Sequence) -> jex.ClosedJaxpr:
    """The body of the one ``shard_map`` in ``traced``, its leading inputs and hoisted constants closed over again."""
    outer = open_jaxpr(traced)
    (eqn,) = (eqn for eqn in outer.eqns if eqn.primitive.name == "shard_map")
    body = open_jaxpr(ShardMap(eqn).closed)
    values = dict(zip(outer.constvars, closed_consts(traced), strict=True))
    values |= dict(zip(outer.invars[: len(consts)], consts, strict=True))
    arguments = dict(zip(eqn.invars, body.invars, strict=True))
    invars = [arguments[var] for var in outer.invars[len(consts) :]]
    closed = [(var, values[atom]) for atom, var in zip(eqn.invars, body.invars, strict=True) if atom in values]
    flat = body.replace(constvars=[*body.constvars, *(var for var, _ in closed)], invars=invars)
    return jex.ClosedJaxpr(flat, [*closed_consts(ShardMap(eqn).closed), *(value for _, value in closed)])


def replace_equations(program: Program, mesh: AnyMesh, replacements: Mapping[int, Replacement]) -> Program:
    """``program`` with equations, by ``id``, computed differently, those inside loops too; itself if none is."""

    def body(consts, *blocks):
        return _evaluate(program.jaxpr, blocks, replacements, consts)

    return program.replace(jaxpr=trace_blocks(body, program, mesh)) if replacements else program


def run_manual(jaxpr: Any, operands: Sequence, axes: Mapping[str, tuple[str, ...]]) -> list:
    """The body of a ``shard_map``, traced here and now under one that does not check along which axes values vary.

    Args:
      axes: other names for axes that its collectives name.
    """
    flat = inline_calls(jex.ClosedJaxpr(open_jaxpr(jaxpr), closed_consts(jaxpr)))
    instead: dict[int, Replacement] = {}

    def unchecked(eqn, operands: list) -> Sequence:
        name = eqn.primitive.name
        operands = [np.asarray(value) if is_typed_literal(value) else value for value in operands]
        if name in _REGIONS:
            with provenance(eqn):
                return _REGIONS[name](eqn, operands, instead)
        if name == "pvary":
            return operands
        if name == "sharding_constraint":
            return [constrain_automatic(operands[0], eqn.params["sharding"])]
        if name == "shard_map":
            return run_automatic(eqn, operands, axes)
        renamed = eqn.replace(params={key: _renamed(key, value, axes) for key, value in eqn.params.items()})
        if name == "psum_invariant":
            return lax.psum(operands, axis_names(renamed))
        if name == "axis_index":
            return [lax.axis_index(renamed.params["axis_name"])]
        return bind(renamed, operands)

    instead |= {id(eqn): unchecked for eqn in equations(flat)}
    return _evaluate(flat, operands, instead)


def run_automatic(eqn, operands: Sequence, axes: Mapping[str, tuple[str, ...]]) -> Sequence:
    """A ``shard_map``, traced here and now over those of its axes that the mesh around it leaves to XLA.

    Args:
      axes: for each of its other axes the axes around it that stand for it.

    Raises:
      NestedManualError: an axis is there in neither way.
    """
    region, around = ShardMap(eqn), jax.sharding.get_abstract_mesh()
    free = {name: around.shape[name] for name in automatic_axes()}
    wanted = region.axes - axes.keys()
    for name in sorted(wanted):
        if free.get(name) != region.sizes[name]:
            raise errors.NestedManualError(name, region.sizes, free, _jax_compat.user_line(eqn))
    if not wanted:
        return run_manual(region.closed, operands, axes)
    return jax.shard_map(
        lambda *blocks: run_manual(region.closed, blocks, axes),
        in_specs=tuple(_only(spec, wanted) for spec in region.in_specs),
        out_specs=[_only(spec, wanted) for spec in region.out_specs],
        axis_names=wanted,
        check_vma=False,
    )(*operands)


def constrain_automatic(value: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """``value`` as ``sharding`` divides it along the axes that the mesh here leaves to XLA; the others are left out."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return value
    spec = _only(sharding.spec, automatic_axes())
    if not any(spec):
        return value
    target = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), spec)
    return lax.with_sharding_constraint(value, target)


def automatic_axes() -> frozenset[str]:
    """The axes of the mesh here that are XLA's to divide by."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind != jax.sharding.AxisType.Manual)


def _only(spec: jax.sharding.PartitionSpec, names: frozenset[str]) -> jax.sharding.PartitionSpec:
    kept = []
    for entry in spec:
        listed = entry if isinstance(entry, tuple) else (entry,)
        kept.append(tuple(name for name in listed if name in names) or None)
    return jax.sharding.PartitionSpec(*kept)


def _renamed(key: str, value: Any, axes: Mapping[str, tuple[str, ...]]) -> Any:
    """The parameter ``key`` of a collective, its axes by their other names; or what is whole on its mesh anywhere."""
    if key in ("sharding", "out_sharding") and isinstance(value, jax.sharding.NamedSharding) and not any(value.spec):
        return None
    if key not in ("axes", "axis_name"):
        return value
    names = value if isinstance(value, tuple) else (value,)
    renamed = tuple(
        other for name in names for other in (axes.get(name, (name,)) if isinstance(name, str) else (name,))
    )
    return renamed if isinstance(value, tuple) or len(renamed) != 1 else renamed[0]


def compute(eqns: Sequence, known: Mapping[Any, Any], replacements: Mapping[int, Replacement] | None = None) -> dict:
    """``known``, the values of some variables, and with them what ``eqns`` define, traced here and now."""
    known = dict(known)
    for eqn in eqns:
        instead = (replacements or {}).get(id(eqn))
        more = instead.atoms if isinstance(instead, ReadingMore) else ()
        results = _recompute(eqn, [read(atom, known) for atom in (*eqn.invars, *more)], replacements or {})
        known.update(zip(eqn.outvars, results, strict=True))
    return known


def read(atom: Any, known: Mapping[Any, Any]) -> Any:
    return atom.val if isinstance(atom, jex.Literal) else known[atom]


def _recompute(eqn, operands: list, replacements: Mapping[int, Replacement]) -> Sequence:
    if id(eqn) in replacements:
        with line_of(eqn):
            return replacements[id(eqn)](eqn, operands)
    if not any(id(inner) in replacements for inner in inside(eqn)):
        return bind(eqn, operands)
    with provenance(eqn):
        return _REGIONS[eqn.primitive.name](eqn, operands, replacements)


def _evaluate(jaxpr: Any, values: Sequence, replacements: Mapping[int, Replacement], consts: Sequence = ()) -> list:
    variables = open_jaxpr(jaxpr)
    consts = consts or closed_consts(jaxpr)
    known = dict(zip((*variables.constvars, *variables.invars), (*consts, *values), strict=True))
    known = compute(variables.eqns, known, replacements)
    return [read(atom, known) for atom in variables.outvars]


def rescan(eqn, body: Callable[[list, list], list], carry: list, stacks: list, length: int | None = None) -> list:
    """A scan of another body, with the carry of that.

    Args:
      eqn: a scan.
      body: ``(carry, slices) -> (*carry, *outputs)``.
      carry: at the start.
      stacks: what ``slices`` are of.
      length: how many iterations; by default as many as ``eqn`` has.
    """
    num_carry = len(carry)

    def step(carry, slices):
        results = body(list(carry), list(slices))
        return results[:num_carry], results[num_carry:]

    scan = Scan(eqn)
    carry, stacked = lax.scan(step, carry, stacks, scan.length if length is None else length, **scan.options)
    return [*carry, *stacked]


def rerun(eqn, body: Any, operands: list, more: Sequence = ()) -> list:
    """A scan of another body, whose constants are its first inputs, on what ``eqn`` reads and ``more`` stacks."""
    consts, carry, stacks = Scan(eqn).split(operands)
    consts = [*closed_consts(Scan(eqn).closed), *consts]
    return rescan(eqn, lambda carry, layer: eval_local(body, [*consts, *carry, *layer]), carry, [*stacks, *more])


def _rescan(eqn, operands: list, replacements: Mapping[int, Replacement]) -> list:
    consts, carry, stacks = Scan(eqn).split(operands)

    def body(carry: list, slices: list) -> list:
        return _evaluate(Scan(eqn).closed, (*consts, *carry, *slices), replacements)

    return rescan(eqn, body, carry, stacks)


def _rewhile(eqn, operands: list, replacements: Mapping[int, Replacement]) -> list:
    loop = While(eqn)
    cond_consts, body_consts, carry = loop.split(operands)
    return lax.while_loop(
        lambda carry: _evaluate(loop.closed_condition, (*cond_consts, *carry), replacements)[0],
        lambda carry: _evaluate(loop.closed_body, (*body_consts, *carry), replacements),
        carry,
    )


def _recond(eqn, operands: list, replacements: Mapping[int, Replacement]) -> list:
    index, *rest = operands
    branches = [
        lambda *values, branch=branch: _evaluate(branch, values, replacements) for branch in Cond(eqn).closed_branches
    ]
    return lax.switch(index, branches, *rest)


_REGIONS = {"scan": _rescan, "while": _rewhile, "cond": _recond}
