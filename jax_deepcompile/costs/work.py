"""What an operation of a compiled program does: arithmetic, and bytes to and from device memory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_deepcompile.analysis.work import Attention, Product
from jax_deepcompile.hlo import opcodes
from jax_deepcompile.hlo.reader import Array, Computation, Instruction, Module, Shape, bytes_of, leaves, parse_index

_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_VIEWS = frozenset({"bitcast", "get-tuple-element"})
_ELEMENT_BY_ELEMENT = (
    opcodes.ELEMENTWISE
    | opcodes.TRANSCENDENTAL
    | {"bitcast", "broadcast", "concatenate", "copy", "pad", "reshape", "reverse", "transpose"}
)
"""An element of what they compute takes one of each operand at most."""
_TRANSCENDENTAL_FLOPS = 8
"""Instructions of the special function unit run at an eighth to a quarter of the rate of a multiplication
(CUDA C++ programming guide, table of arithmetic throughput), and most need a few multiplications besides."""
_INTEGER_FLOPS = 4
"""Additions, shifts and logic of integers run at half the rate of multiply-adds of float32 (same table, compute
capability 9.0), each of which is two operations. Random bits are made of hundreds for each element."""
_PARTS_OF_ROTATIONS = frozenset({"shift-left", "or"})
"""A rotation of integers, the or of shifts both ways, is one instruction."""


@dataclass(frozen=True)
class Work:
    """What one operation does.

    Attributes:
      products: matrix products, and fused attention.
      vector_flops: other arithmetic.
      bytes: read from and written to device memory.
    """

    products: tuple[Product | Attention, ...] = ()
    vector_flops: float = 0.0
    bytes: int = 0


def work_of(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """What ``instruction`` of ``computation`` does, alone."""
    operands = [computation.by_name[name] for name in instruction.operands]
    opcode, _ = opcodes.split(instruction.opcode)
    if opcode == "fusion":
        return _fusion(module, module.body(instruction))
    if opcode == "custom-call":
        return _custom_call(instruction, operands)
    read = sum(_read(instruction, number, operand.shape) for number, operand in enumerate(operands))
    moved = read + _written(instruction, operands)
    return Work(_products(instruction, operands), _vector_flops(instruction, operands), moved)


def _fusion(module: Module, body: Computation) -> Work:
    """Of parameters what results are made of is read, once; all else stays in registers."""
    needed = _needed(body)
    read = sum(_bytes_needed(parameter, needed[parameter.name]) for parameter in body.parameters)
    written = sum(_result_bytes(body, result) for result in _results(body))
    products, vector_flops = (), 0.0
    for step in body.instructions:
        operands = [body.by_name[name] for name in step.operands]
        products += _products(step, operands)
        vector_flops += _vector_flops(step, operands) * _share(step, needed[step.name])
        if step.opcode in ("fusion", "call", "custom-call"):
            is_library = step.opcode == "custom-call"
            inner = _custom_call(step, operands) if is_library else _fusion(module, module.body(step))
            products += inner.products
            vector_flops += inner.vector_flops
    return Work(products, vector_flops, read + written)


def results_of(instruction: Instruction) -> Shape:
    """What an operation computes: of one just started, without its operands and bookkeeping."""
    shape = instruction.shape
    if not instruction.opcode.endswith("-start") or isinstance(shape, Array):
        return shape
    return shape[0] if instruction.opcode == "copy-start" else shape[1]


def written_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes an operation writes; of an update in place, those updated."""
    if opcodes.split(instruction.opcode)[0] == "fusion":
        body = module.body(instruction)
        return sum(_result_bytes(body, result) for result in _results(body))
    return _written(instruction, [computation.by_name[name] for name in instruction.operands])


def _results(body: Computation) -> list[Instruction]:
    root = body.root
    return [body.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]


def _needed(body: Computation) -> dict[str, int]:
    """How many elements of each value of a fusion its results are made of; at most all of them.

    A kernel computes what it writes, element by element: of a stack that is converted and then sliced, the slice is
    converted.
    """
    needed = dict.fromkeys(body.by_name, 0)
    for result in _results(body):
        _need_result(body, result, needed)
    for step in reversed(body.instructions):
        of_result = needed[step.name] = min(needed[step.name], _elements(step))
        for place, name in enumerate(step.operands if of_result else ()):
            needed[name] += _needed_of(step, place, body.by_name[name], of_result)
    return needed


