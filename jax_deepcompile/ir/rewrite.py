"""One walk over a jaxpr that makes another: operands renamed, regions rewritten, equations added or left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr, provenance
from jax_deepcompile.ir.primitives import closed_like


def renamed(atom: Any, names: Mapping) -> Any:
    """What ``names`` says for a variable; literals and other variables as they are."""
    return atom if isinstance(atom, jex.Literal) else names.get(atom, atom)


def with_renamed_operands(eqn: Any, names: Mapping) -> Any:
    """``eqn`` reading what ``names`` says; itself if that says nothing of what it reads."""
    invars = [renamed(atom, names) for atom in eqn.invars]
    same = all(new is old for new, old in zip(invars, eqn.invars, strict=True))
    return eqn if same else eqn.replace(invars=invars)


def inlined(made: jex.ClosedJaxpr, inputs: Sequence[Any], outputs: Sequence[jex.Var]) -> list:
    """The equations of ``made``, which has no constants, reading ``inputs`` and making ``outputs``."""
    jaxpr = open_jaxpr(made)
    results = dict(zip(jaxpr.outvars, outputs, strict=True))
    read = dict(zip(jaxpr.invars, inputs, strict=True)) | results
    eqns = [with_renamed_operands(eqn, read) for eqn in jaxpr.eqns]
    return [eqn.replace(outvars=[results.get(var, var) for var in eqn.outvars]) for eqn in eqns]


def in_place_of(
    eqn: Any, compute: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[jex.Var] = ()
) -> tuple[list, list]:
    """The equations of ``compute``, with the line of ``eqn``, and their results, which are ``outputs`` if given."""
    with provenance(eqn):
        made = jax.make_jaxpr(compute)(*map(abstract, inputs))
    results = list(outputs) or open_jaxpr(made).outvars
    return inlined(made, inputs, results), results


def abstract(atom: Any) -> jax.ShapeDtypeStruct:
    """The type of a variable or literal, to trace a function for."""
    aval = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def with_regions(eqn: Any, rewrite: Callable[[Any], Any]) -> Any:
    """``eqn`` with the closed jaxprs among its parameters rewritten; itself if they stay as they are."""
    params = {}
    for name, value in eqn.params.items():
        if isinstance(value, jex.ClosedJaxpr):
            params[name] = rewrite(value)
        elif type(value) is tuple and any(isinstance(item, jex.ClosedJaxpr) for item in value):
            items = tuple(rewrite(item) if isinstance(item, jex.ClosedJaxpr) else item for item in value)
            params[name] = items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    changed = {name: value for name, value in params.items() if value is not eqn.params[name]}
    return eqn.replace(params={**eqn.params, **changed}) if changed else eqn


@dataclass
class Walk:
    """A new jaxpr in the making.

    Going through it yields the equations of the old one in order, their operands renamed; what the new one has in their
    place is appended to ``eqns``. A jaxpr in which all sums with zero are left out::

        def without_zeros(closed):
            walk = Walk(closed, without_zeros)
            for eqn in walk:
                if eqn.primitive.name == "add" and is_zero(eqn.invars[1]):
                    walk.names[eqn.outvars[0]] = eqn.invars[0]
                else:
                    walk.eqns.append(eqn)
            return walk.result()

    Attributes:
      given: the old jaxpr, closed or open.
      regions: rewrites the closed jaxprs of an equation before it is yielded; None leaves them alone.
      within: names of the primitives whose jaxprs it rewrites; None for all.
      names: what is read from now on in the place of a variable.
      eqns: of the new jaxpr.
    """

    given: Any
    regions: Callable[[Any], Any] | None = None
    within: Collection[str] | None = None
    names: dict = field(default_factory=dict)
    eqns: list = field(default_factory=list)

    @property
    def jaxpr(self) -> jex.Jaxpr:
        """The old jaxpr, open."""
        return open_jaxpr(self.given)

    def __iter__(self) -> Iterator[Any]:
        for eqn in self.jaxpr.eqns:
            if self.regions is not None and (self.within is None or eqn.primitive.name in self.within):
                eqn = with_regions(eqn, self.regions)
            yield with_renamed_operands(eqn, self.names) if self.names else eqn

    @property
    def outvars(self) -> list:
        """Of the new jaxpr."""
        return [renamed(atom, self.names) for atom in self.jaxpr.outvars]

    def result(self) -> Any:
        """The new jaxpr, closed if the old one is; the old one itself if nothing has changed."""
        old, outvars = self.jaxpr, self.outvars
        pairs = [*zip(self.eqns, old.eqns, strict=False), *zip(outvars, old.outvars, strict=True)]
        if len(self.eqns) == len(old.eqns) and all(new is before for new, before in pairs):
            return self.given
        return closed_like(self.given, old.replace(eqns=self.eqns, outvars=outvars))


def without_barriers(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    """``jaxpr`` with every result of an ``optimization_barrier`` read as its operand."""
    walk = Walk(jaxpr, names=unguarded(jaxpr))
    walk.eqns += (eqn for eqn in walk if eqn.primitive.name != "optimization_barrier")
    return walk.result()


def unguarded(jaxpr: jex.Jaxpr) -> dict:
    """For every result of an ``optimization_barrier`` what went into it."""
    known: dict = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier":
            known.update(zip(eqn.outvars, [renamed(atom, known) for atom in eqn.invars], strict=True))
    return known
