"""Which planner made a plan: another one may know better, and its plans are others."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

ROOMS = ("_jax_compat.py", "analysis", "costs", "hlo", "ir", "lowering", "planner", "transforms")
"""Of this package, what plans are made with; what comes before makes the program, and what comes after prints."""

_SUFFIXES = frozenset({".csv", ".json", ".py", ".txtpb"})


@functools.cache
def planner_digest(package: Path = Path(__file__).parents[1]) -> str:
    """The digest of all source files and tables of ``package`` that decide what a plan says."""
    found = (path for room in ROOMS for path in (package / room, *(package / room).rglob("*")))
    digest = hashlib.sha256()
    for path in sorted(path for path in found if path.suffix in _SUFFIXES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\0".encode() + content)
    return digest.hexdigest()
