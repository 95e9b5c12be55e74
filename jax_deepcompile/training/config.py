"""What an experiment is made of: the options of ``deepcompile train NAME``, with units in their names."""

import dataclasses
import typing
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from jax_deepcompile.cli.values import bounded


class ConfigError(ValueError):
    """A setting, file or name the user gave cannot be used; the sentence says which, why, and what would be right."""


AtLeastOne = Annotated[int, bounded(int, 1)]
AtLeastOneOrNone = Annotated[int | None, bounded(int, 1, or_none=True)]
Fraction = Annotated[float, bounded(float, 0, 1)]
NotNegative = Annotated[float, bounded(float, 0)]


@dataclasses.dataclass(frozen=True)
class Data:
    """Bytes of text, packed into sequences. ``files`` are paths, directories or globs; none is Python's own library."""

    target: ClassVar[str] = "byte"

    files: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--data"])] = ()
    sequence_length: Annotated[int, bounded(int, 2)] = 128
    batch_size: AtLeastOne = 16
    held_out_fraction: Annotated[float, bounded(float, 0.001, 0.5)] = 0.02
    shuffle_seed: Annotated[int, bounded(int, 0, 2**32 - 1)] = 0


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW under a linear warm-up and a cosine decay, after clipping by global norm.

    The warm-up takes ``warmup_fraction`` of ``decay_steps``, and the rate ends at ``final_fraction`` of its peak. Where
    ``decay_steps`` is none it is ``train.steps``, so a run resumed for more steps has another schedule from there on.
    """

    learning_rate: NotNegative = 3e-3
    warmup_fraction: Fraction = 0.1
    decay_steps: AtLeastOneOrNone = None
    final_fraction: Fraction = 0.1
    weight_decay: NotNegative = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    clip_norm: NotNegative = 1.0


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The batch is split over all devices; the state over ``fsdp`` of them, and copied ``replicas`` times.

    ``fsdp`` none takes every device that ``replicas`` leaves.
    """

    fsdp: AtLeastOneOrNone = None
    replicas: AtLeastOne = 1


@dataclasses.dataclass(frozen=True)
class Train:
    """How long to run, and what to leave behind on the way."""

    steps: Annotated[int, bounded(int, 1), tyro.conf.arg(aliases=["--steps"])] = 200
    seed: Annotated[int, bounded(int, 0)] = 0
    log_every_steps: AtLeastOne = 10
    checkpoint_every_steps: AtLeastOne = 100
    keep_checkpoints: AtLeastOne = 2
    held_out_batches: AtLeastOne = 8
    explain: bool = True


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One training run.

    ``model`` is a model's own config, registered with ``build_model``; ``data`` are text, or what is registered with
    ``load_data``.
    """

    model: Any
    data: Any = Data()
    optimizer: Optimizer = Optimizer()
    mesh: Mesh = Mesh()
    train: Train = Train()


REGISTRY = ConstructorRegistry()
"""How those settings of a model's own config are read that are no plain values."""

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
_POLICIES = {
    "None": None,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@REGISTRY.primitive_rule
def _named(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """A dtype or a checkpoint policy by its name."""
    if info.type is type(jnp.float32):
        named = _DTYPES
    elif info.type == Callable[..., Any] | None:
        named = _POLICIES
    else:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(named) + "}",
        instance_from_str=lambda words: named[words[0]],
        is_instance=lambda value: value in named.values(),
        str_from_instance=lambda value: [spell(value)],
        choices=tuple(named),
    )


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting of a config under its dotted name, in the order of declaration."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        settings |= flatten(value, name + ".") if dataclasses.is_dataclass(value) else {name: value}
    return settings


def spell(value: Any) -> str:
    """The text a value is recorded as."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(spell, value))
    return str(getattr(value, "__name__", value))


def check(config: Any, prefix: str = "") -> None:
    """Checks the bounds of every setting, for configs written in Python."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            check(value, name + ".")
        for spec in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(spec, PrimitiveConstructorSpec):
                try:
                    spec.instance_from_str(spec.str_from_instance(value))
                except ValueError as error:
                    raise ConfigError(f"{name}={value}: {error}") from error
