"""A traced run as simulations tell of theirs: what each device ran when, on which stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from jax_deepcompile.costs.simulation import Event
from jax_deepcompile.costs.streams import Stream
from jax_deepcompile.hlo.opcodes import CONTROL, split
from jax_deepcompile.hlo.types import Module
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.profilers.trace import Span, Trace

_COPIES = {"DtoH": Stream.TO_HOST, "D2H": Stream.TO_HOST, "HtoD": Stream.FROM_HOST, "H2D": Stream.FROM_HOST}
"""What is in the names of copies between device and host."""


def timelines_of(trace: Trace, module: Module, mesh: AnyMesh) -> Mapping[int, tuple[Event, ...]]:
    """What the devices of this process ran, by their numbers in ``mesh``, in the order in which it began.

    Seconds are from the beginning of the first operation on any of them. What runs others, such as loops, is left out.
    """
    instructions = {
        each.name: each for computation in module.computations.values() for each in computation.instructions
    }
    numbers = _numbers(mesh)
    began_s = min((span.start_s for span in trace.spans), default=0.0)
    found: defaultdict[int, list[Event]] = defaultdict(list)
    for span in sorted(trace.spans, key=lambda span: span.start_s):
        instruction = instructions.get(span.op)
        kind = "" if instruction is None else split(instruction.opcode)[0]
        if instruction is None or span.device not in numbers or kind in CONTROL:
            continue
        times_s = span.start_s - began_s, span.end_s - began_s
        origin = instruction.op_name, module.source(instruction), kind
        found[numbers[span.device]].append(Event(_stream(kind, span), span.op, *times_s, 1, *origin))
    return {number: tuple(found[number]) for number in sorted(found)}


def _numbers(mesh: AnyMesh) -> dict[int, int]:
    """For the ordinal of each device of this process its number in the mesh."""
    devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else []
    own = [(device, number) for number, device in enumerate(devices) if device.process_index == jax.process_index()]
    return {device.id if device.local_hardware_id is None else device.local_hardware_id: at for device, at in own}


def _stream(kind: str, span: Span) -> Stream:
    if kind in list(Stream):
        return Stream(kind)
    return next((stream for part, stream in _COPIES.items() if part in span.kernel), Stream.COMPUTE)
