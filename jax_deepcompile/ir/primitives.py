"""What the package knows of JAX's primitives: a table of their traits; typed views of loops, branches, collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, open_jaxpr, scan_counts
from jax_deepcompile.ir.equation import Equation

_TRAITS = {
    # Elementwise arithmetic.
    "add add_any": "elementwise addition keeps_zero widening",
    "sub neg": "elementwise keeps_zero widening",
    "mul": "elementwise cheap widening",
    "div": "elementwise widening",
    "abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt": "elementwise",
    "ceil clamp clz cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma": "elementwise",
    "igamma_grad_a igammac integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max": "elementwise",
    "min mulhi ne nextafter not one_minus_square or polygamma polynomial population_count pow": "elementwise",
    "reciprocal regularized_incomplete_beta rem round rsqrt select_n shift_left": "elementwise",
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh xor zeta": "elementwise",
    "convert_element_type": "elementwise cheap keeps_zero keeps_number recomputed widening",
    "copy": "elementwise cheap keeps_zero widening",
    "reduce_precision": "elementwise cheap",
    "name": "widening",
    # Data movement.
    "reshape": "elementwise cheap keeps_zero view widening",
    "squeeze": "cheap keeps_zero view widening",
    "layout_constraint": "cheap view",
    "stop_gradient": "cheap keeps_number view",
    "optimization_barrier": "keeps_number view",
    "transpose": "cheap keeps_zero widening",
    "broadcast_in_dim": "cheap keeps_zero recomputed widening",
    "iota": "recomputed",
    "slice": "cheap recomputed slice",
    "split": "recomputed slice",
    "dynamic_slice": "slice",
    "dynamic_update_slice": "update",
    "gather": "mixing nonlocal",
    "rev": "nonlocal",
    "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max": "scatter update",
    # Axes of the mesh.
    "psum": "device_sum keeps_zero running",
    "pmax pmin": "running",
    "all_gather": "cheap running",
    "reduce_scatter": "device_sum keeps_zero mixing",
    "axis_index": "recomputed",
    # Kernels of their own.
    "dot_general conv_general_dilated": "anchor mixing nonlocal product",
    "ragged_dot_general": "mixing product",
    "dot_product_attention_fwd dot_product_attention_fwd_wrapper": "attention product",
    "dot_product_attention_bwd dot_product_attention_bwd_wrapper": "attention product",
    "cholesky pallas_call": "expensive",
    "eigh fft lu qr sort svd triangular_solve": "expensive mixing nonlocal",
    # Results of many elements each.
    "argmax argmin cumlogsumexp cummax cummin cumprod cumsum scaled_matmul top_k": "mixing nonlocal",
    "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_xor": "mixing",
    "reduce_sum": "keeps_zero mixing",
    "reduce_window reduce_window_max reduce_window_min reduce_window_sum": "mixing",
    # Random numbers and memory as it is.
    "random_bits random_split threefry2x32": "mixing",
    "rng_uniform empty empty2": "unrepeatable",
    # Control flow.
    "scan": "anchor control_flow",
    "while": "control_flow nonlocal",
    "cond": "control_flow",
}
"""Names of primitives and their traits, in words; what has none of them is not here."""


def _having(trait: str) -> frozenset[str]:
    return frozenset(name for names, traits in _TRAITS.items() if trait in traits.split() for name in names.split())


ADDITIONS = _having("addition")  # sums of two
ANCHORS = _having("anchor")  # work that makes an array that others can wait for
ATTENTION = _having("attention")  # cuDNN's fused attention and its gradient
CHEAP = _having("cheap")  # work on a shard that may be done again, or earlier, together with its gather
CONTROL_FLOW = _having("control_flow")  # loops and branches
DEVICE_SUMS = _having("device_sum")  # collectives that add up what devices have
ELEMENTWISE = _having("elementwise")  # its operands of the result's shape want its placement
EXPENSIVE = _having("expensive")  # work that is not done twice, besides products, collectives and loops
KEEPS_NUMBER = _having("keeps_number")  # its results are whole numbers equal to its operands, if those are
KEEPS_ZERO = _having("keeps_zero")  # its result is zero where all operands are
MIXING = _having("mixing")  # its results are made of many elements at once
NONLOCAL = _having("nonlocal")  # make an element of the result of others than the one in its place
PRODUCTS = _having("product")  # run as kernels of their own
RECOMPUTED = _having("recomputed")  # what XLA rather computes again than writes to memory
RUNNING = _having("running")  # collectives that mean something over iterations too: a total, an extremum
SCATTERS = _having("scatter")  # put values where indices say
SLICES = _having("slice")  # cut pieces out of an operand
UNREPEATABLE = _having("unrepeatable")  # make another value every time
UPDATES = _having("update")  # replace a part of their first operand
VIEWS = _having("view")  # other names for what is in memory already
WIDENING = _having("widening")  # what numbers are made with of how they are stored: next to nothing beside reading that

COLLECTIVES = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
"""What XLA calls the collectives of a local program."""

NAMES_AXES = frozenset({*COLLECTIVES, "psum_invariant", "axis_index"})
"""Primitives that only a local program has: they communicate over axes of the mesh, or ask for a place along one."""

_CALLED = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "remat2": "jaxpr",
}
"""Primitives that compute, once and on their operands, the jaxpr in the parameter named here."""


def called(eqn: Equation) -> Any:
    """The jaxpr that ``eqn`` calls, once and on its operands; None unless it is a call."""
    return eqn.params.get(_CALLED.get(eqn.primitive.name, ""))


def axis_names(eqn: Equation) -> tuple:
    """What ``eqn`` communicates over, or asks about: names of axes; numbers for dimensions that ``vmap`` made."""
    names: list = []
    for key in ("axes", "axis_name"):
        value = eqn.params.get(key, ())
        names += value if isinstance(value, (tuple, list)) else (value,)
    return tuple(names)


def closed_like(closed: Any, jaxpr: jex.Jaxpr) -> Any:
    """``jaxpr`` with the constants of ``closed``; an open one stays open."""
    return jex.ClosedJaxpr(jaxpr, closed_consts(closed)) if isinstance(closed, jex.ClosedJaxpr) else jaxpr


def _param(name: str, *default: Any) -> Any:
    """The attribute of a view that is a parameter of its equation."""
    return property(lambda view: view.eqn.params.get(name, *default) if default else view.eqn.params[name])


@dataclass(frozen=True)
class Call:
    """An equation that calls a jaxpr."""

    eqn: Any
    in_shardings = _param("in_shardings", ())  # that the user gave a ``jit``
    out_shardings = _param("out_shardings", ())

    @property
    def guards(self) -> tuple[bool, ...]:
        """Of which operands a recomputed region waits; the forward pass, and what is computed once, waits of none."""
        params, operands = self.eqn.params, self.eqn.invars
        guards = params["prevent_cse"] if params.get("differentiated") else False
        return (guards,) * len(operands) if isinstance(guards, bool) else guards


class ScanInputs(NamedTuple):
    """One thing for each operand of a ``scan``, or each input of its body."""

    consts: list
    carry: list
    xs: list


class ScanOutputs(NamedTuple):
    """One thing for each result of a ``scan``, or each output of its body."""

    carry: list
    ys: list


@dataclass(frozen=True)
class Scan:
    """A ``scan`` equation.

    An iteration reads the constants, the carry of the one before, and its slice of each stack of ``xs``; it makes the
    next carry, and its slice of each stack of ``ys``.
    """

    eqn: Any
    length = _param("length")
    reverse = _param("reverse")
    closed = _param("jaxpr")  # the body and its constants

    @property
    def options(self) -> dict[str, Any]:
        """How it runs, as ``lax.scan`` is told."""
        params = self.eqn.params
        return {name: params[name] for name in ("reverse", "unroll", "_split_transpose") if name in params}

    @cached_property
    def _counts(self) -> tuple[int, int]:
        return scan_counts(self.eqn)

    @property
    def num_consts(self) -> int:
        return self._counts[0]

    @property
    def num_carry(self) -> int:
        return self._counts[1]

    @property
    def body(self) -> Any:
        return open_jaxpr(self.closed)

    def split(self, values: Iterable) -> ScanInputs:
        """``values``, one for each operand, by what the operands are; what there is more of counts as stacks."""
        values, (consts, carry) = list(values), self._counts
        return ScanInputs(values[:consts], values[consts : consts + carry], values[consts + carry :])

    def split_results(self, values: Iterable) -> ScanOutputs:
        """``values``, one for each result, by what the results are."""
        values = list(values)
        return ScanOutputs(values[: self.num_carry], values[self.num_carry :])

    @property
    def operands(self) -> ScanInputs:
        return self.split(self.eqn.invars)

    @property
    def inputs(self) -> ScanInputs:
        """Variables of the body."""
        return self.split(self.body.invars)

    @property
    def results(self) -> ScanOutputs:
        return self.split_results(self.eqn.outvars)

    @property
    def outputs(self) -> ScanOutputs:
        """Atoms of the body."""
        return self.split_results(self.body.outvars)

    def with_body(self, body: jex.Jaxpr) -> Any:
        """The equation with a body of the same inputs, outputs and constants; itself if it has that body."""
        if body is self.body:
            return self.eqn
        return self.eqn.replace(params=self.eqn.params | {"jaxpr": closed_like(self.closed, body)})


class WhileInputs(NamedTuple):
    """One thing for each operand of a ``while``."""

    cond_consts: list
    body_consts: list
    carry: list


@dataclass(frozen=True)
class While:
    """A ``while`` equation: its condition and its body each read constants of their own, and the carry."""

    eqn: Any
    closed_condition = _param("cond_jaxpr")
    closed_body = _param("body_jaxpr")
    num_cond_consts = _param("cond_nconsts")
    num_body_consts = _param("body_nconsts")

    @property
    def condition(self) -> Any:
        return open_jaxpr(self.closed_condition)

    @property
    def body(self) -> Any:
        return open_jaxpr(self.closed_body)

    def split(self, values: Iterable) -> WhileInputs:
        """``values``, one for each operand, by what the operands are."""
        values, conds = list(values), self.num_cond_consts
        carried = conds + self.num_body_consts
        return WhileInputs(values[:conds], values[conds:carried], values[carried:])

    @property
    def operands(self) -> WhileInputs:
        return self.split(self.eqn.invars)

    def having(self, condition: Any, body: Any, operands: WhileInputs) -> Any:
        """The loop with this condition and body, closed as its own are, of these operands."""
        params = {"cond_jaxpr": condition, "cond_nconsts": len(operands.cond_consts)}
        params |= {"body_jaxpr": body, "body_nconsts": len(operands.body_consts)}
        invars = [*operands.cond_consts, *operands.body_consts, *operands.carry]
        return self.eqn.replace(invars=invars, params=self.eqn.params | params)


@dataclass(frozen=True)
class Cond:
    """A ``cond`` equation: the index of a branch, and what every branch reads."""

    eqn: Any
    closed_branches = _param("branches")
    platforms = _param("branches_platforms", ())  # of ``lax.platform_dependent``: those of each branch, None for all

    @property
    def branches(self) -> list:
        return [open_jaxpr(branch) for branch in self.closed_branches]

    @property
    def operands(self) -> list:
        return self.eqn.invars[1:]


@dataclass(frozen=True)
class ShardMap:
    """A ``shard_map`` equation of the user's."""

    eqn: Any
    closed = _param("jaxpr")  # the body and its constants
    in_specs = _param("in_specs")
    out_specs = _param("out_specs")

    @property
    def sizes(self) -> dict[str, int]:
        """Of the axes of its mesh."""
        return dict(self.eqn.params["mesh"].shape)

    @property
    def axes(self) -> frozenset[str]:
        """Those of them that the body may communicate over."""
        return frozenset(self.eqn.params["newly_manual_axes"])


