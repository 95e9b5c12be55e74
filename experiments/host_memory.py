"""Training state and activations in the host's memory as users of ``jax.jit`` have them there: by memory kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import optax
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import Mesh

from jax_deepcompile import Program
from jax_deepcompile.costs.devices import as_if_here
from jax_deepcompile.lowering.emit import sharding_of

_HOST_KIND = "pinned_host"

ACTIVATIONS_ON_HOST = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["query", "key", "value", "context", "out", "gate", "up", "down"],
    offload_src="device",
    offload_dst=_HOST_KIND,
)
"""A ``remat_policy`` of a Llama: all that its layers name is on the host from forward to backward."""


def moments_passing_through(step: Callable, after_backward: bool) -> Callable:
    """``step`` of a ``TrainState``, whose moments are copied in from the host and out to it by the update.

    Args:
      step: ``(state, batch) -> (state, loss)``.
      after_backward: whether copies in wait for all gradients; else XLA's scheduler begins them when it likes.
    """

    def stepped(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        new, loss = step(state.replace(tx=_passing_through(state.tx, after_backward)), batch)
        return new.replace(tx=state.tx), loss

    return stepped


def _passing_through(optimizer: Any, after_backward: bool) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if after_backward:
            state, updates = lax.optimization_barrier((state, updates))
        updates, state = optimizer.update(updates, _moved(state, jax.memory.Space.Device), params)
        return updates, _moved(state, jax.memory.Space.Host)

    return optax.GradientTransformation(optimizer.init, update)


def _moved(state: Any, space: Any) -> Any:
    """Scalars stay."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, space) if leaf.ndim else leaf, state)


def with_moments_on_host(program: Program) -> Program:
    """``program``, in the local view, that finds its optimizer's arrays on the host, and leaves them there."""
    inputs, outputs = list(program.inputs), list(program.outputs)
    for place, successor in program.state_outputs:
        if inputs[place].role == "optimizer" and inputs[place].shape:
            inputs[place] = replace(inputs[place], memory_kind=_HOST_KIND)
            outputs[successor] = replace(outputs[successor], memory_kind=_HOST_KIND)
    return program.replace(inputs=tuple(inputs), outputs=tuple(outputs))


def traced(step: Callable, given: tuple, program: Program, mesh: Mesh) -> jax.stages.Traced:
    """``step`` under ``jax.jit``, which donates its first argument.

    Args:
      step: of global arrays.
      given: its arguments, or their shapes.
      program: its local view, which says where arguments and results are.
      mesh: of devices that need not be here.
    """
    leaves, tree = jax.tree.flatten(given)
    placed = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(port, program, mesh))
        for leaf, port in zip(leaves, program.inputs, strict=True)
    ]
    results = jax.tree.unflatten(program.out_tree, [sharding_of(port, program, mesh) for port in program.outputs])
    with as_if_here(mesh):
        return jax.jit(step, out_shardings=results, donate_argnums=0).trace(*jax.tree.unflatten(tree, placed))
