"""Which arguments' memory a step may have for what it returns in their place.

Gradients look like new parameters, and carry on the parameters of a penalty. So what is returned in an argument's place
is its successor beyond doubt only if the user said so, if an optimizer's state is there, or if the argument has leaves
that no gradient has: integers, or moments and averages kept by hand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_deepcompile.frontend.call import PureCall
from jax_deepcompile.frontend.signature import Signature
from jax_deepcompile.ir.lineage import Lineage, members
from jax_deepcompile.ir.program import Port


@dataclass(frozen=True)
class Donation:
    """Whether the step may have a returned argument's memory, and why or why not."""

    is_donated: bool
    reason: str


def donations(
    call: PureCall, signature: Signature, ports: Sequence[Port], pairs: Mapping[int, int], lineage: Lineage, kept: Kept
) -> dict[int, Donation]:
    """By position, of all arguments that are returned anew; ``pairs`` are leaves, and results that are new values."""
    found, start = {}, 0
    for position, arg in enumerate(call.args):
        leaves = range(start, start + len(jax.tree.leaves(arg)))
        start = leaves.stop
        if not leaves or leaves[0] not in pairs:
            continue
        if signature.trains:
            found[position] = Donation(True, "returned anew")
        elif call.step.arguments[position].is_donated:
            found[position] = Donation(True, "jax.jit was told to donate it")
        elif all(lineage.is_input(pairs[leaf]) for leaf in leaves):
            found[position] = Donation(False, "returned as it is")
        elif reason := next(
            filter(None, (_no_gradient(ports[leaf]) or kept.updated.get(leaf) for leaf in leaves)), None
        ):
            found[position] = Donation(True, f"returned anew: {reason}")
        else:
            argnum = call.step.arguments[position].position
            reason = f"what is returned may be its gradients; state_argnums={argnum} says that it is the next state"
            found[position] = Donation(False, reason)
    return found


def _no_gradient(port: Port) -> str | None:
    is_other = "key<" not in port.dtype and not jnp.issubdtype(port.dtype, jnp.floating)
    return f"{port.path} is {port.dtype}, as no gradient is" if is_other else None


@dataclass(frozen=True)
class Kept:
    """What a step keeps by hand beside its parameters, and how that shows.

    Elementwise arithmetic alone touches a moment or an average, where a parameter goes into products and sums on its
    way to the loss. Its new value carries it on. And a parameter of its shape goes with it: one whose new value carries
    the moment, or one that the average carries. That the former is updated too is sure where the moment carries no
    parameter; gradients of a penalty for being far from an average carry the average, which carries the parameters.

    Attributes:
      moments: positions of leaves that are moments or averages.
      updated: those and the parameters that they update, whose new values are not their gradients, and what tells.
    """

    moments: frozenset[int]
    updated: Mapping[int, str]

    @classmethod
    def of(cls, ports: Sequence[Port], pairs: Mapping[int, int], lineage: Lineage) -> Kept:
        """``pairs`` are leaves, and results that are new values of them."""
        carried = {leaf: lineage.carried[result] for leaf, result in pairs.items()}
        alike: dict[tuple[int, ...], int] = defaultdict(int)
        elementwise = 0
        for leaf, result in pairs.items():
            if ports[leaf].shape and "float" in ports[leaf].dtype:
                alike[ports[leaf].shape] |= 1 << leaf
                is_kept = carried[leaf] >> leaf & 1 and not lineage.is_input(result) and not lineage.mixed >> leaf & 1
                elementwise |= is_kept << leaf
        kept: set[int] = set()
        updated: dict[int, str] = {}
        for leaf, bits in carried.items():
            others = bits & alike[ports[leaf].shape] & ~(1 << leaf)
            moments = [other for other in members(others) if elementwise >> other & 1]
            if others and elementwise >> leaf & 1:
                moments.append(leaf)
            kept.update(moments)
            updated |= {moment: f"elementwise arithmetic alone touches {ports[moment].path}" for moment in moments}
            if any(moment != leaf and not carried[moment] >> leaf & 1 for moment in moments):
                told = f"{ports[moments[0]].path}, which elementwise arithmetic alone touches, updates it"
                updated.setdefault(leaf, told)
        return cls(frozenset(kept), updated)
