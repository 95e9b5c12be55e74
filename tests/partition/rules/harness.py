"""Checks rules against plain evaluation: an equation computed in pieces is the equation computed whole.

``check`` traces a function and takes every equation of the primitives under test. For the legal ways to split it over
a mesh (each mesh axis goes to a factor, to a set of operands the equation is linear in, or to nothing) it cuts the
operands into blocks and random partial sums, runs the rule's ``emit`` on eight virtual devices, puts the results
together and compares.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.extend import core as jex
from jax.sharding import PartitionSpec

from jax_deepcompile import _jax_compat
from jax_deepcompile.ir.placement import PARTIAL, MeshAxes, Placement
from jax_deepcompile.partition.choice import Operand, choose_split
from jax_deepcompile.partition.reshard import size_of
from jax_deepcompile.partition.rules.base import Kind, LocalEquation, OpRule
from jax_deepcompile.partition.rules.families import REGISTRY
from tests.partition.rules.ways import MESHES, Way, legal_ways

WAYS_PER_MESH = 4
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")

sizes = st.sampled_from((1, 2, 3, 4, 6, 8, 8, 16))
seeds = st.integers(0, 2**31 - 1)


def integers(shape: Sequence[int], seed: int, dtype=np.float32, low: int = -4, high: int = 5) -> np.ndarray:
    """Small whole numbers in ``[low, high)`` of any type: their sums and products are exact in every order."""
    values = np.random.default_rng(seed).integers(low, high, shape)
    if np.issubdtype(dtype, np.complexfloating):
        values = values + 1j * np.random.default_rng(seed + 1).integers(low, high, shape)
    return values.astype(dtype)


def normals(shape: Sequence[int], seed: int, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def check(
    function: Callable,
    *args,
    primitives: Sequence[str],
    rtol: float = 0.0,
    atol: float = 0.0,
    ways: int = WAYS_PER_MESH,
) -> None:
    """Checks every equation of ``primitives`` in the trace of ``function(*args)``; there must be one of each.

    Args:
      rtol: relative tolerance; zero asks for equality, bit by bit.
      atol: absolute tolerance, in units of the largest expected number.
      ways: how many of the legal ways to split an equation are tried on each mesh.
    """
    seen = set()
    for eqn, values, expected in evaluate(function, *args):
        if eqn.primitive.name in primitives:
            seen.add(eqn.primitive.name)
            check_equation(eqn, values, expected, rtol, atol, ways)
    assert seen == set(primitives)


def evaluate(function: Callable, *args) -> Iterator[tuple[jex.JaxprEqn, list, list]]:
    """Evaluates ``function`` equation by equation; yields each with its operands and results."""
    closed = jax.make_jaxpr(function)(*args)
    yield from _evaluate(_jax_compat.open_jaxpr(closed), _jax_compat.closed_consts(closed), jax.tree.leaves(args), [])


def _evaluate(jaxpr: jex.Jaxpr, consts: Sequence, args: Sequence, results: list) -> Iterator:
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, jex.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in CALLS:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            outs: list = []
            yield from _evaluate(_jax_compat.open_jaxpr(inner), _jax_compat.closed_consts(inner), values, outs)
        else:
            bound = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
            outs = list(bound) if eqn.primitive.multiple_results else [bound]
            yield eqn, values, outs
        known.update(zip(eqn.outvars, outs, strict=True))
    results.extend(read(atom) for atom in jaxpr.outvars)


def rules_of(function: Callable, *args, primitive: str) -> list[tuple[jex.JaxprEqn, OpRule]]:
    """The equations of ``primitive`` in a trace, with their rules; nothing is computed but their operands."""
    return [(eqn, rule_of(eqn)) for eqn, _, _ in evaluate(function, *args) if eqn.primitive.name == primitive]


def rule_of(eqn: jex.JaxprEqn) -> OpRule:
    rule = REGISTRY.find(eqn)
    assert isinstance(rule, OpRule)
    assert not rule.reported, rule.reported
    return rule


def check_equation(
    eqn: jex.JaxprEqn, values: Sequence, expected: Sequence, rtol: float, atol: float, count: int
) -> None:
    rule = rule_of(eqn)
    _check_shapes(eqn, rule)
    _check_choice(eqn, rule)
    for mesh in MESHES:
        ways = [way for way in legal_ways(rule, mesh) if _may_be_partial(eqn, way)]
        chosen = random.Random(len(ways)).sample(ways, min(len(ways), count))
        for way, outcome in zip(chosen, _compute(eqn, rule, values, chosen), strict=True):
            for result, whole in zip(outcome, expected, strict=True):
                _compare(result, whole, rtol, atol, f"{eqn}\n{way}")


def _may_be_partial(eqn: jex.JaxprEqn, way: Way) -> bool:
    """Booleans and random keys are never partial sums."""
    return all(
        jax.numpy.issubdtype(var.aval.dtype, np.number) or not placement.is_partial
        for var, placement in zip(eqn.invars, way.operands, strict=True)
    )


def _check_shapes(eqn: jex.JaxprEqn, rule: OpRule) -> None:
    for var, dims in zip((*eqn.invars, *eqn.outvars), (*rule.operands, *rule.results), strict=True):
        assert var.aval.shape == tuple(math.prod(rule.factors[i].size for i in factors) for factors in dims)


def _check_choice(eqn: jex.JaxprEqn, rule: OpRule) -> None:
    """Whatever placements the operands come in, the choice is one of the legal ways."""
    draw = random.Random(len(rule.factors))
    for mesh in MESHES:
        legal = {(way.operands, way.results) for way in legal_ways(rule, mesh)}
        for _ in range(4):
            held = [_random_placement(var.aval, mesh, draw) for var in eqn.invars]
            operands = [
                Operand((placement,), (), draw.random() < 0.5, size_of(var.aval))
                for placement, var in zip(held, eqn.invars, strict=True)
            ]
            decision = choose_split(eqn, rule, operands, [()] * len(eqn.outvars), mesh)
            assert (decision.operands, decision.results) in legal


def _random_placement(aval, mesh: MeshAxes, draw: random.Random) -> Placement:
    for _ in range(8):
        placement = Placement(tuple(draw.randrange(PARTIAL, len(aval.shape)) for _ in mesh.names))
        if placement.fits(aval.shape, mesh):
            return placement
    return mesh.replicated()


def _compute(eqn: jex.JaxprEqn, rule: OpRule, values: Sequence, ways: Sequence[Way]) -> list[list]:
    """The results of ``eqn`` computed in each of ``ways``, put together; all in one compiled program."""
    mesh = ways[0].mesh
    passed, in_specs = [], []
    for way in ways:
        for atom, value, placement in zip(eqn.invars, values, way.operands, strict=True):
            if not _stays_literal(atom, placement):
                axes = tuple(mesh.names[axis] for axis in placement.axes_of(PARTIAL))
                passed.append(_parts(value, mesh.size_of(axes)) if axes else value)
                spec = placement.without_partial().spec(mesh)
                in_specs.append(PartitionSpec(axes, *spec) if axes else spec)

    def pieces(*blocks):
        remaining = iter(blocks)
        outcomes = []
        for way in ways:
            operands = [
                value if _stays_literal(atom, placement) else _own_block(next(remaining), placement)
                for atom, value, placement in zip(eqn.invars, values, way.operands, strict=True)
            ]
            results = rule.emit(LocalEquation(eqn, rule, way.splits, mesh), *operands)
            outcomes.append([_combine(result, rule, way, index) for index, result in enumerate(results)])
        return outcomes

    out_specs = [[placement.without_partial().spec(mesh) for placement in way.results] for way in ways]
    run = jax.shard_map(
        pieces,
        mesh=jax.make_mesh(mesh.sizes, mesh.names, axis_types=(jax.sharding.AxisType.Auto,) * len(mesh.names)),
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        check_vma=False,
    )
    return jax.jit(run, compiler_options=FAST_COMPILE)(*passed)


def _stays_literal(atom, placement: Placement) -> bool:
    return isinstance(atom, jex.Literal) and not placement.is_partial


def _own_block(block, placement: Placement):
    return block[0] if placement.is_partial else block


def _parts(value, count: int) -> np.ndarray:
    """``count`` random whole numbers that sum to ``value``, stacked."""
    whole = np.asarray(value)
    parts = integers((count, *whole.shape), seed=count, dtype=whole.dtype)
    parts[0] = whole - parts[1:].sum(axis=0, dtype=whole.dtype)
    return parts


def _combine(result, rule: OpRule, way: Way, index: int):
    for kind, combine in ((Kind.MAX, lax.pmax), (Kind.MIN, lax.pmin)):
        for factor, names in zip(rule.factors, way.splits, strict=True):
            if factor.kind is kind and names:
                result = combine(result, names)
    axes = tuple(way.mesh.names[axis] for axis in way.results[index].axes_of(PARTIAL))
    return lax.psum(result, axes) if axes else result


def _compare(result, expected, rtol: float, atol: float, message: str) -> None:
    assert result.dtype == expected.dtype, message
    if jax.dtypes.issubdtype(expected.dtype, jax.dtypes.prng_key):
        result, expected = jax.random.key_data(result), jax.random.key_data(expected)
    result, expected = np.asarray(result), np.asarray(expected)
    if rtol or atol:
        largest = float(np.max(np.abs(expected), initial=0.0))
        np.testing.assert_allclose(result, expected, rtol=rtol, atol=atol * largest, err_msg=message)
    else:
        np.testing.assert_array_equal(result, expected, err_msg=message)
