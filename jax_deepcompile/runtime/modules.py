"""What ``FILE.py:NAME`` and ``package.module:NAME`` mean on the command line."""

import dataclasses
import difflib
import importlib
import importlib.util
import pkgutil
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
        nearest = _nearest_module(error.name or where)
        raise errors.SpecError(spec, f"there is no module {error.name}{_hint(nearest)}") from error
    if not hasattr(module, name):
        meant = (each for each, value in vars(module).items() if not each.startswith("_") and _may_be_meant(value))
        raise errors.SpecError(spec, f"{module.__name__} has no {name}{_hint(nearest_name(name, meant))}")
    return getattr(module, name)


def _hint(nearest: str | None) -> str:
    return f"; the nearest is {nearest}" if nearest else ""


def _may_be_meant(value: Any) -> bool:
    """Whether it is a function or a config; modules and classes are what a file has imported."""
    return not isinstance(value, type) and (callable(value) or dataclasses.is_dataclass(value))


def _nearest_module(name: str) -> str | None:
    """In the package that ``name`` is of, or the current folder."""
    package, dot, last = name.rpartition(".")
    folders = getattr(sys.modules.get(package), "__path__", ()) if package else [str(Path.cwd())]
    nearest = nearest_name(last, (each.name for each in pkgutil.iter_modules(folders)))
    return nearest and f"{package}{dot}{nearest}"


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
