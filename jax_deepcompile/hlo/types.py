"""A scheduled HLO module: its types, and the questions one asks of them. ``hlo.read`` makes one from text.

Nothing here knows what an operation costs.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

from jax_deepcompile import errors

BITS: Mapping[str, int] = {
    **dict.fromkeys(("s1", "u1"), 1),
    **dict.fromkeys(("s2", "u2"), 2),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3", "f8e3m4", "f8e8m0fnu"), 8),
    **dict.fromkeys(("f8e5m2", "f8e4m3fn", "f8e4m3b11fnuz", "f8e5m2fnuz", "f8e4m3fnuz"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    "c128": 128,
    "token": 0,
    "opaque": 0,
}
"""Bits of one element (https://openxla.org/xla/shapes)."""

HOST_MEMORY_SPACE = 5
"""The memory space of host memory in a layout, ``S(5)`` (``xla::Layout::kHostMemorySpace``)."""

_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_INPUT = re.compile(r"inputs\[(\d+)\]")
_CALLED_LIST = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
NAME = re.compile(r"%([\w.\-]+)")
_QUOTED = r'("(?:[^"\\]|\\.)*")'
_OP_NAME = re.compile(rf"metadata=\{{[^}}]*?op_name={_QUOTED}")
_SOURCE = re.compile(rf"source_file={_QUOTED} source_line=(\d+)")


@dataclass(frozen=True)
class Array:
    """The type of one array.

    Attributes:
      dtype: XLA's name of the element type, such as ``bf16``.
      dims: size of each dimension.
      memory_space: the ``S(n)`` of its layout; 0 is the device's memory, 5 the host's.
    """

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @cached_property
    def bytes(self) -> int:
        """Bytes it occupies."""
        return (self.elements * BITS[self.dtype] + 7) // 8

    @property
    def is_on_host(self) -> bool:
        return self.memory_space == HOST_MEMORY_SPACE


Shape: TypeAlias = "Array | tuple[Shape, ...]"
Index: TypeAlias = tuple[int, ...]


def leaves(shape: Shape, index: Index = ()) -> Iterator[tuple[Index, Array]]:
    """Each array of a shape, and where in the tuple it is."""
    if isinstance(shape, Array):
        yield index, shape
    else:
        for number, element in enumerate(shape):
            yield from leaves(element, (*index, number))


def at(shape: Shape, index: Index) -> Shape:
    """The part of ``shape`` at ``index``."""
    for number in index:
        assert not isinstance(shape, Array), (shape, index)
        shape = shape[number]
    return shape


def bytes_of(shape: Shape) -> int:
    """Bytes of all arrays of a shape together."""
    return shape.bytes if isinstance(shape, Array) else sum(bytes_of(element) for element in shape)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the leading ``%``; unique within a module.
      opcode: as printed, such as ``fusion`` or ``all-gather-start``.
      shape: of its result.
      operands: names of the instructions it reads, in order.
      argument: the text between the parentheses, for what is no operand: a constant's value, a parameter's number.
      attributes: the text after the parentheses, without the backend's configuration.
      backend: the text of the backend's configuration; empty if it has none.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    argument: str = ""
    attributes: str = ""
    backend: str = ""

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it calls, in the order printed."""
        if "=%" not in self.attributes and "omputations={" not in self.attributes:
            return ()
        listed = [name for group in _CALLED_LIST.findall(self.attributes) for name in NAME.findall(group)]
        return (*_CALLED.findall(self.attributes), *listed)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The backend's configuration."""
        if not self.backend:
            return {}
        try:
            parsed = json.loads(self.backend)
            return json.loads(parsed) if isinstance(parsed, str) else parsed
        except json.JSONDecodeError:
            return {}

    def attribute(self, key: str) -> str | None:
        """What is printed for ``key``, such as ``{0,1}`` for ``dimensions``; None if it is not there."""
        found = re.search(rf"(?:^|, ){key}=", self.attributes)
        return value_at(self.attributes, found.end()) if found else None

    @property
    def number(self) -> int:
        """Which parameter a ``parameter`` is, or which element a ``get-tuple-element`` takes."""
        return int(self.argument) if self.opcode == "parameter" else int(self.attribute("index") or 0)

    @property
    def target(self) -> str:
        """What a custom call calls; empty for other operations."""
        return unquoted(self.attribute("custom_call_target") or "")

    @cached_property
    def op_name(self) -> str:
        """The path of JAX transformations, modules and primitives that it came from; empty if unknown."""
        found = _OP_NAME.search(self.attributes)
        return unquoted(found.group(1)) if found else ""

    @property
    def input_number(self) -> int | None:
        """Which input of an emitted program it is: 3 for the parameter called ``inputs[3]``; None for all else."""
        found = _INPUT.fullmatch(self.op_name) if self.opcode == "parameter" else None
        return int(found[1]) if found else None

    @cached_property
    def aliased_operands(self) -> Mapping[Index, tuple[int, Index]]:
        """For a part of the result, the operand (and part of it) whose buffer it must take."""
        found = parse_aliases(self.attribute("output_to_operand_aliasing") or "")
        return {alias.output: (alias.parameter, alias.part) for alias in found}


@dataclass(frozen=True)
class Computation:
    """A function: instructions in the order in which they run, and the name of the one whose result it returns."""

    name: str
    instructions: tuple[Instruction, ...]
    root_name: str

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        return self.by_name[self.root_name]

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Its parameters, by number."""
        found = [instruction for instruction in self.instructions if instruction.opcode == "parameter"]
        return tuple(sorted(found, key=lambda instruction: instruction.number))

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Who reads each instruction, in schedule order."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return {name: tuple(readers) for name, readers in users.items()}

    def operand(self, instruction: Instruction, number: int) -> Instruction:
        return self.by_name[instruction.operands[number]]

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        return tuple(self.by_name[name] for name in instruction.operands)

    def readers(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """Who reads it, in schedule order."""
        return self.users.get(instruction.name, ())

    def feeding(self, instruction: Instruction) -> Iterator[Instruction]:
        """What it reads, what that reads and so on, a few instructions far; the nearest first."""
        return _levels(instruction, self.operands)

    def fed(self, instruction: Instruction) -> Iterator[Instruction]:
        """What reads it, what reads that and so on, a few instructions far; the nearest first."""
        return _levels(instruction, self.readers)

    def seen_through(self, instruction: Instruction, opcodes: Collection[str]) -> Instruction:
        """``instruction``, or where it is of one of ``opcodes``, which pass on their operand, what it passes on."""
        while instruction.opcode in opcodes:
            instruction = self.operand(instruction, 0)
        return instruction


@dataclass(frozen=True)
class Alias:
    """A part of the result, of a module or an instruction, that takes the buffer of a part of a parameter."""

    output: Index
    parameter: int
    part: Index


@dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
      name: of the module.
      computations: by name.
      entry_name: the computation that runs.
      is_scheduled: whether the order of instructions is that in which they run.
      aliases: which outputs take the buffers of which parameters.
      device_count: devices that run it together.
      frames: for each stack frame id of the metadata, the user's ``file:line``.
    """

    name: str
    computations: Mapping[str, Computation]
    entry_name: str
    is_scheduled: bool
    aliases: tuple[Alias, ...] = ()
    device_count: int = 1
    frames: Mapping[int, str] | None = None

    @property
    def entry(self) -> Computation:
        return self.computations[self.entry_name]

    def body(self, instruction: Instruction) -> Computation:
        """The computation that a fusion, call, while or wrapped asynchronous operation runs."""
        key = {"while": "body", "call": "to_apply"}.get(instruction.opcode, "calls")
        return self.computations[(instruction.attribute(key) or instruction.called[0]).removeprefix("%")]

    def condition(self, loop: Instruction) -> Computation:
        """What a while runs to know whether to go on."""
        return self.computations[(loop.attribute("condition") or "").removeprefix("%")]

    def source(self, instruction: Instruction) -> str:
        """The user's ``file:line`` that ``instruction`` came from; empty if unknown."""
        found = _SOURCE.search(instruction.attributes)
        if found:
            return f"{unquoted(found.group(1))}:{found.group(2)}"
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        return (self.frames or {}).get(int(found.group(1)), "") if found else ""

    def source_of(self, name: str) -> str:
        """The same for the instruction called ``name``, wherever it is; for one that has none the nearest line: of what
        it reads, and what that reads, or else of what reads it. Empty if there is none."""
        home = next((each for each in self.computations.values() if name in each.by_name), None)
        if home is None:
            return ""
        found = home.by_name[name]
        near = chain([found], home.feeding(found), home.fed(found))
        return next(filter(None, map(self.source, near)), "")


def _levels(
    instruction: Instruction, neighbours: Callable[[Instruction], Iterable[Instruction]]
) -> Iterator[Instruction]:
    """Its neighbours, theirs and so on."""
    level = [instruction]
    for _ in range(_FAR):
        level = list({other.name: other for each in level for other in neighbours(each)}.values())
        yield from level


_FAR = 4
"""How many instructions away a name or line is still looked for."""


def parse_index(text: str) -> Index:
    """The numbers in ``text``, such as ``0, 1``: of a place in a tuple, dimensions or devices."""
    return tuple(int(number) for number in text.replace(" ", "").split(",") if number)


def parse_aliases(text: str) -> tuple[Alias, ...]:
    """What is written as ``{0}: (1, {})``."""
    found = re.findall(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}", text)
    return tuple(Alias(parse_index(output), int(number), parse_index(part)) for output, number, part in found)


def unquoted(text: str) -> str:
    r"""``text`` without its quotes, and without escapes as text protos have them.

    >>> unquoted(r'"\346\227\245[\'w\']"')
    "日['w']"
    """
    text = text.removeprefix('"').removesuffix('"')
    if "\\" not in text:
        return text
    return text.encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")


def value_at(text: str, start: int) -> str:
    """The attribute's value that starts at ``start``: up to the next comma outside brackets and quotes."""
    depth, quoted = 0, False
    for position in range(start, len(text)):
        character = text[position]
        if character == '"' and text[position - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            return text[start:position]
    if depth:
        raise errors.MalformedHloError(0, f"attribute without an end: {text[start : start + 60]}")
    return text[start:]
