"""Walking and flattening jaxprs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from jax_deepcompile import _jax_compat
from jax_deepcompile._jax_compat import closed_consts, new_barrier, new_var, open_jaxpr
from jax_deepcompile.ir.primitives import (
    CONTROL_FLOW,
    Call,
    Cond,
    Scan,
    ShardMap,
    While,
    axis_names,
    called,
)
from jax_deepcompile.ir.rewrite import renamed, with_regions

_POSITIONAL = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}
"""Collectives that may run over dimensions, and the reductions they are then."""


def variables(atoms: Iterable) -> list[jex.Var]:
    """The atoms that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, jex.Literal)]


def reached_from(eqns: Sequence, sources: Collection) -> set:
    """Every variable that depends on one of ``sources``, they included."""
    reached = set(sources)
    for eqn in eqns:
        if any(atom in reached for atom in variables(eqn.invars)):
            reached.update(eqn.outvars)
    return reached


def free_variables(eqns: Sequence, targets: Iterable) -> list:
    """What ``eqns`` and ``targets`` read and no equation makes, in order of first use."""
    made = {var for eqn in eqns for var in eqn.outvars}
    read = [atom for eqn in eqns for atom in variables(eqn.invars)] + variables(targets)
    return [var for var in dict.fromkeys(read) if var not in made]


def equations(jaxpr) -> Iterator[jex.JaxprEqn]:
    """Every equation, those of nested jaxprs included."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        yield from inside(eqn)


def inside(eqn: jex.JaxprEqn) -> Iterator[jex.JaxprEqn]:
    """Every equation of the jaxprs among an equation's parameters."""
    for inner in nested_jaxprs(eqn):
        yield from equations(inner)


def contains(eqn: jex.JaxprEqn, names: Collection[str]) -> bool:
    """Whether ``eqn``, or an equation inside of it, is of one of these primitives."""
    return any(each.primitive.name in names for each in (eqn, *inside(eqn)))


def located_equations(jaxpr, around: jex.JaxprEqn | None = None) -> Iterator[tuple[jex.JaxprEqn, jex.JaxprEqn]]:
    """Every equation, and the one that knows its line in the user's code: itself, or what it is in."""
    for eqn in open_jaxpr(jaxpr).eqns:
        located = eqn if around is None or _jax_compat.has_user_frame(eqn) else around
        yield eqn, located
        for inner in nested_jaxprs(eqn):
            yield from located_equations(inner, located)


def nested_jaxprs(eqn: jex.JaxprEqn) -> list:
    """The jaxprs among an equation's parameters, closed or open."""
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (jex.Jaxpr, jex.ClosedJaxpr)):
                found.append(item)
    return found


def bodies(eqn: jex.JaxprEqn) -> list:
    """The jaxprs that ``eqn`` runs on whole values; not those that say how a scatter joins two elements."""
    match eqn.primitive.name:
        case "scan":
            return [Scan(eqn).closed]
        case "while":
            return [While(eqn).closed_condition, While(eqn).closed_body]
        case "cond":
            return list(Cond(eqn).closed_branches)
        case "shard_map":
            return [ShardMap(eqn).closed]
    inner = called(eqn)
    return [] if inner is None else [inner]


def inline_calls(closed: jex.ClosedJaxpr, around: jex.JaxprEqn | None = None) -> jex.ClosedJaxpr:
    """``closed`` with every call replaced by the equations of what it calls, inside loops and branches too.

    A checkpointed region of the backward pass (``remat2``) becomes an optimization barrier around its inputs followed
    by its equations, which is what JAX lowers it to: the barrier keeps XLA from merging the recomputation with the
    forward pass. Shardings given to ``jit`` become a ``device_put`` to them. Custom derivative rules have done their
    work by the time a step is traced.

    What does not know its line in the user's code is given that of what it is in: a call, or the equation ``around``.

    Before::

        { lambda ; a. let b = jit[jaxpr={ lambda ; c. let d = sin c in (d,) }] a in (b,) }

    After::

        { lambda ; a. let b = sin a in (b,) }
    """
    return _Inliner().run(closed, around)


