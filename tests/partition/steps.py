"""Small steps, and what the partitioner makes of them in words short enough to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.traversal import nested_jaxprs
from jax_deepcompile.stages import TracedStep

FLAT = {"fsdp": 8}
HYBRID = {"data": 2, "fsdp": 4}
D = 16
BATCH = {"x": (32, D), "y": (32, D)}
MLP = {"w0": (D, D), "w1": (D, D), "w2": (D, D)}
ADAM = optax.adam(1e-3)

GATHER = "all_gather fsdp: f32[2,16] -> f32[16,16]"
SCATTER = "reduce_scatter fsdp: f32[16,16] -> f32[2,16]"
SUM = "psum fsdp: f32[] -> f32[]"
COLLECTIVES = ("all_gather", "reduce_scatter", "psum", "all_to_all", "pmax", "pmin", "ppermute")


def squares(y, batch) -> jax.Array:
    return jnp.mean((y - batch["y"]) ** 2)


def mlp(p, batch) -> jax.Array:
    """The loss of a perceptron with a layer for every matrix."""
    x = batch["x"]
    for name in sorted(p):
        x = jnp.tanh(x @ p[name])
    return squares(x, batch)


def descend(params, gradients) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)


def shapes(tree: Any, dtype=jnp.float32) -> Any:
    """Tuples of sizes as abstract arrays."""

    def is_shape(value) -> bool:
        return isinstance(value, tuple) and all(isinstance(size, int) for size in value)

    def abstract(leaf):
        return jax.ShapeDtypeStruct(leaf, dtype) if is_shape(leaf) else leaf

    return jax.tree.map(abstract, tree, is_leaf=is_shape)


def training_step(loss: Callable, optimizer: optax.GradientTransformation) -> Callable:
    """``(state, batch) -> (state, loss)`` for the loss of ``(params, batch)``."""

    def step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value

    return step


def trace_training(
    loss: Callable,
    params: Any,
    batch: Any,
    mesh: Mapping[str, int] = FLAT,
    optimizer: optax.GradientTransformation | None = None,
) -> TracedStep:
    """The step that trains ``params`` (a tree of shapes) on ``loss``, by plain descent if nothing else is said."""
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    params = shapes(params)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    return deepcompile.shard(training_step(loss, optimizer), mesh).trace(state, shapes(batch))


def trace(step: Callable, state: Any, batch: Any, mesh: Mapping[str, int] = FLAT, **options: Any) -> TracedStep:
    return deepcompile.shard(step, mesh, **options).trace(shapes(state), shapes(batch))


def lines(program: Program, only: Sequence[str] = ()) -> list[str]:
    """One line an equation, ``primitive operands -> results``; what a loop or branch holds follows it, indented."""
    return list(_lines(open_jaxpr(program.jaxpr), only, ""))


def _lines(jaxpr, only: Sequence[str], indent: str) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = [list(_lines(open_jaxpr(body), only, f"{indent}  ")) for body in nested_jaxprs(eqn)]
        if inner:
            length = f" {eqn.params['length']}" if name == "scan" else ""
            if not only or any(inner):
                yield f"{indent}{name}{length}"
            for body in inner:
                yield from body
        elif not only or name in only:
            axes = eqn.params.get("axis_name", eqn.params.get("axes", ())) if name in COLLECTIVES else ()
            over = f" {','.join(axes if isinstance(axes, tuple) else (axes,))}:" if axes else ""
            yield f"{indent}{name}{over} {_types(eqn.invars)} -> {_types(eqn.outvars)}"


def _types(atoms) -> str:
    return " ".join(atom.aval.str_short(short_dtypes=True) for atom in atoms)


def moves(traced: TracedStep) -> list[str]:
    """The collectives of the local program, in order."""
    return lines(traced.sharded, COLLECTIVES)


def count(traced: TracedStep, name: str) -> int:
    return sum(line.split()[0] == name for line in moves(traced))


def placements(traced: TracedStep) -> dict[str, str]:
    """Where every input lives."""
    program = traced.sharded
    return {port.path: port.where.describe(program.mesh) for port in program.inputs}


def reasons(traced: TracedStep) -> dict[str, str]:
    return {leaf.path: leaf.reason for leaf in traced.partitioned.leaves if leaf.reason}
