"""Dotted keys into nested frozen dataclasses: list them, set them from ``key=value`` texts, check them.

>>> import dataclasses
>>> @dataclasses.dataclass(frozen=True)
... class Optimizer:
...     learning_rate: float = 1e-3
>>> @dataclasses.dataclass(frozen=True)
... class Config:
...     optimizer: Optimizer = Optimizer()
>>> override(Config(), ["optimizer.learning_rate=3e-4"]).optimizer.learning_rate
0.0003
>>> override(Config(), ["learning_rt=1"])
Traceback (most recent call last):
    ...
experiments.values.ConfigError: learning_rt=1: there is no key 'learning_rt'; the nearest is 'optimizer.learning_rate'
"""

import dataclasses
import typing
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from experiments.values import ConfigError, check_value, nearest_name, parse

Config = TypeVar("Config")


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting of a config under its dotted key, in the order of declaration."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            settings |= flatten(value, key + ".")
        else:
            settings[key] = value
    return settings


def spell(value: Any) -> str:
    """The text a value is set by: what ``key=`` would be followed by."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(spell, value))
    return str(getattr(value, "__name__", value))


def override(config: Config, assignments: Sequence[str]) -> Config:
    """Applies ``key=value`` texts in order. A key is dotted, or its last part alone where only one setting ends so.

    Args:
        config: a frozen dataclass, nested at will.
        assignments: for example ``["optimizer.learning_rate=1e-3", "steps=40"]``.

    Returns:
        A new config of the same type; nothing is changed in place.

    Raises:
        ConfigError: the key does not exist or could be several, or the value is not of the key's type.
    """
    for assignment in assignments:
        key, equals, text = (part.strip() for part in assignment.partition("="))
        if not equals:
            found = _nearest_key(key, flatten(config))
            hint = f"; did you mean {found}=...?" if found else ""
            raise ConfigError(f"{assignment!r} is not of the form key=value{hint}")
        config = _replace(config, resolve_key(config, key, assignment).split("."), text, assignment)
    return config


def resolve_key(config: Any, key: str, where: str) -> str:
    """The full dotted key that ``key`` stands for; ``where`` begins the sentence of the error when there is none."""
    keys = list(flatten(config))
    if key in keys:
        return key
    if section := [full for full in keys if full.startswith(key + ".")]:
        raise ConfigError(f"{where}: {key!r} is a section, not a setting; it holds {', '.join(section)}")
    short = [full for full in keys if full.endswith("." + key)]
    if len(short) == 1:
        return short[0]
    if short:
        raise ConfigError(f"{where}: {key!r} could be {' or '.join(short)}; write one of them in full")
    found = _nearest_key(key, keys)
    remedy = f"the nearest is {found!r}" if found else f"the keys are {', '.join(keys)}"
    raise ConfigError(f"{where}: there is no key {key!r}; {remedy}")


def check(config: Any, prefix: str = "") -> None:
    """Checks the value of every setting against its annotation, for configs written in Python."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            check(value, key + ".")
        else:
            check_value(value, hints[field.name], f"{key}={spell(value)}")


def _nearest_key(key: str, keys: Iterable[str]) -> str | None:
    """The nearest full key. A short name is compared with last parts first, since that is what was meant."""
    keys = list(keys)
    if "." not in key:
        by_last_part = {full.rpartition(".")[2]: full for full in keys}
        if found := nearest_name(key, by_last_part):
            return by_last_part[found]
    return nearest_name(key, keys)


def _replace(config: Any, path: list[str], text: str, where: str) -> Any:
    name, *rest = path
    value = getattr(config, name)
    if rest:
        new = _replace(value, rest, text, where)
    else:
        new = parse(text, typing.get_type_hints(type(config), include_extras=True)[name], value, where)
    try:
        return dataclasses.replace(config, **{name: new})
    except ConfigError:
        raise
    except (
        ValueError,
        TypeError,
        AssertionError,
    ) as error:  # from a config's __post_init__
        raise ConfigError(f"{where}: {error}") from error