class _Inliner:
    """Flattens one jaxpr; constants of what it inlines become its own."""

    def __init__(self) -> None:
        self.constvars: list = []
        self.consts: list = []
        self.eqns: list = []

    def run(self, closed: jex.ClosedJaxpr, around: jex.JaxprEqn | None) -> jex.ClosedJaxpr:
        jaxpr = open_jaxpr(closed)
        self.constvars += jaxpr.constvars
        self.consts += closed_consts(closed)
        outvars = self._walk(jaxpr, {}, around)
        flat = jaxpr.replace(constvars=self.constvars, eqns=self.eqns, outvars=outvars)
        return jex.ClosedJaxpr(flat, self.consts)

    def _walk(self, jaxpr: jex.Jaxpr, known: dict, caller: jex.JaxprEqn | None = None) -> list:
        for eqn in jaxpr.eqns:
            operands = [renamed(atom, known) for atom in eqn.invars]
            located = eqn if caller is None or _jax_compat.has_user_frame(eqn) else caller
            if (inner := called(eqn)) is not None:
                known.update(zip(eqn.outvars, self._call(eqn, inner, operands, located), strict=True))
                continue
            if eqn.primitive.name in _POSITIONAL and not any(isinstance(axis, str) for axis in axis_names(eqn)):
                known.update(zip(eqn.outvars, self._reduce(eqn, operands, located), strict=True))
                continue
            if eqn.primitive.name == "custom_linear_solve":
                known.update(zip(eqn.outvars, self._solve(eqn, operands, located), strict=True))
                continue
            results = [var if _jax_compat.is_drop_var(var) else new_var(var.aval) for var in eqn.outvars]
            known.update(zip(eqn.outvars, results, strict=True))
            is_region = eqn.primitive.name in CONTROL_FLOW
            flat = with_regions(eqn, lambda closed, at=located: inline_calls(closed, at)) if is_region else eqn
            source = located.source_info.replace(name_stack=eqn.source_info.name_stack)
            self.eqns.append(flat.replace(invars=operands, outvars=results, source_info=source))
        return [renamed(atom, known) for atom in jaxpr.outvars]

    def _call(self, eqn: jex.JaxprEqn, inner: jex.ClosedJaxpr, operands: list, located: jex.JaxprEqn) -> list:
        body = open_jaxpr(inner)
        if not _jax_compat.has_user_frame(located):
            located = self._near(inner, operands) or located
        call = Call(eqn)
        operands = self._annotated(self._barrier(call, operands), call.in_shardings, located)
        known = dict(zip(body.invars, operands, strict=True))
        known |= self._constants(body, inner)
        first, scope = len(self.eqns), eqn.source_info.name_stack
        results = self._walk(body, known, located)
        self.eqns[first:] = [_within(scope, each) for each in self.eqns[first:]]
        return self._annotated(results, call.out_shardings, located)

    def _near(self, inner: jex.ClosedJaxpr, operands: list) -> jex.JaxprEqn | None:
        """Who knows a line for a call that does not: the step itself, or what JAX calls in a recomputed region."""
        makes_operand = (eqn for eqn in reversed(self.eqns) if not set(variables(operands)).isdisjoint(eqn.outvars))
        candidates = itertools.chain((eqn for _, eqn in located_equations(inner)), makes_operand)
        return next(filter(_jax_compat.has_user_frame, candidates), None)

    def _annotated(self, atoms: list, shardings: Sequence, located: jex.JaxprEqn) -> list:
        """``atoms`` as ``device_put`` leaves them where the user gave ``jit`` a sharding: known, not moved."""
        given = [index for index, sharding in enumerate(shardings) if isinstance(sharding, jax.sharding.Sharding)]
        if not given:
            return atoms
        targets = tuple(shardings[index] for index in given)
        put = self._apply(lambda *values: jax.device_put(values, targets), [atoms[index] for index in given], located)
        held = dict(zip(given, put, strict=True))
        return [held.get(index, atom) for index, atom in enumerate(atoms)]

    def _apply(self, function: Callable, atoms: list, located: jex.JaxprEqn) -> list:
        """What ``function`` makes of ``atoms``, on the line of ``located``."""
        shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]
        body = open_jaxpr(jax.make_jaxpr(function)(*shapes))
        eqns = [eqn.replace(source_info=located.source_info) for eqn in body.eqns]
        return self._walk(body.replace(eqns=eqns), dict(zip(body.invars, atoms, strict=True)), located)

    def _constants(self, body: jex.Jaxpr, closed: jex.ClosedJaxpr) -> dict:
        """Variables for the constants of what is inlined; one that was seen before is not brought along twice."""
        seen = {id(value): var for value, var in zip(self.consts, self.constvars, strict=True)}
        known = {}
        for var, value in zip(body.constvars, closed_consts(closed), strict=True):
            if id(value) not in seen:
                seen[id(value)] = new_var(var.aval)
                self.constvars.append(seen[id(value)])
                self.consts.append(value)
            known[var] = seen[id(value)]
        return known

    def _reduce(self, eqn: jex.JaxprEqn, operands: list, located: jex.JaxprEqn) -> list:
        """A collective over an axis that ``vmap`` has made a dimension is a reduction of that dimension."""
        reduce, axes = _POSITIONAL[eqn.primitive.name], axis_names(eqn)
        return self._apply(lambda *values: [reduce(value, axes) for value in values], operands, located)

    def _solve(self, eqn: jex.JaxprEqn, operands: list, located: jex.JaxprEqn) -> list:
        """A differentiable linear solve, once differentiated, is the solver it was given."""
        solver, lengths = eqn.params["jaxprs"].solve, eqn.params["const_lengths"]
        body = open_jaxpr(solver)
        first = lengths.matvec + lengths.vecmat
        rest = first + lengths.solve
        arguments = [*operands[first:rest], *operands[rest + lengths.transpose_solve :]]
        known = dict(zip(body.invars, arguments, strict=True))
        known |= self._constants(body, solver)
        return self._walk(body, known, located)

    def _barrier(self, call: Call, operands: list) -> list:
        waits = call.guards
        guarded = [index for index, atom in enumerate(operands) if waits[index] and not isinstance(atom, jex.Literal)]
        if not guarded:
            return operands
        self.eqns.append(new_barrier([operands[index] for index in guarded], call.eqn.source_info))
        held = dict(zip(guarded, self.eqns[-1].outvars, strict=True))
        return [held.get(index, atom) for index, atom in enumerate(operands)]


def _within(scope: Any, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
    """``eqn`` of something called in ``scope``, whose names the call's own equations do not have."""
    source = eqn.source_info
    return eqn.replace(source_info=source.replace(name_stack=scope + source.name_stack))
