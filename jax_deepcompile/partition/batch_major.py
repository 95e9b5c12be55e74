"""Examples that are put one after the other, as two views of a batch are, stay where they are.

``jnp.concatenate([a, b])`` puts all examples of ``b`` behind all of ``a``: half of the devices would go on with those,
and all would send what they have. So do ``jnp.tile``, and what is flattened as [time, batch]. But what is computed of
each row alone does not depend on where the row is. So rows are in another order in memory, those of an example next to
each other, from where they are put together to where they are taken apart, summed over, or needed in order.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jax_deepcompile._jax_compat import dce, new_var, open_jaxpr
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.ir.primitives import ELEMENTWISE, Cond, Scan, While, closed_like
from jax_deepcompile.ir.rewrite import in_place_of
from jax_deepcompile.partition.example_rows import Dims, ExampleRows, counted, in_step_order, side_by_side, together
from jax_deepcompile.partition.ordered_rows import is_uniform
from jax_deepcompile.partition.rearranged_examples import rearranged
from jax_deepcompile.partition.rules.base import Kind, LocalEquation, OpRule, bind_unchanged
from jax_deepcompile.partition.rules.families import REGISTRY

_PASSED_ON = frozenset({"optimization_barrier", "device_put", "sharding_constraint", "reshard"})
"""Their results are their operands."""


def with_batch_major(closed: jex.ClosedJaxpr, examples: Sequence[bool]) -> jex.ClosedJaxpr:
    """``closed``, global, with the rows of an example next to each other, wherever less moves for that.

    Before, for two views of four examples::

        x:f32[8,16] = concatenate[dimension=0] a b; y = tanh x; c:f32[4,16] = slice[start=0, limit=4] y

    After::

        x:f32[8,16] = concatenate[dimension=1] a[:, None] b[:, None]; y = tanh x; c = y.reshape(4, 2, 16)[:, 0]

    Args:
      examples: which inputs have examples along their first dimension.
    """
    inputs = [var.aval.shape for var in open_jaxpr(closed).invars]
    of_batch = [are and bool(shape) and shape[0] > 1 for are, shape in zip(examples, inputs, strict=True)]
    dims = [{0: ExampleRows(1, shape[0], 1)} if are else {} for are, shape in zip(of_batch, inputs, strict=True)]
    left_alone: set[int] = set()
    while True:
        level = _Level(closed, frozenset(left_alone))
        changed = level.run(dims, examples, [{} for _ in open_jaxpr(closed).outvars])
        too_many = {source for source, bytes_kept in level.kept.items() if level.moved[source] >= bytes_kept}
        if not too_many:
            return changed if level.kept else closed
        left_alone |= too_many


@dataclass
class _Level:
    """One jaxpr in the making.

    Attributes:
      closed: the old one.
      around: the equation that it is in.
      left_alone: equations, by ``id``, that put examples one after the other as they did.
      known: where values have examples.
      of_batch: what depends on the batch.
      kept: for every equation that puts examples one after the other, how many bytes stay where they are.
      moved: for every such equation, how many bytes of what follows from it are put in the step's order after all.
    """

    closed: Any
    left_alone: frozenset[int]
    around: Any = None
    known: dict[Any, Dims] = field(default_factory=dict)
    of_batch: set = field(default_factory=set)
    makers: dict = field(default_factory=dict)
    eqns: list = field(default_factory=list)
    kept: Counter = field(default_factory=Counter)
    moved: Counter = field(default_factory=Counter)
    _brought: dict = field(default_factory=dict)
    results: list[Dims] = field(default_factory=list)
    results_of_batch: list[bool] = field(default_factory=list)

    def run(self, dims: Sequence[Dims], of_batch: Sequence[bool], wanted: Sequence[Dims | None]) -> Any:
        """The new jaxpr, given where its inputs have examples, and where its outputs must; None: as they come."""
        jaxpr = open_jaxpr(self.closed)
        self.known |= zip(jaxpr.invars, dims, strict=True)
        self.of_batch |= {var for var, depends in zip(jaxpr.invars, of_batch, strict=True) if depends}
        for eqn in jaxpr.eqns:
            self.makers |= dict.fromkeys(eqn.outvars, eqn)
            depends = list(map(self._depends, eqn.invars))
            each = depends if eqn.primitive.name in _PASSED_ON else [any(depends)] * len(eqn.outvars)
            self.of_batch |= {var for var, depends in zip(eqn.outvars, each, strict=True) if depends}
            if any(map(self._dims, eqn.invars)):
                self._compute(eqn)
            else:
                self.eqns.append(eqn)
        came = [self._as_used(atom) if each is None else atom for atom, each in zip(jaxpr.outvars, wanted, strict=True)]
        self.results, self.results_of_batch = list(map(self._dims, came)), list(map(self._depends, came))
        last = jaxpr.eqns[-1] if jaxpr.eqns else self.around
        pairs = zip(came, wanted, strict=True)
        outvars = [atom if each is None else self._bring(last, atom, each) for atom, each in pairs]
        return closed_like(self.closed, dce(jaxpr.replace(eqns=self.eqns, outvars=outvars)))

    def _as_used(self, atom: Any) -> Any:
        """``atom``, which may be kept for the backward pass, as it is needed here."""
        used = (made for (source, *_, is_put), made in self._brought.items() if source is atom and is_put)
        return next(used, atom)

    def _dims(self, atom: Any) -> Dims:
        return {} if isinstance(atom, jex.Literal) else self.known.get(atom, {})

    def _depends(self, atom: Any) -> bool:
        return not isinstance(atom, jex.Literal) and atom in self.of_batch

    def _add(self, eqn: Any, compute: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any] = ()) -> list:
        eqns, results = in_place_of(eqn, compute, inputs, outputs)
        self.eqns += eqns
        return results

    def _compute(self, eqn: Any) -> None:
        regions = {"scan": self._scanned, "while": self._repeated, "cond": self._branched}
        if eqn.primitive.name in regions:
            regions[eqn.primitive.name](eqn)
        elif eqn.primitive.name in _PASSED_ON:
            self.eqns.append(eqn)
            self.known |= zip(eqn.outvars, map(self._dims, eqn.invars), strict=True)
        elif not self._rearranged(eqn):
            rule = REGISTRY.find(eqn)
            self._by_rule(eqn, rule if isinstance(rule, OpRule) else None)

    def _rearranged(self, eqn: Any) -> bool:
        """Whether ``eqn`` is one that puts examples one after the other, or takes them apart; it is rewritten then."""
        dims = list(map(self._dims, eqn.invars))
        change = rearranged(eqn, dims, list(map(self._depends, eqn.invars)))
        if change is None:
            return False
        copies = max(rows.copies for each in dims for rows in each.values())
        if any(rows.copies > copies for each in change.results for rows in each.values()):
            if id(eqn) in self.left_alone:
                return False
            self.kept[id(eqn)] += size_bytes(eqn.outvars[0])
        operands = [self._bring(eqn, atom, each) for atom, each in zip(eqn.invars, change.operands, strict=True)]
        if change.compute is None:
            self.eqns.append(eqn.replace(invars=operands))
        else:
            self._add(eqn, change.compute, operands, eqn.outvars)
        for var, made in zip(eqn.outvars, change.results, strict=True):
            self.known[var] = {
                dim: rows.made_by(id(eqn)) if rows.copies > copies else rows for dim, rows in made.items()
            }
        return True

    def _bring(self, eqn: Any, atom: Any, wanted: Dims) -> Any:
        """``atom``, for ``eqn``, with its rows where they are ``wanted``, and all others in the step's order."""
        have = {dim: rows for dim, rows in self._dims(atom).items() if rows.are_moved}
        wanted = {dim: rows for dim, rows in wanted.items() if rows.are_moved}
        for dim, rows in have.items():
            if wanted.get(dim) != rows:
                atom = self._in_step_order(eqn, atom, dim, rows)
        for dim, rows in wanted.items():
            if have.get(dim) != rows:
                atom = self._side_by_side(eqn, atom, dim, rows)
        return atom

    def _in_step_order(self, eqn: Any, atom: Any, dim: int, rows: ExampleRows) -> Any:
        key = atom, dim, rows, False
        if key not in self._brought:
            dims = self._dims(atom)
            if dim == min(each for each, other in dims.items() if other.are_moved):
                self.moved.update(dict.fromkeys(rows.sources, size_bytes(atom)))
            (self._brought[key],) = self._add(eqn, partial(in_step_order, dim=dim, rows=rows), [atom])
            self._note(self._brought[key], atom, {each: other for each, other in dims.items() if each != dim})
        return self._brought[key]

    def _side_by_side(self, eqn: Any, atom: Any, dim: int, rows: ExampleRows) -> Any:
        if isinstance(atom, jex.Literal) or is_uniform(atom, dim, self.makers):
            return atom
        key = atom, dim, rows, True
        if key not in self._brought:
            made = self._made_side_by_side(atom, dim, rows)
            if made is None:
                if self._depends(atom) and not any(each < dim for each in self._dims(atom)):
                    self.moved.update(dict.fromkeys(rows.sources, size_bytes(atom)))
                (made,) = self._add(eqn, partial(side_by_side, dim=dim, rows=rows), [atom])
            self._brought[key] = made
            self._note(made, atom, {**self._dims(atom), dim: rows})
        return self._brought[key]

    def _note(self, var: Any, like: Any, dims: Dims) -> None:
        self.known[var] = dims
        if self._depends(like):
            self.of_batch.add(var)

    def _made_side_by_side(self, atom: Any, dim: int, rows: ExampleRows) -> Any:
        """``atom`` made in that order, of less or of nothing of the batch; None if it must be put in it."""
        maker = self.makers.get(atom)
        if maker is None or (self._depends(atom) and maker.primitive.name != "broadcast_in_dim"):
            return None
        name, shape = maker.primitive.name, atom.aval.shape
        if name == "iota":
            return self._add(maker, lambda: counted(atom.aval.dtype, shape, dim, rows), [])[0]
        if name == "random_bits" and not maker.invars[0].aval.shape:
            return self._drawn(maker, dim, rows)
        if name not in ELEMENTWISE | {"broadcast_in_dim"} or len(maker.outvars) != 1:
            return None
        rule = REGISTRY.find(maker)
        moved = any(rows.are_moved for operand in (atom, *maker.invars) for rows in self._dims(operand).values())
        if moved or not isinstance(rule, OpRule):
            return None
        own = rule.results[0][dim]
        operands = [
            self._bring(maker, operand, {each: rows for each, factors in enumerate(dims) if factors == own})
            for operand, dims in zip(maker.invars, rule.operands, strict=True)
        ]
        made = new_var(atom.aval)
        self.eqns.append(maker.replace(invars=operands, outvars=[made]))
        return made

    def _drawn(self, maker: Any, dim: int, rows: ExampleRows) -> Any:
        """Random bits, which depend on their number alone where devices can draw their own."""
        rule = REGISTRY.find(maker)
        if not isinstance(rule, OpRule) or any(factor.kind is Kind.WHOLE for factor in rule.factors):
            return None
        shape = maker.params["shape"]
        sizes = (*shape[:dim], rows.copies, rows.examples, rows.each, *shape[dim + 1 :])

        def draw(key: jax.Array) -> jax.Array:
            bits = maker.primitive.bind(key, **{**maker.params, "shape": sizes})
            return together(jnp.swapaxes(bits, dim, dim + 1), dim)

        return self._add(maker, draw, maker.invars)[0]

    def _by_rule(self, eqn: Any, rule: OpRule | None) -> None:
        if rule is None:
            self.eqns.append(eqn.replace(invars=[self._bring(eqn, atom, {}) for atom in eqn.invars]))
            return
        taken, made = _factors(rule)
        found: dict[int, ExampleRows] = {}
        for atom, dims in zip(eqn.invars, taken, strict=True):
            for dim, rows in self._dims(atom).items():
                for factor in dims[dim]:
                    found[factor] = max(found.get(factor, rows), rows, key=lambda each: each.copies)
        kept = {factor: rows for factor, rows in found.items() if _is_of_each_row(eqn, rule, factor, rows)}

        def kept_by(dims: Sequence[Sequence[int]]) -> Dims:
            return {dim: kept[each[0]] for dim, each in enumerate(dims) if each and each[0] in kept}

        invars = [self._bring(eqn, atom, kept_by(dims)) for atom, dims in zip(eqn.invars, taken, strict=True)]
        self.eqns.append(eqn.replace(invars=invars))
        self.known |= {var: kept_by(dims) for var, dims in zip(eqn.outvars, made, strict=True)}

    def _inside(
        self, eqn: Any, closed: Any, dims: Sequence[Dims], depends: Sequence[bool], wanted: Sequence
    ) -> tuple[_Level, Any]:
        level = _Level(closed, self.left_alone, eqn)
        return level, level.run(dims, depends, wanted)

    def _count(self, level: _Level, times: int = 1) -> None:
        for mine, theirs in ((self.kept, level.kept), (self.moved, level.moved)):
            mine.update({source: times * count for source, count in theirs.items()})

    def _scanned(self, eqn: Any) -> None:
        scan = Scan(eqn)
        stacks = [self._bring(eqn, atom, _without_first(self._dims(atom))) for atom in scan.operands.xs]
        consts, xs = list(map(self._dims, scan.operands.consts)), [_shifted(self._dims(atom), -1) for atom in stacks]
        fixed = list(map(self._depends, scan.operands.consts)), list(map(self._depends, stacks))
        ys: list = [None] * len(scan.results.ys)

        def iterate(carry: Sequence[Dims], depends: Sequence[bool]) -> tuple[_Level, Any]:
            flags = [*fixed[0], *depends, *fixed[1]]
            return self._inside(eqn, scan.closed, [*consts, *carry, *xs], flags, [*carry, *ys])

        carry, depends, level, body = self._settled(scan.operands.carry, iterate)
        self._count(level, scan.length)
        brought = [self._bring(eqn, atom, dims) for atom, dims in zip(scan.operands.carry, carry, strict=True)]
        invars = [*scan.operands.consts, *brought, *stacks]
        self.eqns.append(eqn.replace(invars=invars, params=eqn.params | {"jaxpr": body}))
        stacked = [_shifted(dims, 1) for dims in level.results[len(carry) :]]
        self.known |= zip(eqn.outvars, [*carry, *stacked], strict=True)
        flags = [*depends, *level.results_of_batch[len(carry) :]]
        self.of_batch -= {var for var, each in zip(eqn.outvars, flags, strict=True) if not each}

    def _repeated(self, eqn: Any) -> None:
        loop = While(eqn)
        cond_consts, body_consts, start = loop.operands
        consts, fixed = list(map(self._dims, body_consts)), list(map(self._depends, body_consts))

        def iterate(carry: Sequence[Dims], depends: Sequence[bool]) -> tuple[_Level, Any]:
            return self._inside(eqn, loop.closed_body, [*consts, *carry], [*fixed, *depends], carry)

        carry, depends, level, body = self._settled(start, iterate)
        self._count(level)
        tested, flags = list(map(self._dims, cond_consts)), list(map(self._depends, cond_consts))
        level, condition = self._inside(eqn, loop.closed_condition, [*tested, *carry], [*flags, *depends], [{}])
        self._count(level)
        brought = [self._bring(eqn, atom, dims) for atom, dims in zip(start, carry, strict=True)]
        self.eqns.append(loop.having(condition, body, loop.operands._replace(carry=brought)))
        self.known |= zip(eqn.outvars, carry, strict=True)

    def _settled(self, start: Sequence[Any], iterate: Callable) -> tuple[list[Dims], list[bool], _Level, Any]:
        """Where carried values have examples in every iteration, which depend on the batch, and such an iteration.

        What is empty at first may become what an iteration makes of it.
        """
        carry, depends, adopts = list(map(self._dims, start)), list(map(self._depends, start)), True
        while True:
            level, body = iterate(carry, depends)
            met = [_common(now, then, adopts) for now, then in zip(carry, level.results, strict=False)]
            on = [one or other for one, other in zip(depends, level.results_of_batch, strict=False)]
            if (met, on) == (carry, depends):
                return carry, depends, level, body
            carry, depends, adopts = met, on, False

    def _branched(self, eqn: Any) -> None:
        branch, (index, *operands) = Cond(eqn), eqn.invars
        dims, depends = list(map(self._dims, operands)), list(map(self._depends, operands))

        def run(wanted: Sequence) -> list[tuple[_Level, Any]]:
            return [self._inside(eqn, closed, dims, depends, wanted) for closed in branch.closed_branches]

        found = [level.results for level, _ in run([None] * len(eqn.outvars))]
        wanted = list(found[0])
        for other in found[1:]:
            wanted = [_common(one, each, adopts=True) for one, each in zip(wanted, other, strict=True)]
        levels = run(wanted)
        for level, _ in levels:
            self._count(level)
        index = self._bring(eqn, index, {})
        params = eqn.params | {"branches": tuple(closed for _, closed in levels)}
        self.eqns.append(eqn.replace(invars=[index, *operands], params=params))
        self.known |= zip(eqn.outvars, wanted, strict=True)


