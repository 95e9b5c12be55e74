"""Whether a sharded step does what the step as written does: both run once on the same values, and are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_deepcompile._jax_compat import bind
from jax_deepcompile.ir.primitives import PRODUCTS
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.rewrite import Walk, with_renamed_operands
from jax_deepcompile.ir.traversal import equations
from jax_deepcompile.summary import Summarized, Summary

_ROUNDING = 10.0
"""How many times as much as its own rounding a sharded step may differ: it adds in another order everywhere."""

_SCALE = 0.02
"""Of values made up for shapes, and none is negative: some are second moments."""

_SHOWN = 5


@dataclass(frozen=True)
class LeafDifference:
    """How far the results of one leaf are apart.

    Attributes:
      path: where the user finds it.
      difference: of the sharded result from that of the step as written, in the 2-norm, in units of what the step
        changes of the leaf, or of what it returns where nothing goes in; of whole numbers the share that differs. None
        where a number is NaN or infinite in one run only, or all are in both.
      rounding: the same of the step as written, on values that differ by as much as its products are rounded, or with
        its sums in single precision.
      unknown: what all numbers are in both runs, so that nothing is compared; empty where some are finite.
    """

    path: str
    difference: float | None
    rounding: float
    unknown: str = ""


@dataclass(frozen=True, repr=False)
class Agreement(Summarized):
    """One step as written, on one device, and sharded.

    Attributes:
      name: of the step.
      mesh: that it is sharded over, in words.
      tolerance: what may differ however exact the step is.
      leaves: of what the step returns, those that differ most first.
    """

    name: str
    mesh: str
    tolerance: float
    leaves: tuple[LeafDifference, ...]

    @property
    def differing(self) -> tuple[LeafDifference, ...]:
        """Leaves that differ by more than the tolerance, and by more than rounding explains."""
        compared = (each for each in self.leaves if not each.unknown)
        return tuple(each for each in compared if each.difference is None or each.difference > self._allowed(each))

    @property
    def unknown(self) -> tuple[LeafDifference, ...]:
        """The leaves that have no finite number in one of the two runs, and so neither differ nor agree."""
        return tuple(each for each in self.leaves if each.unknown)

    @property
    def agrees(self) -> bool:
        """Whether all leaves were compared and none differs."""
        return not self.differing and not self.unknown

    def _allowed(self, each: LeafDifference) -> float:
        return max(self.tolerance, _ROUNDING * each.rounding)

    def _summary(self) -> Summary:
        others, unknown, count = self.differing, self.unknown, len(self.leaves)
        rest = count - len(others) - len(unknown)
        said = [f"{len(others)} of {count} leaves differ"] if others else []
        said += [f"nothing is known of {len(unknown)} of {count} leaves, without a finite number"] if unknown else []
        said += ["the rest agrees" if said else f"all {count} leaves agree"] if rest else []
        rows = [(each.path, _said(each)) for each in ((*others, *unknown) or self.leaves)[:_SHOWN]]
        return Summary(f"{self.name} as written and on {self.mesh}: {', '.join(said)}", tuple(rows))


def _said(each: LeafDifference) -> str:
    if each.unknown:
        return f"{each.unknown} in both: nothing is known of it"
    if each.difference is None:
        return "differs: NaN or infinite in one of both only"
    return f"differs by {each.difference:.1e} of its change, rounding by {each.rounding:.1e}"


def agreement(
    as_written: Callable, sharded: Callable, leaves: Sequence[Any], program: Program, tolerance: float
) -> Agreement:
    """Runs both on ``leaves``, which stay, and compares what they return.

    Args:
      as_written, sharded: from the step's inputs to its outputs, both flat.
      leaves: the inputs.
      program: what the step was traced to.
      tolerance: see ``Agreement``.
    """
    given = [jax.device_put(leaf, _place(program)) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    whole, coarsest = jax.jit(lambda *values: as_written(*values)), _coarsest(program)
    rounded = [_rounded(index, leaf, coarsest) for index, leaf in enumerate(given)]
    expected, nearly, exactly = whole(*given), whole(*rounded), _summed_exactly(as_written, given)
    found = sharded(*(jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves))
    before = {result: (given[place], rounded[place]) for place, result in program.state_outputs}
    compared = []
    for place, (port, left, right) in enumerate(zip(program.outputs, found, expected, strict=True)):
        start, near_it = before.get(place, (None, None))
        rounding = _apart(nearly[place], near_it, right, start) or 0.0
        if exactly is not None:
            rounding = max(rounding, _apart(exactly[place], start, right, start) or 0.0)
        difference = _apart(left, start, right, start)
        unknown = _not_finite(right, start) if difference == 0 else ""
        compared.append(LeafDifference(port.path, None if unknown else difference, rounding, unknown))
    compared.sort(key=lambda each: (-np.inf if each.difference is None else -each.difference, each.path))
    return Agreement(program.name, program.mesh_text, tolerance, tuple(compared))


def made_up(leaf: Any) -> Any:
    """Values for a shape; anything else as it is."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    generator = np.random.default_rng(_seed(leaf))
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape) if leaf.shape else jax.random.key(0)
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.asarray(_SCALE * np.abs(generator.standard_normal(leaf.shape)), leaf.dtype)
    most = 2 if leaf.shape else 1
    return jnp.asarray(generator.integers(0, most, leaf.shape), leaf.dtype)


