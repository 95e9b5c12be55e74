"""Device memory that a local program needs, before it is compiled: the liveness of its values in program order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_deepcompile._jax_compat import is_drop_var, open_jaxpr
from jax_deepcompile.analysis.dataflow import alike, variables
from jax_deepcompile.analysis.kernels import kernels_of
from jax_deepcompile.analysis.work import fuses
from jax_deepcompile.costs.memory import MemoryUse, live_bytes_of
from jax_deepcompile.costs.packing import Block
from jax_deepcompile.ir.memory import is_on_host, size_bytes
from jax_deepcompile.ir.primitives import Scan, While
from jax_deepcompile.ir.program import Port, Program
from jax_deepcompile.ir.traversal import bodies


def memory_of_program(program: Program) -> MemoryUse:
    """What ``program``, in the local view, needs while each of its equations runs.

    Arguments and results have memory from beginning to end, a donated argument and the result that takes its buffer
    together. Views, and what is fused away, have none. There are no gaps between buffers.
    """
    jaxpr = open_jaxpr(program.jaxpr)
    donors = {result: argument for argument, result in program.state_outputs}
    arguments, host_arguments = _bytes(jaxpr.invars, program.inputs)
    results = [place for place in range(len(jaxpr.outvars)) if place not in donors]
    outputs, host_outputs = _bytes(
        [jaxpr.outvars[place] for place in results], [program.outputs[place] for place in results]
    )
    walk = _Walk()
    walk.jaxpr(
        jaxpr, "", [(out, jaxpr.invars[donors[at]] if at in donors else None) for at, out in enumerate(jaxpr.outvars)]
    )
    temporary = walk.live_bytes()
    peak = max(range(len(temporary)), key=temporary.__getitem__, default=0)
    needed = [(value.bytes, value.name) for value in walk.values if value.begin <= peak <= value.end]
    return MemoryUse(
        argument_bytes=arguments,
        output_bytes=outputs,
        temporary_bytes=max(temporary, default=0),
        host_bytes=host_arguments + host_outputs + walk.host_bytes,
        names=tuple(walk.names),
        live_bytes=tuple(size + arguments + outputs for size in temporary),
        peak_values=tuple(sorted(needed, reverse=True)),
    )


def live_bytes_of_equations(program: Program) -> list[int]:
    """The most that is needed while each equation of ``program`` itself runs, with all that is inside of it."""
    memory, live_bytes, most = memory_of_program(program), [], 0
    for name, size in zip(memory.names, memory.live_bytes, strict=True):
        most = max(most, size)
        if "/" not in name:
            live_bytes.append(most)
            most = 0
    return live_bytes


@dataclass(frozen=True)
class _Value:
    """A temporary.

    Attributes:
      name: of the equation that makes it.
      bytes: that it takes.
      begin: position from which it is needed.
      end: position of its last use.
    """

    name: str
    bytes: int
    begin: int
    end: int


@dataclass
class _Walk:
    """Goes through a program in the order in which it runs, bodies of loops before the loop itself.

    Attributes:
      names: the equations so far; a position is a place in this list.
      values: the temporaries so far.
      host_bytes: of temporaries in the host's memory.
    """

    names: list[str] = field(default_factory=list)
    values: list[_Value] = field(default_factory=list)
    host_bytes: int = 0

    def live_bytes(self) -> list[int]:
        """Bytes of temporaries needed at each position."""
        blocks = [Block(value.bytes, ((value.begin, value.end),)) for value in self.values]
        return live_bytes_of(blocks, len(self.names))[: len(self.names)].tolist()

    def jaxpr(self, flat: Any, path: str, given: Sequence[tuple[Any, Any]]) -> None:
        """Adds a jaxpr.

        Args:
          flat: an open jaxpr.
          path: put before its equations' names.
          given: results that have memory elsewhere; with each the operand whose memory it takes over, if any.
        """
        sources = kernels_of(flat).sources
        begins, ends = [], []
        for place, eqn in enumerate(flat.eqns):
            begins.append(len(self.names))
            name = f"{path}{eqn.primitive.name}.{place}"
            for body, results in _inner(eqn):
                self.jaxpr(body, f"{name}/", results)
            ends.append(len(self.names))
            self.names.append(name)
        last = _last_uses(flat, sources, begins, ends)
        elsewhere = {home: taken for out, taken in given for home in _homes([out], sources)}
        made: set = set()
        for begin, end, eqn in zip(begins, ends, flat.eqns, strict=True):
            dying = [var for var in _homes(eqn.invars, sources) if fuses(eqn) and var in made and last[var] == end]
            for out in eqn.outvars:
                if is_drop_var(out) or out in sources:
                    continue
                until = last.get(out, end)
                if out in elsewhere:
                    until = last.get(elsewhere[out], -1) - 1
                replaced = next((var for var in dying if alike(var, out)), None)
                if replaced is not None:
                    dying.remove(replaced)
                made.add(out)
                self._value(out, self.names[end], begin + (replaced is not None), until)

    def _value(self, var: Any, name: str, begin: int, end: int) -> None:
        if is_on_host(var):
            self.host_bytes += size_bytes(var)
        elif begin <= end:
            self.values.append(_Value(name, size_bytes(var), begin, end))


def _homes(atoms: Sequence, sources: Mapping) -> list:
    """The variables in memory that are read for ``atoms``, each once."""
    return list(dict.fromkeys(home for var in variables(atoms) for home in sources.get(var, (var,))))


def _last_uses(flat: Any, sources: Mapping, begins: Sequence[int], ends: Sequence[int]) -> dict:
    """The position of each variable's last use: of what a loop takes over, just before its first trip."""
    last: dict = {}
    for begin, end, eqn in zip(begins, ends, flat.eqns, strict=True):
        carried, others = _operands(eqn)
        for atoms, position in ((carried, begin - 1), (others, end)):
            last |= {home: max(position, last.get(home, -1)) for home in _homes(atoms, sources)}
    return last | dict.fromkeys(_homes(flat.outvars, sources), max(ends, default=0))


def _operands(eqn: Any) -> tuple[list, list]:
    """What a loop carries, and all else that it reads."""
    if eqn.primitive.name not in ("scan", "while"):
        return [], eqn.invars
    operands = (Scan if eqn.primitive.name == "scan" else While)(eqn).operands._asdict()
    return operands.pop("carry"), [atom for others in operands.values() for atom in others]


def _inner(eqn: Any) -> Iterator[tuple[Any, list]]:
    """What an equation runs, with the results that have memory outside, as in ``_Walk.jaxpr``."""
    match eqn.primitive.name:
        case "scan":
            yield Scan(eqn).body, list(zip(Scan(eqn).body.outvars, Scan(eqn).inputs.carry, strict=False))
        case "while":
            body = While(eqn).body
            yield While(eqn).condition, []
            yield body, list(zip(body.outvars, body.invars[-len(body.outvars) :], strict=True))
        case _:
            for body in map(open_jaxpr, bodies(eqn)):
                yield body, [(out, None) for out in body.outvars]


def _bytes(values: Sequence, ports: Sequence[Port]) -> tuple[int, int]:
    """Bytes on the device and on the host."""
    sizes = [(size_bytes(value), port.memory_kind != "device") for value, port in zip(values, ports, strict=True)]
    return sum(size for size, host in sizes if not host), sum(size for size, host in sizes if host)
