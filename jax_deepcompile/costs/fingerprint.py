"""A digest that is equal, in any process, where what was measured of a program may be used again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import jax.numpy as jnp

from jax_deepcompile.costs.entries import Machine
from jax_deepcompile.ir.program import Program

_ADDRESS = re.compile(r"\b0x[0-9a-fA-FX]+")
_SET = re.compile(r"\{('[^{}]*')\}")
_LITERAL = re.compile(r"(-?\d[\d.]*(?:e[+-]?\d+)?):(f32|f16|bf16)\[\]")
_FLOATS = {"f32": jnp.dtype("float32"), "f16": jnp.dtype("float16"), "bf16": jnp.dtype("bfloat16")}


def program_text(program: Program) -> str:
    """All of ``program`` that its compilation depends on, source lines left out, the same in every process.

    Printed parameters of equations hold addresses of functions, and sets in the order of their hashes. A literal is
    printed as Python's number or rounded to its type, depending on what JAX traced before.
    """
    ports = "\n".join(
        f"{port.shape} {port.dtype} {port.placement} {port.memory_kind}" for port in program.inputs + program.outputs
    )
    text = _ADDRESS.sub("0x", f"{program}\n{ports}\n{program.state_outputs}")
    text = _SET.sub(lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", text)
    return _LITERAL.sub(lambda found: f"{_FLOATS[found[2]].type(float(found[1]))}:{found[2]}[]", text)


def fingerprint(text: str, machine: Machine, options: Mapping[str, object] | None = None) -> str:
    """The digest of a program on a machine, in hexadecimal.

    Args:
      text: of the program, see ``program_text``.
      machine: device kind, mesh and versions.
      options: XLA's options, by name.
    """
    parts = (text, repr(machine), repr(sorted((options or {}).items())))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