def _need_result(body: Computation, result: Instruction, needed: dict[str, int]) -> None:
    """All of a result is needed; of what it updates in place, nothing."""
    updates, base = _chain(body, result)
    if not updates or base.opcode != "parameter":
        needed[result.name] += _elements(result)
        return
    for update in updates:
        for name in update.operands[1:]:
            needed[name] += _elements(body.by_name[name])


def _needed_of(user: Instruction, place: int, operand: Instruction, of_result: int) -> int:
    """Elements of its operand number ``place`` that ``user`` needs for so many of its result."""
    opcode, _ = opcodes.split(user.opcode)
    if opcode in _SLICES | {"dynamic-update-slice", "scatter"}:
        return of_result if place == 0 else _elements(operand)
    return of_result if opcode in _ELEMENT_BY_ELEMENT else _elements(operand)


def _share(instruction: Instruction, needed: int) -> float:
    return needed / max(_elements(instruction), 1)


def _bytes_needed(parameter: Instruction, needed: int) -> int:
    return round(bytes_of(parameter.shape) * _share(parameter, needed))


def _read(user: Instruction, place: int, shape: Shape) -> int:
    """Bytes that ``user``, alone, reads of its operand number ``place``."""
    opcode, _ = opcodes.split(user.opcode)
    if opcode in _SLICES:
        return min(bytes_of(user.shape), bytes_of(shape)) if place == 0 else bytes_of(shape)
    if opcode == "dynamic-update-slice":
        return bytes_of(shape) if place == 1 else 0
    if opcode == "scatter" and place == 0:
        return 0
    return bytes_of(shape)


def _result_bytes(body: Computation, result: Instruction) -> int:
    """Bytes that a fusion writes for one of its results: a part, if it updates a parameter in place."""
    updates, base = _chain(body, result)
    if updates and base.opcode != "parameter":
        return bytes_of(result.shape)
    written = updates or [body.seen_through(result, _VIEWS)]
    return sum(_written(each, [body.by_name[name] for name in each.operands]) for each in written)


def _chain(body: Computation, result: Instruction) -> tuple[list[Instruction], Instruction]:
    """The updates that ``result`` is made of, the last first, and what the first of them updates."""
    updates, base = [], body.seen_through(result, _VIEWS)
    while _updates(base):
        updates.append(base)
        base = body.seen_through(body.operand(base, 0), _VIEWS)
    return updates, base


def _updates(instruction: Instruction) -> bool:
    return opcodes.split(instruction.opcode)[0] in ("dynamic-update-slice", "scatter")


def _written(instruction: Instruction, operands: Sequence[Instruction]) -> int:
    """Bytes an operation writes: in place, where it overwrites a part of its first operand."""
    opcode, _ = opcodes.split(instruction.opcode)
    if opcode == "dynamic-update-slice":
        return bytes_of(operands[1].shape)
    if opcode == "scatter":
        return 2 * bytes_of(operands[-1].shape)
    return bytes_of(_without_workspace(instruction) if opcode == "custom-call" else results_of(instruction))


def _vector_flops(instruction: Instruction, operands: Sequence[Instruction]) -> float:
    if instruction.opcode in opcodes.ELEMENTWISE:
        return _elements(instruction) * _flops_of_each(instruction)
    if instruction.opcode in opcodes.TRANSCENDENTAL:
        return _TRANSCENDENTAL_FLOPS * _elements(instruction)
    return _elements(operands[0]) if instruction.opcode in ("reduce", "reduce-window") else 0.0


def _flops_of_each(instruction: Instruction) -> int:
    """Of an elementwise operation, for each element."""
    is_integer = isinstance(instruction.shape, Array) and instruction.shape.dtype[0] in "su"
    return (_INTEGER_FLOPS if instruction.opcode not in _PARTS_OF_ROTATIONS else 0) if is_integer else 1


def _elements(instruction: Instruction) -> int:
    return sum(math.prod(array.dims) for _, array in leaves(instruction.shape))


