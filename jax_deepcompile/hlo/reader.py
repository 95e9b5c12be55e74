"""Reads the text of a scheduled HLO module, as ``Compiled.as_text()`` gives it.

The form is that of ``xla::HloModule::ToString`` (https://openxla.org/xla/hlo_dump), as printed by JAX 0.10 to 0.12::

    HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, ..., num_partitions=32

    FileNames
    1 "model.py"

    FunctionNames / FileLocations / StackFrames: tables that the metadata's stack_frame_id points into

    %fused_add (param_0: f32[8]) -> f32[8] {
      %param_0 = f32[8]{0} parameter(0)
      ROOT %add.1 = f32[8]{0} add(%param_0, %param_0), metadata={op_name="jit(step)/add" stack_frame_id=3}
    }

    ENTRY %main (param.1: f32[8]) -> f32[8] {
      ...
    }
"""

import re
from collections.abc import Mapping
from functools import lru_cache

from jax_deepcompile import errors
from jax_deepcompile.hlo.types import (  # noqa: F401
    BITS,
    NAME,
    Alias,
    Array,
    Computation,
    Index,
    Instruction,
    Module,
    Shape,
    at,
    bytes_of,
    leaves,
    parse_aliases,
    parse_index,
    unquoted,
    value_at,
)

_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) ")
_ARRAY = re.compile(r"(\w+)\[([^\]]*)\](?:\{([^}]*)\})?")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_BACKEND = "backend_config="


def read(text: str) -> Module:
    """Reads a module.

    Raises:
      MalformedHloError: the text is no HLO module, or only a part of one.
    """
    lines = text.splitlines()
    if not lines or not lines[0].startswith("HloModule "):
        raise errors.MalformedHloError(1, "the first line does not start with 'HloModule'")
    computations, entry = _computations(lines)
    if entry is None:
        raise errors.MalformedHloError(len(lines), "there is no ENTRY computation; the text is cut off")
    _check_names(computations)
    header = lines[0]
    devices = [int(count) for count in re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)]
    aliases = re.search(r"input_output_alias=", header)
    return Module(
        name=header.removeprefix("HloModule ").partition(",")[0],
        computations=computations,
        entry_name=entry,
        is_scheduled="is_scheduled=true" in header,
        aliases=parse_aliases(value_at(header, aliases.end())) if aliases else (),
        device_count=max(devices, default=1),
        frames=_frames(lines),
    )


def _computations(lines: list[str]) -> tuple[dict[str, Computation], str | None]:
    """All computations by name, and the name of the entry."""
    computations: dict[str, Computation] = {}
    entry, name, root, instructions = None, None, None, []
    for number, line in enumerate(lines, 1):
        if name is None:
            if line.endswith("{") and line[0] in "%E" and (header := _HEADER.match(line)):
                name, root, instructions = header.group(2), None, []
                entry = name if header.group(1) else entry
        elif line.startswith("}"):
            if not instructions:
                raise errors.MalformedHloError(number, f"computation {name} has no instructions")
            computations[name] = Computation(name, tuple(instructions), root or instructions[-1].name)
            name = None
        elif line and not line.isspace():
            instruction, is_root = _instruction(line, number)
            instructions.append(instruction)
            root = instruction.name if is_root else root
    if name is not None:
        raise errors.MalformedHloError(len(lines), f"computation {name} has no end; the text is cut off")
    return computations, entry


def _instruction(line: str, number: int) -> tuple[Instruction, bool]:
    """The instruction on a line, and whether it is its computation's root."""
    found = _INSTRUCTION.match(line)
    if found is None:
        raise errors.MalformedHloError(number, f"not an instruction: {line.strip()[:80]}")
    is_root, name, shape, opcode = found.groups()
    end = _closing(line, found.end())
    if end < 0:
        raise errors.MalformedHloError(number, f"the operands of {name} have no end; the text is cut off")
    argument, rest = line[found.end() : end], line[end + 1 :].removeprefix(", ")
    attributes, _, backend = rest.partition(_BACKEND)
    try:
        shape = _shape(shape)
    except (KeyError, ValueError) as error:
        raise errors.MalformedHloError(number, f"not a shape: {shape[:80]}") from error
    operands = () if opcode in ("constant", "parameter") else tuple(NAME.findall(argument))
    return Instruction(name, opcode, shape, operands, argument, attributes, backend), bool(is_root)


def _closing(line: str, start: int) -> int:
    """Where the parenthesis that opened before ``start`` closes; -1 if nowhere."""
    end = line.find(")", start)
    if "(" not in line[start:end]:
        return end
    depth = 1
    for position in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[position], 0)
        if depth == 0:
            return position
    return -1


@lru_cache(maxsize=100_000)
def _shape(text: str) -> Shape:
    text = re.sub(r"/\*.*?\*/", "", text).strip()
    if not text.startswith("("):
        found = _ARRAY.match(text)
        if found is None:
            raise ValueError(text)
        dtype, dims, layout = found.groups()
        space = re.search(r"S\((\d+)\)", layout or "")
        sizes = tuple(int(dim.strip().removeprefix("<=")) for dim in dims.split(",") if dim)
        if dtype not in BITS:
            raise ValueError(dtype)
        return Array(dtype, sizes, int(space.group(1)) if space else 0)
    rest, elements = text[1:-1], []
    while rest.strip():
        element = value_at(rest, 0)
        elements.append(_shape(element))
        rest = rest[len(element) + 1 :]
    return tuple(elements)


def _check_names(computations: Mapping[str, Computation]) -> None:
    """Every name that is read or called is there."""
    for computation in computations.values():
        seen = set()
        for instruction in computation.instructions:
            missing = [operand for operand in instruction.operands if operand not in seen]
            missing += [called for called in instruction.called if called not in computations]
            if missing:
                raise errors.MalformedHloError(
                    0, f"{instruction.name} in {computation.name} uses {missing[0]}, which is not defined before it"
                )
            seen.add(instruction.name)


def _frames(lines: list[str]) -> dict[int, str]:
    """For each stack frame, ``file:line`` of the innermost frame outside installed packages (else the innermost).

    A frame prints its parent as ``parent_frame_id``, counted from 1; a frame that has none prints 1.
    """
    tables: dict[str, dict[int, str]] = {table: {} for table in _TABLES}
    current = None
    for line in lines[1:]:
        if line in tables:
            current = tables[line]
        elif not line:
            current = None
        elif line[0] in "%E":
            break
        elif current is not None:
            number, _, value = line.partition(" ")
            current[int(number)] = value
    locations = {
        number: (unquoted(tables["FileNames"].get(_field(text, "file_name_id"), "")), _field(text, "line"))
        for number, text in tables["FileLocations"].items()
    }
    frames: dict[int, str] = {}
    for number, text in tables["StackFrames"].items():
        file, line_number = locations.get(_field(text, "file_location_id"), ("", 0))
        parent = frames.get(_field(text, "parent_frame_id") - 1)
        installed = "site-packages" in file
        frames[number] = parent if installed and parent is not None else f"{file}:{line_number}"
    return frames


def _field(text: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", text)
    return int(found.group(1)) if found else 0
