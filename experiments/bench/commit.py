"""Which code a result is of."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    """The commit checked out here, followed by ``+`` where code differs from it; empty outside of a checkout."""
    try:
        changed = _git("diff", "--name-only", "HEAD", "--", ":/*.py", ":/*.toml", ":/*.txtpb")
        return _git("rev-parse", "--short=7", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*command: str) -> str:
    here = Path(__file__).parent
    return subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
