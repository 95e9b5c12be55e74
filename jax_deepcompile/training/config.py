"""What an experiment is made of: the options of ``deepcompile train NAME``, with units in their names."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from jax_deepcompile.errors import DeepCompileError
from jax_deepcompile.training.values import bounded, one_of


class ConfigError(DeepCompileError, ValueError):
    """A setting, file or name the user gave cannot be used; the sentence says which, why, and what would be right."""


AtLeastOne = Annotated[int, bounded(int, 1)]
AtLeastOneOrNone = Annotated[int | None, bounded(int, 1, or_none=True)]
Fraction = Annotated[float, bounded(float, 0, 1)]
NotNegative = Annotated[float, bounded(float, 0)]


@dataclasses.dataclass(frozen=True)
class Data:
    """Bytes of text, packed into sequences.

    Attributes:
        files: paths, directories or globs; none is Python's own library.
        sequence_length: bytes of an example.
        batch_size: examples a step, on all devices together.
        held_out_fraction: of the sequences, which are not trained on.
        shuffle_seed: of the order of examples.
    """

    target: ClassVar[str] = "byte"

    files: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--data"])] = ()
    sequence_length: Annotated[int, bounded(int, 2)] = 128
    batch_size: AtLeastOne = 16
    held_out_fraction: Annotated[float, bounded(float, 0.001, 0.5)] = 0.02
    shuffle_seed: Annotated[int, bounded(int, 0, 2**32 - 1)] = 0

    @property
    def targets(self) -> int:
        """Of an example."""
        return self.sequence_length


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW under a linear warm-up and a cosine decay, after clipping by global norm.

    Attributes:
        learning_rate: its peak.
        warmup_fraction: of the decay's steps, in which the rate rises to its peak.
        decay_steps: until the rate is at its end; as many as train.steps where it is none, so a run resumed for more
            steps has another schedule from there on.
        final_fraction: of its peak, at which the rate ends.
        weight_decay: of every parameter, times the rate.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of their squares.
        clip_norm: largest norm of all gradients together.
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
    """The batch is split over all devices; the state over some of them, and copied to the others.

    Attributes:
        fsdp: devices over which the state is divided; all that replicas leave where it is none.
        replicas: copies of the state.
    """

    fsdp: AtLeastOneOrNone = None
    replicas: AtLeastOne = 1


@dataclasses.dataclass(frozen=True)
class Train:
    """How long to run, and what to leave behind on the way.

    Attributes:
        steps: in all, those of the run that is resumed included.
        seed: of parameters and dropout.
        log_every_steps: a line where there is no terminal.
        checkpoint_every_steps: and after the last.
        keep_checkpoints: the newest.
        held_out_batches: to evaluate the model on in the end, at most.
        base: folder of a run from whose newest checkpoint parameters come that are not trained, as of LoRA; where it is
            none they are as the model makes them.
        explain: print what the compiler decided.
    """

    steps: Annotated[int, bounded(int, 1), tyro.conf.arg(aliases=["--steps"])] = 200
    seed: Annotated[int, bounded(int, 0)] = 0
    log_every_steps: AtLeastOne = 10
    checkpoint_every_steps: AtLeastOne = 100
    keep_checkpoints: AtLeastOne = 2
    held_out_batches: AtLeastOne = 8
    base: str | None = None
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
"""How every command reads what is one of several names, those of a model's own config included."""

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
_POLICIES = {
    "None": None,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


_NAMED: dict[Any, dict[str, Any]] = {
    bool: {"True": True, "False": False},
    type: _DTYPES,
    type(jnp.float32): _DTYPES,
    Callable[..., Any] | None: _POLICIES,
}


def _names(hint: Any) -> dict[str, Any] | None:
    """What may be given for a value of this type, by name; None where that is no list."""
    if hint in _NAMED:
        return _NAMED[hint]
    if typing.get_origin(hint) is typing.Literal:
        return {str(each): each for each in typing.get_args(hint)}
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return None
    named = {}
    for each in typing.get_args(hint):
        names = {"None": None} if each is types.NoneType else _names(each)
        if names is None:
            return None
        named |= names
    return named


@REGISTRY.primitive_rule
def _one_of(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    names = _names(info.type)
    return None if names is None else one_of(names)


def _walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """The dotted name, value, annotation and meaning of every setting of a config, in the order of declaration."""
    hints, meanings = typing.get_type_hints(type(config), include_extras=True), _meanings(type(config))
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from _walk(value, name + ".")
        else:
            yield name, value, hints[field.name], meanings.get(field.name, "")


def flatten(config: Any) -> dict[str, Any]:
    """Every setting of a config under its dotted name, in the order of declaration."""
    return {name: value for name, value, *_ in _walk(config)}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One of a config, by what it is called on the command line.

    Attributes:
        option: such as ``--train.steps``.
        value: as it is spelled.
        kind: what may be given.
        meaning: one sentence, or nothing.
    """

    option: str
    value: str
    kind: str
    meaning: str


def settings(config: Any) -> list[Setting]:
    """Every setting of a config, in the order of declaration."""
    return [
        Setting(f"--{name.replace('_', '-')}", "None" if value is None else spell(value), _kind(hint, value), meaning)
        for name, value, hint, meaning in _walk(config)
    ]


def _meanings(kind: type) -> dict[str, str]:
    """What the section ``Attributes`` of a docstring says."""
    _, _, section = (inspect.getdoc(kind) or "").partition("\nAttributes:\n")
    entries = re.findall(r"^ +(\w+): (.*?)(?=^ +\w+: |^\S|\Z)", section, re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in entries}


def _kind(hint: Any, value: Any) -> str:
    if bounds := _bounds(hint):
        return bounds[0].metavar
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    if value is not None and value in _DTYPES.values():
        return "|".join(_DTYPES)
    if names := _names(hint):
        return "|".join(names)
    return (hint.__name__ if isinstance(hint, type) else str(hint)).upper()


def spell(value: Any) -> str:
    """The text a value is recorded as."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(spell, value))
    return str(getattr(value, "__name__", value))


def check(config: Any) -> None:
    """Checks the bounds of every setting, for configs written in Python."""
    for name, value, hint, _ in _walk(config):
        for spec in _bounds(hint):
            try:
                spec.instance_from_str(spec.str_from_instance(value))
            except ValueError as error:
                raise ConfigError(f"{name}={value}: {error}") from error


def _bounds(hint: Any) -> list[PrimitiveConstructorSpec]:
    return [spec for spec in getattr(hint, "__metadata__", ()) if isinstance(spec, PrimitiveConstructorSpec)]
