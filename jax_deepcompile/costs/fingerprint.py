"""A digest that is equal, in any process, where what was measured of a program may be used again."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping

import jax.numpy as jnp

from jax_deepcompile._jax_compat import without_colors
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
    with without_colors():
        text = _same_everywhere(f"{program}\n{ports}\n{program.state_outputs}")
    return _LITERAL.sub(lambda found: f"{_FLOATS[found[2]].type(float(found[1]))}:{found[2]}[]", text)


def fingerprint(text: str, machine: Machine, options: Mapping[str, object] | None = None) -> str:
    """The digest of a program on a machine, in hexadecimal.

    Args:
      text: of the program, see ``program_text``.
      machine: device kind, mesh and versions.
      options: what else counts, by name, such as XLA's options. Its flags do, as far as they decide what it makes.
    """
    flags = deciding_flags(os.environ.get("XLA_FLAGS", ""), machine.device_kind)
    parts = (text, repr(machine), repr(flags), _same_everywhere(repr(sorted((options or {}).items()))))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def deciding_flags(flags: str, device_kind: str) -> list[tuple[str, str]]:
    """Those of XLA's ``flags`` that decide what it compiles for a device, sorted; of one given twice the last one."""
    others = "--xla_gpu_" if "cpu" in device_kind.lower() else "--xla_cpu_"
    given = (flag.partition("=") for flag in flags.split() if not flag.startswith((*_DECIDE_NOTHING, others)))
    return sorted({name: value or "true" for name, _, value in given}.items())


_DECIDE_NOTHING = (
    "--xla_dump_",
    "--xla_force_host_platform_device_count",
    "--xla_gpu_cuda_data_dir",
    "--xla_gpu_kernel_cache_file",
    "--xla_gpu_per_fusion_autotune_cache_dir",
    "--xla_tpu_",
)
"""How flags begin that say where files are, and how many devices a CPU is, which the mesh says again."""


def _same_everywhere(text: str) -> str:
    """``text`` without what differs from one process to the next: addresses, and the order of sets."""
    return _SET.sub(lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", _ADDRESS.sub("0x", text))
