"""Which experiments there are: modules that assign ``CONFIG``, whose names are theirs, in folders."""

import ast
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_deepcompile.runtime.modules import find_first, from_file, named_by, nearest_name
from jax_deepcompile.runtime.sources import assigned, source
from jax_deepcompile.training.config import ConfigError, Experiment, check


def names(folders: Sequence[Path]) -> dict[str, str]:
    """Every experiment by name, with the first line of its docstring. Read from the source: nothing is imported."""
    return {name: summary for name, (_, summary) in _found(folders).items()}


def load(name: str, folders: Sequence[Path]) -> Experiment:
    """The checked config of the experiment called ``name``, or that ``FILE.py:NAME`` or ``package.module:NAME`` is.

    Args:
        name: of the experiment.
        folders: where experiments are; of those of one name the last is taken. A folder may be a package.

    Raises:
        ConfigError: no experiment has that name, or a value in its file is wrong.
        SpecError: there is no such file, module or name.
    """
    experiment: Any = named_by(name) if ":" in name else _config(name, _found(folders))
    if not isinstance(experiment, Experiment):
        raise ConfigError(f"{name} is a {type(experiment).__name__}, not an Experiment of jax_deepcompile.training")
    check(experiment)
    return experiment


def _found(folders: Sequence[Path]) -> dict[str, tuple[Path, str]]:
    """Name -> file and summary."""
    found = {}
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            try:
                module = source(path)
            except (SyntaxError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}: {error}") from error
            if "CONFIG" in assigned(module):
                found[path.stem] = path, (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def _config(name: str, found: dict[str, tuple[Path, str]]) -> Any:
    if name not in found:
        nearest = nearest_name(name, found)
        hint = f"; the nearest is {nearest!r}" if nearest else ""
        hint = f"; say which name of the file, {name}:NAME" if name.endswith(".py") else hint
        known = ", ".join([*found, "FILE.py:NAME and package.module:NAME"])
        raise ConfigError(f"there is no experiment {name!r}{hint}; there are {known}")
    path, _ = found[name]
    if not (path.parent / "__init__.py").exists():
        find_first(path.parent)
        return from_file(path).CONFIG
    find_first(path.parent.parent)
    return importlib.import_module(f"{path.parent.name}.{name}").CONFIG
