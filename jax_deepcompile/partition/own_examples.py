"""Examples that a step makes itself: noise, points to train on, data that it closes over, queries for every example.

Every device can have its own rows of them, and none need go on with all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.placement import MeshAxes, Placement
from jax_deepcompile.ir.program import Port, Role
from jax_deepcompile.ir.traversal import equations, variables

_DRAWS = frozenset({"random_bits", "random_gamma"})


@dataclass(frozen=True)
class OwnExamples:
    """How they are told, and divided.

    What is drawn has as many rows as the batch, or it may be for all examples alike, as random features are. What all
    examples begin with, such as queries that are trained, is repeated as often as the batch has rows. A step without a
    batch has any number of rows drawn. One that draws nothing either, such as one for a full batch or a grid of points,
    has them at hand: most of what it closes over, counts, or makes of that has as many rows.

    Attributes:
      rows: the placement of examples.
      of_batch: how many rows the batch has; empty without one.
      of_state: shapes of leaves of the state, and of their slices: what has one of them is for such a leaf, as noise.
      at_hand: what is at hand, of the step's own jaxpr.
    """

    rows: Placement
    of_batch: frozenset[int]
    of_state: frozenset[tuple[int, ...]]
    at_hand: frozenset[jex.Var] = frozenset()

    def made(self, eqn: Equation, mesh: MeshAxes) -> Placement | None:
        """The placement of the result of ``eqn``, which reads nothing of the batch; None if that is no example, or
        cannot be divided."""
        dim = self._drawn(eqn) if eqn.primitive.name in _DRAWS else self._repeated(eqn)
        if dim is None:
            return None
        placement = self.rows.shifted(dim)
        return placement if placement.fits(eqn.outvars[0].aval.shape, mesh) else None

    def _drawn(self, eqn: Equation) -> int | None:
        shape = eqn.outvars[0].aval.shape
        are_examples = shape[0] in self.of_batch if shape and self.of_batch else shape not in self.of_state
        return 0 if shape and are_examples else None

    def _repeated(self, eqn: Equation) -> int | None:
        """The dimension along which something is repeated for every example."""
        if eqn.primitive.name != "broadcast_in_dim" or not eqn.invars[0].aval.shape:
            return None
        own = dict(zip(eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape, strict=True))
        repeated = (dim for dim, size in enumerate(eqn.params["shape"]) if own.get(dim, 1) != size)
        return next((dim for dim in repeated if eqn.params["shape"][dim] in self.of_batch), None)


def own_examples(jaxpr: jex.ClosedJaxpr, inputs: Sequence[Port], rows: Placement, mesh: MeshAxes) -> OwnExamples:
    """The examples of a step that takes ``inputs``; its batch is placed as ``rows``."""
    of_batch = frozenset(port.shape[0] for port in inputs if port.role is Role.BATCH)
    leaves = [port.shape for port in inputs if port.role.is_state and port.shape]
    of_state = frozenset((*leaves, *(shape[1:] for shape in leaves)))
    if of_batch or any(eqn.primitive.name in _DRAWS for eqn in equations(jaxpr)):
        return OwnExamples(rows, of_batch, of_state)
    at_hand: dict[int, list[jex.Var]] = {}
    for var in _made_of_no_argument(open_jaxpr(jaxpr)):
        shape = getattr(var.aval, "shape", ())
        if shape and shape not in of_state and rows.fits(shape, mesh):
            at_hand.setdefault(shape[0], []).append(var)
    most = max(at_hand.values(), key=lambda found: sum(map(size_bytes, found)), default=[])
    return OwnExamples(rows, of_batch, of_state, frozenset(most))


def _made_of_no_argument(jaxpr: jex.Jaxpr) -> list[jex.Var]:
    """What depends on no argument, where it meets what does."""
    made, met = set(jaxpr.constvars), dict[jex.Var, None]()
    for eqn in jaxpr.eqns:
        operands = variables(eqn.invars)
        if made.issuperset(operands):
            made.update(eqn.outvars)
        else:
            met |= dict.fromkeys(filter(made.__contains__, operands))
    return list(met)