def _seed(leaf: jax.ShapeDtypeStruct) -> int:
    return int.from_bytes(hashlib.sha256(f"{leaf.shape} {leaf.dtype}".encode()).digest()[:4], "little")


def _place(program: Program) -> NamedSharding:
    """One device; or those that the user's own shardings or ``shard_map``s name, and all is whole on each of them."""
    for eqn in equations(program.jaxpr):
        for value in jax.tree.leaves(list(eqn.params.values())):
            mesh = value.mesh if isinstance(value, NamedSharding) else value
            if isinstance(mesh, Mesh) and mesh.size > 1:
                return NamedSharding(mesh, PartitionSpec())
    # 2026-11: put on a bare device, an array keeps explicit axes of the mesh it was on in its type.
    return NamedSharding(Mesh(np.array(jax.local_devices()[:1]), "one"), PartitionSpec())


def _coarsest(program: Program) -> float:
    """The share by which the results of the products of ``program`` are rounded at most."""
    products = (eqn for eqn in equations(program.jaxpr) if eqn.primitive.name in PRODUCTS)
    made: list[Any] = [var.aval for eqn in products for var in eqn.outvars]
    return max(
        (float(jnp.finfo(each.dtype).eps) for each in made if jnp.issubdtype(each.dtype, jnp.inexact)), default=0
    )


def _summed_exactly(as_written: Callable, values: Sequence[Any]) -> Sequence[Any] | None:
    """What ``as_written`` makes of ``values`` if none of its sums is in half precision; None if none is as written.

    Such a sum of many values stops growing on a CPU, which rounds after each of them: less is lost by several devices.
    """
    traced = jax.make_jaxpr(lambda *values: as_written(*values))(*values)
    exact = _with_exact_sums(traced)
    return None if exact is traced else jax.jit(jex.jaxpr_as_fun(exact))(*jax.tree.leaves(list(values)))


def _with_exact_sums(closed: Any) -> Any:
    walk = Walk(closed, _with_exact_sums)
    for eqn in walk:
        if eqn.primitive.name != "reduce_sum" or eqn.outvars[0].aval.dtype not in (jnp.bfloat16, jnp.float16):
            walk.eqns.append(eqn)
            continue
        exact = jax.make_jaxpr(partial(_exact_sum, eqn))(eqn.invars[0].aval).jaxpr
        names = {exact.invars[0]: eqn.invars[0]}
        walk.eqns += [with_renamed_operands(inner, names) for inner in exact.eqns]
        walk.names[eqn.outvars[0]] = exact.outvars[0]
    return walk.result()


def _exact_sum(eqn: Any, values: jax.Array) -> jax.Array:
    (total,) = bind(eqn, [values.astype(jnp.float32)])
    return total.astype(values.dtype)


def _rounded(place: int, leaf: Any, share: float) -> Any:
    """``leaf`` with about half of its numbers changed by ``share``, or by as little as they can be if that is more."""
    if not isinstance(leaf, jax.Array | np.ndarray) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    up = jax.random.bernoulli(jax.random.key(place), shape=leaf.shape)
    return jnp.where(up, leaf * (1 + max(share, float(jnp.finfo(leaf.dtype).eps))), leaf).astype(leaf.dtype)


def _not_finite(values: Any, before: Any) -> str:
    """What all of ``values`` are, if that is no number; empty also where they are infinite as they were ``before``."""
    if not jnp.issubdtype(values.dtype, jnp.inexact) or jnp.isfinite(values).any() or not values.size:
        return ""
    if before is not None and (values == before).all():
        return ""
    is_nan = jnp.isnan(values)
    return "NaN" if is_nan.all() else "NaN or infinite" if is_nan.any() else "infinite"


def _apart(found: Any, found_from: Any, expected: Any, before: Any) -> float | None:
    """See ``LeafDifference``: ``found`` came of ``found_from``, ``expected`` of ``before``, both None if of nothing."""
    if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
        found, expected = jax.random.key_data(found), jax.random.key_data(expected)
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return float(np.mean(np.asarray(found) != np.asarray(expected))) if expected.size else 0.0
    kind = np.complex128 if jnp.issubdtype(expected.dtype, jnp.complexfloating) else np.float64
    left, right = np.asarray(found, kind).ravel(), np.asarray(expected, kind).ravel()
    finite = np.isfinite(left) & np.isfinite(right)
    if not np.array_equal(left[~finite], right[~finite], equal_nan=True):
        return None

    def change(after: np.ndarray, start: Any) -> np.ndarray:
        return after[finite] - (0 if start is None else np.asarray(start, kind).ravel()[finite])

    one, other = change(left, found_from), change(right, before)
    if (one == other).all():
        return 0.0
    unit = np.linalg.norm(other) or np.linalg.norm(right[finite]) or 1.0
    return float(np.linalg.norm(one - other) / unit)
