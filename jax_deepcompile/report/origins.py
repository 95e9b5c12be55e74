"""What an instruction is of, in words, and its line: its own, or by parameters, or by what is beside it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jax_deepcompile._jax_compat import users_line
from jax_deepcompile.analysis.names import parameter_names
from jax_deepcompile.costs.neighbours import Neighbours
from jax_deepcompile.ir.program import Program, Role
from jax_deepcompile.report.words import operation_text


@dataclass(frozen=True)
class Origins:
    """Of the instructions of a module.

    Attributes:
      neighbours: what stands beside them; None where there is no module.
      inputs: what its arguments are called; empty where that is not known.
      trained: which of them are parameters.
    """

    neighbours: Neighbours | None
    inputs: Sequence[str] = ()
    trained: Collection[int] = ()

    @classmethod
    def of(cls, module: Any, program: Program | None = None) -> Origins:
        """Of ``module``, which was compiled from ``program`` in the local view; either may be None."""
        neighbours = None if module is None else Neighbours(module)
        if program is None:
            return cls(neighbours)
        trained = [number for number, port in enumerate(program.inputs) if port.role is Role.PARAM]
        return cls(neighbours, parameter_names(program), trained)

    def said(self, name: str, op_name: str, source: str) -> tuple[str, str]:
        """What the instruction called ``name`` does, and the user's line."""
        text, line = operation_text(op_name), users_line(source)
        if self.neighbours is None:
            return text or name, line
        near = [] if line and text else self.neighbours.near(name)
        line = line or next(filter(None, (users_line(where) for _, where in near)), "")
        if _scope(op_name):
            return text, line
        kind, numbers = self.neighbours.moved(name, self.trained) if self.inputs else ("", [])
        if numbers:
            more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
            return f"{self.inputs[numbers[0]]}{more} {kind.replace('-', '_')}", line
        if text or not near:
            return text or name, line
        chosen, where = next((each for each in near if _scope(each[0])), near[0])
        return operation_text(chosen), users_line(where) or line


def _scope(op_name: str) -> str:
    """The user's modules in it; empty where there are none."""
    *scope, _ = operation_text(op_name).split() or [""]
    return " ".join(scope) if scope and not scope[0].isdigit() else ""
