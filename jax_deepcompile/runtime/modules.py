"""What ``FILE.py:NAME`` and ``package.module:NAME`` mean on the command line."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from jax_deepcompile import errors


def named_by(spec: str) -> Any:
    """What ``spec`` names; modules are found from the current folder on, as ``python -m`` finds them.

    Raises:
      SpecError: there is no such file, module or name.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise errors.SpecError(spec, "a part of it is missing")
    find_first(Path.cwd())
    try:
        module = _from_file(spec, Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ModuleNotFoundError as error:
        if where.split(".")[0] != (error.name or "").split(".")[0]:
            raise
        raise errors.SpecError(spec, f"there is no module {error.name}") from error
    if not hasattr(module, name):
        nearest = nearest_name(name, (each for each in vars(module) if not each.startswith("_")))
        hint = f"; the nearest is {nearest}" if nearest else ""
        raise errors.SpecError(spec, f"{module.__name__} has no {name}{hint}")
    return getattr(module, name)


def _from_file(spec: str, file: Path) -> Any:
    path = file.resolve()
    if not path.exists():
        raise errors.SpecError(spec, f"there is no file {file}")
    find_first(path.parent)
    return from_file(path)


def from_file(path: Path) -> Any:
    """Runs a file as a module of its stem's name, whatever else has that name.

    Raises:
      SyntaxError: it is no Python, or no text at all.
    """
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert isinstance(found.loader, SourceFileLoader)
    try:
        found.loader.get_code(path.stem)
    except (ValueError, SyntaxError) as error:
        if isinstance(error, SyntaxError) and error.filename:
            raise
        raise SyntaxError(str(error), (str(path), 1, 0, "")) from None
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


def find_first(folder: Path) -> None:
    """Has modules looked for in ``folder`` before anywhere else."""
    sys.path.insert(0, str(folder))


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that looks most like ``name``, or None where nothing does."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)), None)