def _products(instruction: Instruction, operands: Sequence[Instruction]) -> tuple[Product, ...]:
    """Those of a ``dot`` or ``convolution``; none of other operations."""
    if instruction.opcode == "convolution":
        shapes = _array(operands[1]), _array(instruction)
        return (_convolution(instruction, *shapes, _factor(instruction, operands)),)
    if instruction.opcode not in ("dot", "ragged-dot", "scaled-dot"):
        return ()
    listed = (instruction.attribute(f"lhs_{name}_dims") or "" for name in ("contracting", "batch"))
    contracted, batched = (parse_index(text.strip("{}")) for text in listed)
    return (_dot(instruction, operands, contracted, batched, _factor(instruction, operands)),)


def _dot(
    result: Instruction, operands: Sequence[Instruction], contracted: Sequence[int], batched: Sequence[int], dtype: str
) -> Product:
    """A product for each element along ``batched`` dimensions of the left factor."""
    left, outputs = _array(operands[0]), math.prod(_array(result).dims)
    batch, k = math.prod(left.dims[dim] for dim in batched), math.prod(left.dims[dim] for dim in contracted)
    m = math.prod(left.dims) / max(batch * k, 1)
    return Product(batch, m, outputs / max(batch * m, 1), k, dtype)


def _factor(instruction: Instruction, operands: Sequence[Instruction], highest: bool = False) -> str:
    """The type that a matrix product multiplies: float32 at highest precision is not the default, TF32."""
    dtype = _array(operands[0]).dtype
    highest = highest or "highest" in (instruction.attribute("operand_precision") or "")
    return f"{dtype}-highest" if highest and dtype == "f32" else dtype


def _custom_call(instruction: Instruction, operands: Sequence[Instruction]) -> Work:
    """A library's kernel: cuBLAS and cuDNN by their FLOPs, others by their bytes."""
    moved = sum(bytes_of(operand.shape) for operand in operands) + _written(instruction, operands)
    config = instruction.config
    for key in ("gemm_backend_config", "cudnn_fmha_backend_config"):
        if key in config and operands:
            return _library_matmul(key, config[key], instruction, operands, moved)
    if instruction.target.startswith("__cudnn$conv"):
        backward_filter = instruction.target.endswith("BackwardFilter")
        backward_input = instruction.target.endswith("BackwardInput")
        kernel = _array(instruction) if backward_filter else _array(operands[1])
        output = _array(operands[1 if backward_filter else 0]) if backward_filter or backward_input else None
        dtype = _factor(instruction, operands)
        return Work((_convolution(instruction, kernel, output or _array(instruction), dtype),), 0.0, moved)
    return Work(bytes=moved)


def _library_matmul(
    key: str, config: Mapping[str, Any], instruction: Instruction, operands: Sequence[Instruction], moved: int
) -> Work:
    if key == "gemm_backend_config":
        contracted, batched = (
            [int(dim) for dim in config["dot_dimension_numbers"].get(f"lhs_{name}_dimensions", [])]
            for name in ("contracting", "batch")
        )
        precision = config.get("precision_config", {}).get("operand_precision", [])
        factor = _factor(instruction, operands, highest="HIGHEST" in precision)
        return Work((_dot(instruction, operands, contracted, batched, factor),), 0.0, moved)
    attention = Attention.of(
        scores=[int(size) for size in config["intermediate_tensor_shape"]["dimensions"]],
        head_size=_array(operands[0]).dims[-1],
        mask_type=config.get("mask_type", ""),
        window=config.get("sliding_window_length"),
        is_gradient="Backward" in instruction.target,
        dtype=_factor(instruction, operands),
    )
    return Work((attention,), 0.0, moved)


def _without_workspace(instruction: Instruction) -> Shape:
    """The shape of a library call's results, without the scratch memory that is the last element of its tuple."""
    shape = instruction.shape
    if isinstance(shape, Array) or len(shape) < 2 or not instruction.target.startswith("__cu"):
        return shape
    last = shape[-1]
    return shape[:-1] if isinstance(last, Array) and last.dtype in ("s8", "u8") else shape


def _convolution(instruction: Instruction, kernel: Array, output: Array, dtype: str) -> Product:
    """An output channel is the product of a part of its kernel and a patch of the input."""
    kernel_labels = re.split(r"_|->", instruction.attribute("dim_labels") or "")[1]
    channels = kernel.dims[kernel_labels.index("o")]
    return Product(1, math.prod(output.dims) / channels, channels, math.prod(kernel.dims) / channels, dtype)


def _array(instruction: Instruction) -> Array:
    """The (first) array of an instruction's result."""
    return next(array for _, array in leaves(instruction.shape))
