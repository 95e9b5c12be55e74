"""Which equations of a program an HLO op stems from, and how often it runs.

XLA keeps, for every instruction, the path of JAX's name scopes, loops and primitives that it was lowered from, such as
``jit(step)/shard_map/transpose(jvp())/while/body/closed_call/dot_general``, and the user's line. Equations have both
too. A path that names no equation is what a primitive was lowered to, and its beginning names that primitive's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr, user_line
from jax_deepcompile.hlo.opcodes import CONTROL, FREE, split
from jax_deepcompile.hlo.trip_counts import trip_count
from jax_deepcompile.hlo.types import Array, Computation, Instruction, Module
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.traversal import nested_jaxprs

_LOOPS = {"scan": "while"}
"""Primitives whose lowering goes by another name."""

_NO_SCOPE = re.compile(r"jit\(.*\)|shard_map|closed_call|eval_jaxpr|checkpoint|rematted_computation|branch_\d+_fun|")
"""Parts of a path that stand for no scope and no primitive."""

_COMBINED = re.compile(r"(.*?/)?\((.*:.*)\)")
_LOOP_REGION = re.compile(r"\bwhile/(body|cond)\b")

_WAITS = ("-update", "-done")
"""Parts of an asynchronous operation that run nothing themselves."""

Path = tuple[str, ...]


@dataclass(frozen=True)
class Site:
    """One equation.

    Attributes:
      position: in ``ir.traversal.equations`` of the program's jaxpr.
      line: the user's, ``file:line (function)``.
      shapes: of its results on one device.
    """

    position: int
    line: str
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ExecutedOp:
    """One HLO op that runs on the device by itself.

    Attributes:
      name: of the instruction.
      executions: in one run; None where a loop does not tell how often it runs.
      sites: the equations it may stem from; more than one where it is fused, or where several of one line look alike.
      where: the user's line; empty if no equation was found.
    """

    name: str
    executions: int | None
    sites: tuple[Site, ...]
    where: str


def executed_ops(module: Module, program: Program) -> tuple[ExecutedOp, ...]:
    """The ops of a compiled ``program`` that take time, in schedule order; what calls others is left out."""
    sites = _sites(program)
    instructions: dict[str, Instruction] = {}
    executions: dict[str, int | None] = {}
    for instruction, times in _executed(module, module.entry, 1):
        earlier = executions.get(instruction.name, 0)
        executions[instruction.name] = None if times is None or earlier is None else earlier + times
        instructions[instruction.name] = instruction
    origins = {name: _origins(instruction, module, sites) for name, instruction in instructions.items()}
    return tuple(
        ExecutedOp(name, executions[name], found, found[0].line if found else "") for name, found in origins.items()
    )


def _executed(module: Module, computation: Computation, times: int | None) -> Iterator[tuple[Instruction, int | None]]:
    """Instructions that run, and how often, when ``computation`` runs ``times``; conditions of loops are left out."""
    for instruction in computation.instructions:
        if instruction.opcode == "while":
            rounds = trip_count(module, instruction)
            inner = None if times is None or rounds is None else times * rounds
            yield from _executed(module, module.body(instruction), inner)
        elif instruction.opcode in CONTROL:
            for called in instruction.called:
                inner = None if instruction.opcode == "conditional" else times
                yield from _executed(module, module.computations[called], inner)
        elif instruction.opcode not in FREE and split(instruction.opcode)[1] not in _WAITS:
            yield instruction, times


def _origins(instruction: Instruction, module: Module, sites: Mapping[Path, list[Site]]) -> tuple[Site, ...]:
    """Of the instruction and, if it is a fusion, of what is fused in it; its own first."""
    found: dict[int, Site] = {}
    fused = module.body(instruction).instructions if instruction.opcode == "fusion" else ()
    for part in (instruction, *fused):
        for path in _paths(part.op_name):
            alike = _most_alike(part, module.source(part), _longest_known(_scopes(path), sites))
            found |= {site.position: site for site in alike}
    return tuple(found.values())


def _paths(op_name: str) -> Iterator[str]:
    """Of all that an instruction was made of: ``a;b``, and ``a/(b:c)`` for ``a/b`` and ``a/c``."""
    for path in op_name.split(";"):
        combined = _COMBINED.fullmatch(path)
        if combined is None:
            yield path
        else:
            yield from (f"{combined[1] or ''}{rest}" for rest in combined[2].split(":"))


def _most_alike(instruction: Instruction, line: str, sites: list[Site]) -> list[Site]:
    """Those of ``sites`` on the line, of these those with the shape of the instruction; where none is, all."""
    sites = [site for site in sites if site.line.startswith(f"{line} (")] or sites
    shape = instruction.shape
    return [site for site in sites if isinstance(shape, Array) and shape.dims in site.shapes] or sites


def _longest_known(path: Path, sites: Mapping[Path, list[Site]]) -> list[Site]:
    while path and path not in sites:
        path = path[:-1]
    return sites[path] if path else []


def _scopes(path: str) -> Path:
    parts = _LOOP_REGION.sub("while", path).split("/")
    return tuple(part for part in parts if not _NO_SCOPE.fullmatch(part))


def _sites(program: Program) -> Mapping[Path, list[Site]]:
    """All equations by their paths."""
    sites: dict[Path, list[Site]] = defaultdict(list)
    for position, (path, eqn) in enumerate(_equations(program.jaxpr, "")):
        shapes = tuple(getattr(var.aval, "shape", ()) for var in eqn.outvars)
        sites[_scopes(path)].append(Site(position, user_line(eqn), shapes))
    return dict(sites)


def _equations(jaxpr, outside: str) -> Iterator[tuple[str, jex.JaxprEqn]]:
    """Every equation in the order of ``ir.traversal.equations``, with its path."""
    for eqn in open_jaxpr(jaxpr).eqns:
        name = _LOOPS.get(eqn.primitive.name, eqn.primitive.name)
        path = f"{outside}/{eqn.source_info.name_stack}/{name}"
        yield path, eqn
        for inner in nested_jaxprs(eqn):
            yield from _equations(inner, path)
