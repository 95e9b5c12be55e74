"""Results written over operands that nobody needs any more.

The rules are those of XLA's ``HloDataflowAnalysis::CanShareOperandBufferWithUser`` and, for fusions, of
``xla/service/gpu/buffer_sharing.cc``: every element must be read before, and in the order in which, it is overwritten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from jax_deepcompile.costs.buffers import Buffer, Value
from jax_deepcompile.costs.dataflow import Place
from jax_deepcompile.costs.schedule import Schedule
from jax_deepcompile.hlo import opcodes
from jax_deepcompile.hlo.reader import BITS, Array, Computation, Index, Instruction, Module, at

_POINTWISE = opcodes.ELEMENTWISE | opcodes.TRANSCENDENTAL


def overwrite(module: Module, schedule: Schedule, buffers: Iterable[Buffer]) -> list[list[Value]]:
    """The values of each buffer, where a result that may take an operand's place has joined the operand's buffer."""
    groups = [list(buffer.values) for buffer in buffers]
    group_of = {value.place: group for group in groups for value in group}
    for (value,) in sorted((group for group in groups if len(group) == 1), key=lambda group: group[0].begin):
        group = _overwritten(module, schedule.order[schedule.position[value.name]], value, group_of)
        if group is not None:
            group[-1] = replace(group[-1], end=value.begin - 1)
            group.append(value)
            group_of[value.place].clear()
            group_of[value.place] = group
    return [group for group in groups if group]


def _overwritten(
    module: Module, user: Instruction, value: Value, group_of: Mapping[Place, list[Value]]
) -> list[Value] | None:
    """The buffer whose last value is an operand that ``user`` needs last and may write ``value`` over."""
    for number, operand in enumerate(user.operands):
        group = group_of.get((operand, ()))
        if not group or group[-1].place != (operand, ()) or max(old.end for old in group) != value.begin:
            continue
        if group[-1].end == value.begin and may_overwrite(module, user, value.index, number, group[-1].array):
            return group
    return None


def may_overwrite(module: Module, user: Instruction, index: Index, number: int, operand: Array) -> bool:
    """Whether the result of ``user`` at ``index`` may take the place of its operand ``number``, an ``operand``."""
    result = at(user.shape, index)
    if not isinstance(result, Array):
        return False
    if user.opcode == "fusion":
        return _same_elements(operand, result) and _is_pointwise(module.body(user), index, number)
    return user.opcode in _POINTWISE and operand == result


def _same_elements(one: Array, other: Array) -> bool:
    return one.elements == other.elements and BITS[one.dtype] == BITS[other.dtype]


def _is_pointwise(body: Computation, index: Index, number: int) -> bool:
    """Whether each element of a fusion's parameter is read for the same element of one result, and for nothing else."""
    output = body.root
    for place in index:
        if output.opcode != "tuple":
            return False
        output = body.operand(output, place)
    waiting, seen, found = deque([body.parameters[number]]), set(), False
    while waiting:
        step = waiting.popleft()
        found = found or step.name == output.name
        for user in body.readers(step):
            if user.name in seen or (user.opcode == "tuple" and step.name == output.name):
                continue
            updates = user.opcode == "dynamic-update-slice" and user.operands[0] == step.name
            if user.opcode not in _POINTWISE and user.opcode != "bitcast" and not updates:
                return False
            seen.add(user.name)
            waiting.append(user)
    return found