_DIMENSIONS = {"all_gather": "all_gather_dimension", "reduce_scatter": "scatter_dimension"}


@dataclass(frozen=True)
class Collective:
    """One of ``COLLECTIVES``."""

    eqn: Any
    size = _param("axis_size")  # how many devices take part in a gather or reduce-scatter

    @property
    def kind(self) -> str:
        """XLA's name for it."""
        return COLLECTIVES[self.eqn.primitive.name]

    @property
    def axes(self) -> tuple:
        """What it is over."""
        return axis_names(self.eqn)

    @property
    def parts_along(self) -> int:
        """The dimension along which a gather or reduce-scatter has the parts of devices; it may be one more."""
        return self.eqn.params[_DIMENSIONS[self.eqn.primitive.name]]

    @property
    def dimension(self) -> int | None:
        """The one that a gather or reduce-scatter makes longer or shorter; None for those that keep a shape."""
        changes = self.eqn.primitive.name in _DIMENSIONS and self.eqn.params["tiled"]
        return self.parts_along if changes else None

    def along(self, dimension: int, operands: Sequence, results: Sequence) -> Any:
        """A gather or reduce-scatter like this one along another dimension."""
        params = self.eqn.params | {_DIMENSIONS[self.eqn.primitive.name]: dimension}
        return self.eqn.replace(invars=list(operands), outvars=list(results), params=params)
