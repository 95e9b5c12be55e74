"""Which stream an operation of a compiled program runs on, and for how long."""

from __future__ import annotations

from jax_deepcompile.costs.collective_bytes import sent_bytes
from jax_deepcompile.costs.cost_model import CostModel, Direction
from jax_deepcompile.costs.streams import Part, Stream, Timing
from jax_deepcompile.costs.work import results_of, work_of, written_bytes
from jax_deepcompile.hlo import opcodes, replica_groups
from jax_deepcompile.hlo.reader import Computation, Instruction, Module, bytes_of, leaves


def timing_of(module: Module, computation: Computation, instruction: Instruction, costs: CostModel) -> Timing:
    """How ``instruction`` of ``computation`` runs.

    An asynchronous fusion counts on the compute stream: it would share the memory's bandwidth with what runs beside it.
    """
    home, runs = _unwrapped(module, computation, instruction)
    kind, _ = opcodes.split(runs.opcode)
    operands = [computation.by_name[name] for name in instruction.operands]
    if kind in opcodes.COLLECTIVES:
        return _collective(module, kind, runs, instruction, operands, costs)
    direction = _direction(runs, [home.by_name[name] for name in runs.operands])
    if direction is not None:
        return costs.copy(written_bytes(module, home, runs), direction, kind)
    work = work_of(module, home, runs)
    kernel = costs.matmul(work.products, work.bytes) if work.products else costs.vector(work.vector_flops, work.bytes)
    seconds = costs.kernel_s(kernel.seconds, module.source(instruction))
    part = Part.of(work.products, instruction.op_name, instruction.name)
    return Timing(Stream.COMPUTE, seconds, kind, is_memory_bound=kernel.is_memory_bound, part=part)


def _unwrapped(module: Module, computation: Computation, instruction: Instruction) -> tuple[Computation, Instruction]:
    """What an ``async-start`` runs, and the computation that is in; other operations as they are."""
    if instruction.opcode != "async-start":
        return computation, instruction
    body = module.body(instruction)
    return body, body.root


def _collective(
    module: Module, kind: str, runs: Instruction, issued: Instruction, operands: list[Instruction], costs: CostModel
) -> Timing:
    groups = replica_groups.of(module, runs)
    size_bytes = sum(bytes_of(operand.shape) for operand in operands)
    if kind == "all-gather":
        size_bytes *= groups.size
    ranks = groups.ranks_per_node(costs.network.gpus_per_node)
    seconds = costs.collectives_take * costs.collective_s(kind, size_bytes, groups.size, ranks)
    settings = issued.config.get("collective_backend_config") or runs.config.get("collective_backend_config") or {}
    is_sync = bool(settings.get("is_sync", False))
    sent = sent_bytes(kind, size_bytes, groups.size)
    taken = costs.taken_by_collective(sent, seconds)
    is_within = kind != "collective-permute" and 1 < ranks == groups.size
    return Timing(Stream(kind), seconds, kind, size_bytes, is_sync, sent, taken=taken, is_within_node=is_within)


def _direction(instruction: Instruction, operands: list[Instruction]) -> Direction | None:
    """Which way an operation moves data between device and host; None if it does not."""
    if opcodes.split(instruction.opcode)[0] not in ("copy", "dynamic-slice", "dynamic-update-slice", "slice", "fusion"):
        return None
    if any(array.is_on_host for _, array in leaves(results_of(instruction))):
        return Direction.TO_HOST
    reads_host = any(array.is_on_host for operand in operands for _, array in leaves(operand.shape))
    return Direction.FROM_HOST if reads_host else None
