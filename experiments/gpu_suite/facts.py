"""What this machine is."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from experiments.gpu_suite.cases import Row


def machine_facts() -> Iterator[Row]:
    """One row: ``platform device_kind devices`` and ``versions``, as far as they can be known."""
    import jax

    device = jax.devices()[0]
    packages = {
        name: _version(name) for name in ("jax", "jaxlib", "flax", "optax", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
    }
    versions = {
        "python": platform.python_version(),
        **packages,
        "platform": str(device.client.platform_version).replace("\n", " "),
        "driver": _driver(),
    }
    yield {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "versions": {name: found for name, found in versions.items() if found},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _driver() -> str:
    """Of the first GPU, with its clocks and power limit; empty where nvidia-smi is not there to ask."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = "--query-gpu=driver_version,power.limit,clocks.max.sm,clocks.max.mem"
    asked = subprocess.run(
        [tool, query, "--format=csv,noheader"], capture_output=True, text=True, check=False, timeout=30
    )
    return asked.stdout.strip().partition("\n")[0] if asked.returncode == 0 else ""
