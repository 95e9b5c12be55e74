"""What XLA's scheduled modules put beside their collectives."""

from __future__ import annotations

from collections.abc import Iterable

from jax_deepcompile.hlo.types import Array, Computation, Instruction, Module, leaves

LAYER_SIZED_BYTES = 1 << 20
"""The gradients of norms, 32 KiB each, stay in buckets of their own: they are of another dtype."""


def instructions(module: Module) -> list[Instruction]:
    """Those of all computations, of what is inside fusions too."""
    return [each for part in module.computations.values() for each in part.instructions]


def loop_bodies(module: Module) -> list[Computation]:
    """The bodies of all loops."""
    return [module.body(each) for each in instructions(module) if each.opcode == "while"]


def gathers(instructions: Iterable[Instruction]) -> int:
    """How many gathers start among ``instructions``."""
    return sum(each.opcode in ("all-gather", "all-gather-start") for each in instructions)


def additions(module: Module, dims: tuple[int, ...]) -> int:
    """How many equations add whole arrays of this size."""
    adds = [each.shape for each in instructions(module) if each.opcode == "add"]
    return sum(isinstance(shape, Array) and shape.dims == dims for shape in adds)


def product_elements(instructions: Iterable[Instruction]) -> int:
    """How many elements matrix products have: some versions of XLA make one product of two that share an operand."""
    results = [next(leaves(each.shape)) for each in instructions if each.target.startswith("__cublas$")]
    return sum(array.elements for _, array in results)


def work_while_under_way(body: Computation) -> list[tuple[str, int]]:
    """For every large collective the products and fusions between its start and its done; none if it is synchronous."""
    order = {each.name: place for place, each in enumerate(body.instructions)}
    found = []
    for each in body.instructions:
        kind = each.opcode.removesuffix("-start")
        if kind not in ("all-gather", "reduce-scatter") or _size(each.shape) < LAYER_SIZED_BYTES:
            continue
        if kind == each.opcode:
            found.append((f"{kind}-start", 0))
            continue
        (done,) = (user for user in body.users[each.name] if user.opcode.endswith("-done"))
        between = body.instructions[order[each.name] + 1 : order[done.name]]
        found.append((each.opcode, sum(other.opcode in ("fusion", "custom-call") for other in between)))
    return found


def kernels_beside_copies(body: Computation, products_only: bool = False) -> list[int]:
    """For every value that is copied between device and host what is computed between its start and its done."""
    order = {each.name: place for place, each in enumerate(body.instructions)}
    found = []
    for each in body.instructions:
        is_copy = each.opcode in ("copy-start", "fusion-start")
        if is_copy and any(array.is_on_host for _, array in leaves(each.shape)):
            (done,) = (user for user in body.users[each.name] if user.opcode.endswith("-done"))
            between = body.instructions[order[each.name] + 1 : order[done.name]]
            is_fusion = [other.opcode == "fusion" and not products_only for other in between]
            found.append(sum(is_fusion) + sum(other.target.startswith("__cublas$") for other in between))
    return found


def products_beside_copies(body: Computation) -> list[int]:
    """Likewise, products alone."""
    return kernels_beside_copies(body, products_only=True)


def _size(shape) -> int:
    return sum(map(_size, shape)) if isinstance(shape, tuple) else shape.bytes
