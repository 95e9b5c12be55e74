"""Plans on disk, by fingerprint; what was compiled lies beside them, see ``executables.py``."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from jax_deepcompile import errors
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.runtime.files import write_whole
from jax_deepcompile.transforms import TRANSFORMS
from jax_deepcompile.transforms.decision import Decision


class PlanCacheWarning(UserWarning):
    """What is kept between runs could not be used or kept; it is made anew, and nothing else changes."""


@dataclass(frozen=True)
class PlanCache:
    """Plans in ``directory/plans``, one file a fingerprint, of decisions of these ``kinds``."""

    directory: Path
    kinds: tuple[type[Decision], ...] = TRANSFORMS

    def load(self, fingerprint: str) -> Plan | None:
        """The plan for ``fingerprint``, or None; an entry that cannot be used is reported and put aside."""
        path = self._path(fingerprint)
        try:
            if not path.is_file():
                return None
            plan = Plan.from_json(path.read_text("utf-8", "replace"), str(path), self.kinds)
        except OSError as error:
            _warn(path, str(error))
            return None
        except errors.PlanError as error:
            self._put_aside(path, error.why)
            return None
        if plan.fingerprint != fingerprint:
            why = f"it was made for another program ({plan.fingerprint[:12]!r}, not {fingerprint[:12]!r})"
            self._put_aside(path, why)
            return None
        return plan

    def store(self, plan: Plan) -> None:
        """Writes ``plan`` whole or not at all; a directory that cannot be written to is reported."""
        try:
            write_whole(self._path(plan.fingerprint), plan.to_json())
        except OSError as error:
            warnings.warn(f"the plan was not kept: {error}", PlanCacheWarning, stacklevel=2)

    def refuse(self, plan: Plan, why: str) -> None:
        """Reports that ``plan``, which was found, is not used, and puts it aside."""
        self._put_aside(self._path(plan.fingerprint), why)

    @property
    def executables(self) -> Path:
        """Where what was compiled goes."""
        return self.directory / "executables"

    def _path(self, fingerprint: str) -> Path:
        return self.directory / "plans" / f"{fingerprint}.json"

    def _put_aside(self, path: Path, why: str) -> None:
        """Later runs do not meet it again; where the directory is somebody else's, they do."""
        aside = path.with_suffix(".unusable")
        try:
            os.replace(path, aside)
        except OSError as error:
            _warn(path, f"{why}. It stays there ({error.strerror})")
        else:
            _warn(path, f"{why}. It is now {aside.name}")


def _warn(path: Path, why: str) -> None:
    warnings.warn(
        f"the cached plan {path} is not used: {why}. The step is planned anew.", PlanCacheWarning, stacklevel=4
    )
