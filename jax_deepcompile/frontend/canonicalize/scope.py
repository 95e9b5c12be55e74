"""Where a value comes from: through equations, into loops and branches, and out of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, open_jaxpr


class Scope:
    """Where the variables of one jaxpr come from.

    Attributes:
      jaxpr: the jaxpr, closed.
      constants: values of its constants.
      definitions: for each computed variable its equation, and which of the results it is.
      passed: for inputs of a loop's body or a branch the scope outside, what it passes, and how many leading dimensions
        the loop takes off. What a loop carries is not known.
    """

    def __init__(self, closed, outer: Scope | None = None, operands: Sequence = ()) -> None:
        jaxpr = open_jaxpr(closed)
        self.jaxpr = closed
        self.constants: dict = dict(zip(jaxpr.constvars, closed_consts(closed), strict=True))
        self.definitions: dict = {var: (eqn, index) for eqn in jaxpr.eqns for index, var in enumerate(eqn.outvars)}
        self.passed: dict = {
            var: (outer, atom, len(shape_of(atom)) - len(shape_of(var)))
            for var, atom in zip(jaxpr.invars, operands, strict=False)
            if atom is not None
        }
        self._regions: dict = {}

    def maker(self, atom) -> tuple[jex.JaxprEqn | None, int]:
        return (None, 0) if isinstance(atom, jex.Literal) else self.definitions.get(atom, (None, 0))

    def regions(self, eqn: jex.JaxprEqn) -> dict[str, list[Scope]]:
        """The jaxprs of a loop or branch, by the name of their parameter."""
        if id(eqn) not in self._regions:
            self._regions[id(eqn)] = {
                name: [Scope(body, self, operands) for body in bodies] for name, bodies, operands in _regions(eqn)
            }
        return self._regions[id(eqn)]


def shape_of(atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _regions(eqn: jex.JaxprEqn) -> Iterator[tuple[str, Sequence, list]]:
    """For each parameter with jaxprs: its name, the jaxprs, and what is given to their inputs; None if carried."""
    atoms, params = list(eqn.invars), eqn.params
    match eqn.primitive.name:
        case "scan":
            consts, carried = whole_operands(eqn)
            yield "jaxpr", [params["jaxpr"]], [*atoms[:consts], *[None] * carried, *atoms[consts + carried :]]
        case "while":
            conds, bodies = params["cond_nconsts"], params["body_nconsts"]
            carry = [None] * (len(atoms) - conds - bodies)
            yield "cond_jaxpr", [params["cond_jaxpr"]], [*atoms[:conds], *carry]
            yield "body_jaxpr", [params["body_jaxpr"]], [*atoms[conds : conds + bodies], *carry]
        case "cond":
            yield "branches", params["branches"], atoms[1:]


def whole_operands(eqn: jex.JaxprEqn) -> tuple[int, int]:
    """How many constants a scan has and how much it carries, from ranks: versions differ in which parameter says so."""
    body = open_jaxpr(eqn.params["jaxpr"])
    whole, carried = (
        sum(len(shape_of(a)) == len(shape_of(b)) for a, b in zip(outside, inside, strict=True))
        for outside, inside in ((eqn.invars, body.invars), (eqn.outvars, body.outvars))
    )
    return whole - carried, carried
