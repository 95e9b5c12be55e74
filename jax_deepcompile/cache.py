"""Plans on disk, by fingerprint; JAX's persistent compilation cache lies beside them."""

from __future__ import annotations

import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

from jax_deepcompile import errors
from jax_deepcompile.planning.plan import Plan


class PlanCacheWarning(UserWarning):
    """A cached plan could not be read or kept; the step is planned anew, and nothing else changes."""


@dataclass(frozen=True)
class PlanCache:
    """Plans in ``directory/plans``, one file a fingerprint."""

    directory: Path

    def load(self, fingerprint: str) -> Plan | None:
        """The plan for ``fingerprint``, or None; an entry that cannot be used is reported and left out."""
        path = self._path(fingerprint)
        try:
            text = path.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            _warn(path, str(error))
            return None
        try:
            plan = Plan.from_json(text, str(path))
        except errors.PlanError as error:
            _warn(path, str(error))
            return None
        if plan.fingerprint != fingerprint:
            _warn(path, f"it was made for another program ({plan.fingerprint[:12]}, not {fingerprint[:12]})")
            return None
        return plan

    def store(self, plan: Plan) -> None:
        """Writes ``plan`` whole or not at all; a directory that cannot be written to is reported."""
        path = self._path(plan.fingerprint)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            with os.fdopen(handle, "w") as file:
                file.write(plan.to_json())
            os.replace(name, path)
        except OSError as error:
            warnings.warn(f"the plan was not kept: {error}", PlanCacheWarning, stacklevel=2)

    def refuse(self, plan: Plan, why: str) -> None:
        """Reports that ``plan``, which was found, is not used."""
        _warn(self._path(plan.fingerprint), why)

    @property
    def executables(self) -> Path:
        """Where JAX's compilation cache goes."""
        return self.directory / "executables"

    def _path(self, fingerprint: str) -> Path:
        return self.directory / "plans" / f"{fingerprint}.json"


def _warn(path: Path, why: str) -> None:
    warnings.warn(
        f"the cached plan {path} is not used: {why}. The step is planned anew.", PlanCacheWarning, stacklevel=3
    )
