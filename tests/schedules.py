"""What XLA's scheduled modules put beside their collectives."""

from __future__ import annotations

from jax_deepcompile.lowering.hlo_types import Computation, Module

LAYER_SIZED_BYTES = 1 << 20
"""The gradients of norms, 32 KiB each, stay in buckets of their own: they are of another dtype."""


def loop_bodies(module: Module) -> list[Computation]:
    """The bodies of all loops."""
    instructions = [each for part in module.computations.values() for each in part.instructions]
    return [module.body(each) for each in instructions if each.opcode == "while"]


def work_while_under_way(body: Computation) -> list[tuple[str, int]]:
    """For every large asynchronous collective the products and fusions between its start and its done."""
    order = {each.name: place for place, each in enumerate(body.instructions)}
    found = []
    for each in body.instructions:
        if each.opcode not in ("all-gather-start", "reduce-scatter-start") or _size(each.shape) < LAYER_SIZED_BYTES:
            continue
        (done,) = (user for user in body.users[each.name] if user.opcode.endswith("-done"))
        between = body.instructions[order[each.name] + 1 : order[done.name]]
        found.append((each.opcode, sum(other.opcode in ("fusion", "custom-call") for other in between)))
    return found


def _size(shape) -> int:
    return sum(map(_size, shape)) if isinstance(shape, tuple) else shape.bytes
