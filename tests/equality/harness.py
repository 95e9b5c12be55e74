"""Runs a step sharded and on one device, and compares everything it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_deepcompile as deepcompile

MESHES: dict[str, dict[str, int]] = {"8": {"fsdp": 8}, "2x4": {"data": 2, "fsdp": 4}, "4x2": {"data": 4, "fsdp": 2}}
TWO_MESHES = {name: MESHES[name] for name in ("8", "2x4")}


def assert_same_training(
    step: Callable,
    create_state: Callable,
    batches: list[Any],
    meshes: dict[str, dict[str, int]] = TWO_MESHES,
    tolerance: float = 1e-5,
    noise: str | None = None,
    **options: Any,
) -> None:
    """Trains one step per batch on one device and on each of ``meshes``, and compares states and metrics after each."""
    plain = jax.jit(step)
    states, metrics = [jax.jit(create_state)(jax.random.key(0))], []
    for batch in batches:
        state, measured = plain(states[-1], batch)
        states.append(state)
        metrics.append(measured)
    for name, mesh in meshes.items():
        sharded = deepcompile.shard(step, mesh, **options)
        state = jax.tree.map(jnp.copy, states[0])
        for index, batch in enumerate(batches):
            state, measured = sharded(state, batch)
            assert_close(measured, metrics[index], tolerance, f"mesh {name}, metrics of step {index}")
            assert_close(state, states[index + 1], tolerance, f"mesh {name}, state after step {index}", noise)


def assert_close(found: Any, expected: Any, tolerance: float, what: str, noise: str | None = None) -> None:
    """Every leaf of ``found`` differs by at most ``tolerance`` of its largest value; 0 asks for the same bits.

    Leaves with ``noise`` in their path have a true gradient of zero, so that all their bits are rounding: what is asked
    of them is to stay below ``tolerance``.
    """
    wanted, structure = jax.tree_util.tree_flatten_with_path(expected)
    assert jax.tree.structure(found) == structure, what
    for (path, right), left in zip(wanted, jax.tree.leaves(found), strict=True):
        if jnp.issubdtype(right.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        where = f"{what}: {jax.tree_util.keystr(path)}"
        assert left.shape == right.shape, where
        assert left.dtype == right.dtype, where
        if tolerance == 0 or not jnp.issubdtype(right.dtype, jnp.inexact):
            np.testing.assert_array_equal(np.asarray(left), np.asarray(right), err_msg=where)
            continue
        left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
        scale = 1.0 if noise is not None and noise in where else np.abs(right).max(initial=0.0) + 1e-12
        worst = np.abs(left - right).max(initial=0.0) / scale
        assert worst <= tolerance, f"{where}: relative error {worst:.2e}"


def distances(found: Any, expected: Any, order: float = 2, noise: str | None = None) -> dict[str, float]:
    """How far every leaf of numbers is from what is expected, in the norm of that order, relative to its own."""
    far = {}
    for (path, right), left in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        where = jax.tree_util.keystr(path)
        if jnp.issubdtype(right.dtype, jnp.inexact) and (noise is None or noise not in where):
            left, right = (np.asarray(leaf, np.float64).ravel() for leaf in (left, right))
            far[where] = float(np.linalg.norm(left - right, order) / (np.linalg.norm(right, order) + 1e-12))
    return far
