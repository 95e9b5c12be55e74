"""XLA's compiler for GPUs that are not here, in a folder of its own.

It is a plugin of JAX. Where one is installed every JAX program loads it, and complains if there is no GPU's driver. So
this one is kept beside the environment's packages, where nobody looks for plugins.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from jax_deepcompile import errors


def folder() -> Path:
    """Where it is kept for the JAX that is installed."""
    return Path(sys.prefix) / "share" / "jax_deepcompile" / f"compiler-{version('jaxlib')}"


def install() -> str:
    """Brings it by pip, some 180 MB; returns what to say.

    Raises:
      CompilerNotInstalledError: pip did not.
    """
    package, where = f"jax-cuda12-pjrt=={version('jaxlib')}", str(folder())
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target", where, package]
    if subprocess.run(pip, check=False).returncode:
        raise errors.CompilerNotInstalledError(package, where)
    return f"{package} compiles for GPUs that are not here, from {where}"
