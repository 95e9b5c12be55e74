"""Memory that is free here and now."""

from __future__ import annotations

import ctypes
from pathlib import Path

from jax.sharding import Mesh


def free_bytes(mesh: Mesh) -> int | None:
    """Of each device of ``mesh`` in this process, at least; None where nobody knows.

    Devices that share a host share what is free of its memory.
    """
    here = list(mesh.local_devices)
    stats = [device.memory_stats() or {} for device in here]
    if all("bytes_limit" in each for each in stats):
        return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
    available = available_bytes()
    return None if available is None or here[0].platform != "cpu" else available // len(here)


def available_bytes(path: Path = Path("/proc/meminfo")) -> int | None:
    """Memory of this host that programs can have without swapping; None where its kernel does not say."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def trim_heap() -> None:
    """Gives back to the system what C's allocator keeps of freed memory, where it is glibc's.

    That has a heap for each thread, and after compiling in several a process takes several times what it uses.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
