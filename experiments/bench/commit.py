"""Which code a result is of."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    """The commit checked out here, followed by ``+`` where files differ from it; empty outside of a checkout."""
    described = ["git", "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=7"]
    try:
        found = subprocess.run(described, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()
