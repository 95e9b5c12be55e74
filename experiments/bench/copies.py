"""Copies between a GPU and its host that take longer, or less, than is known of them."""

from __future__ import annotations

from jax.sharding import Mesh

import jax_deepcompile as deepcompile
from jax_deepcompile.costs.devices import machine_of
from jax_deepcompile.costs.entries import CopyFit, Direction, LinearFit, analytical
from jax_deepcompile.costs.measured import costs_of

_MANY_BYTES = 1 << 30


def copies_profile(takes: float, mesh: Mesh) -> deepcompile.Profile | None:
    """A profile of copies that take ``takes`` of what is known of them; None for just that."""
    if takes == 1:
        return None
    copy_s, source = costs_of(mesh).copy_s, analytical(f"{takes:g} of what is known of it")
    copies = []
    for direction in Direction:
        latency_s, many_s = (takes * copy_s(size, direction) for size in (0, _MANY_BYTES))
        fit = LinearFit(latency_s, (many_s - latency_s) / _MANY_BYTES, 0.0, ())
        copies.append(CopyFit(direction, fit, source))
    return deepcompile.Profile("", machine_of(mesh), copies=tuple(copies))
