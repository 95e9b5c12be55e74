"""Windowed reductions: dimensions whose windows are single elements split freely, the others stay whole."""

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.rules.base import OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import rule

_FORMS = {
    "select_and_gather_add": ("aa", "w"),  # tangents, of which each window takes that of the element it selects
    "select_and_scatter_add": ("wa", "a"),  # sources, each added where its window selects
    "select_and_scatter": ("aw.", "a"),
}
"""What operands and results are: whole arrays, arrays with an element for each window, or scalars. By default operands
are arrays, then scalars to start from, and results are of windows."""

_LINEAR = ("reduce_window_sum", "select_and_gather_add", "select_and_scatter_add")


@rule("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", *_FORMS)
def windowed(eqn: Equation) -> OpRule:
    name, params, count = eqn.primitive.name, eqn.params, len(eqn.outvars)
    form = _FORMS.get(name, ("a" * count + "." * (len(eqn.invars) - count), "w" * count))
    shapes = {kind: var.aval.shape for kind, var in zip("".join(form), (*eqn.invars, *eqn.outvars), strict=True)}
    steps = (
        params["window_dimensions"],
        params["window_strides"],
        params.get("base_dilation", (1,) * len(shapes["a"])),
    )
    single = [
        each == (1, 1, 1) and tuple(padding) == (0, 0)
        for each, padding in zip(zip(*steps, strict=True), params["padding"], strict=True)
    ]
    builder = RuleBuilder()
    arrays, windows = builder.shared(shapes["a"], shapes["w"], single)
    dims = {"a": arrays, "w": windows, ".": ()}
    operands, results = ([dims[kind] for kind in kinds] for kinds in form)
    return builder.build(operands, results, linear=[(0,)] if name in _LINEAR else ())