def _factors(rule: OpRule) -> tuple[list, list]:
    """The factors of every dimension of the operands, and of the results, but for those of one element."""
    operands, results = (
        [[tuple(each for each in factors if rule.factors[each].size > 1) for factors in dims] for dims in values]
        for values in (rule.operands, rule.results)
    )
    return operands, results


def _is_of_each_row(eqn: Any, rule: OpRule, factor: int, rows: ExampleRows) -> bool:
    """Whether ``eqn`` computes the same wherever rows are along ``factor``."""
    dims = [factors for each in itertools.chain(*_factors(rule)) for factors in each if factor in factors]
    by_number = rule.factors[factor].kind is Kind.WHOLE or factor in rule.by_number
    if by_number or any(factors != (factor,) for factors in dims):
        return False
    return not rows.are_moved or rule.emit is bind_unchanged or not _asks_which_part(eqn, rule, factor, rows.examples)


def _asks_which_part(eqn: Any, rule: OpRule, factor: int, parts: int) -> bool:
    """Whether a part of ``eqn`` is computed otherwise than the others."""
    mesh = MeshAxes(("part",), (parts,))
    splits = tuple(mesh.names if each == factor else () for each in range(len(rule.factors)))

    def block(atom: Any, dims: Sequence[Sequence[int]]) -> jax.ShapeDtypeStruct:
        sizes = zip(atom.aval.shape, dims, strict=True)
        return jax.ShapeDtypeStruct([size // parts if factor in own else size for size, own in sizes], atom.aval.dtype)

    try:
        jax.eval_shape(
            partial(rule.emit, LocalEquation(eqn, rule, splits, mesh)), *map(block, eqn.invars, rule.operands)
        )
    except (NameError, NotImplementedError):
        return True
    return False


def _common(one: Dims, other: Dims, adopts: bool) -> Dims:
    """Where two values have examples alike; if it ``adopts``, what only one has along a dimension counts for both."""
    either = {**other, **one} if adopts else one
    return {dim: rows for dim, rows in either.items() if rows == other.get(dim, rows if adopts else None)}


def _without_first(dims: Dims) -> Dims:
    return {dim: rows for dim, rows in dims.items() if dim}


def _shifted(dims: Dims, by: int) -> Dims:
    return {dim + by: rows for dim, rows in dims.items() if dim + by >= 0}
