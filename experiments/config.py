"""What an experiment is made of: the keys of ``deepcompile train NAME key=value``, with units in their names.

An experiment is a module of this package that assigns ``CONFIG``, an :class:`Experiment`; its name is the module's.
"""

import ast
import dataclasses
import importlib
from pathlib import Path
from typing import Annotated, Any

from experiments.settings import check, override
from experiments.values import ConfigError, Range, nearest_name

Fraction = Range(0, 1)
AtLeastOne = Range(1)
NotNegative = Range(0)


@dataclasses.dataclass(frozen=True)
class Data:
    """Bytes of text, packed into sequences. ``files`` are paths, directories or globs; none is Python's own library."""

    files: tuple[str, ...] = ()
    sequence_length: Annotated[int, Range(2)] = 128
    batch_size: Annotated[int, AtLeastOne] = 16
    held_out_fraction: Annotated[float, Range(0.001, 0.5)] = 0.02
    shuffle_seed: Annotated[int, Range(0, 2**32 - 1)] = 0


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW under a linear warm-up and a cosine decay, after clipping by global norm.

    The warm-up takes ``warmup_fraction`` of ``decay_steps``, and the rate ends at ``final_fraction`` of its peak. Where
    ``decay_steps`` is none it is ``train.steps``, so a run resumed for more steps has another schedule from there on.
    """

    learning_rate: Annotated[float, NotNegative] = 3e-3
    warmup_fraction: Annotated[float, Fraction] = 0.1
    decay_steps: Annotated[int, AtLeastOne] | None = None
    final_fraction: Annotated[float, Fraction] = 0.1
    weight_decay: Annotated[float, NotNegative] = 0.1
    beta1: Annotated[float, Fraction] = 0.9
    beta2: Annotated[float, Fraction] = 0.95
    clip_norm: Annotated[float, NotNegative] = 1.0


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The batch is split over all devices; the state over ``fsdp`` of them, and copied ``replicas`` times.

    ``fsdp`` none takes every device that ``replicas`` leaves.
    """

    fsdp: Annotated[int, AtLeastOne] | None = None
    replicas: Annotated[int, AtLeastOne] = 1


@dataclasses.dataclass(frozen=True)
class Train:
    """How long to run, and what to leave behind on the way."""

    steps: Annotated[int, AtLeastOne] = 200
    seed: Annotated[int, NotNegative] = 0
    log_every_steps: Annotated[int, AtLeastOne] = 10
    checkpoint_every_steps: Annotated[int, AtLeastOne] = 100
    keep_checkpoints: Annotated[int, AtLeastOne] = 2
    held_out_batches: Annotated[int, AtLeastOne] = 8
    explain: bool = True


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One training run. ``model`` is a model's own config, registered with ``language_model``."""

    model: Any
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    mesh: Mesh = Mesh()
    train: Train = Train()


def names() -> dict[str, str]:
    """Every experiment by name, with the first line of its docstring. Read from the source: nothing is imported."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        if any(_assigns_config(statement) for statement in module.body):
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def load(name: str, assignments: list[str] | None = None) -> Experiment:
    """The checked config of the experiment called ``name``, with ``key=value`` overrides applied.

    Raises:
        ConfigError: no experiment has that name, or a key or value is wrong.
    """
    known = names()
    if name not in known:
        nearest = nearest_name(name, known)
        hint = f"; the nearest is {nearest!r}" if nearest else ""
        raise ConfigError(f"there is no experiment {name!r}{hint}; there are {', '.join(known)}")
    experiment = importlib.import_module(f"experiments.{name}").CONFIG
    check(experiment)
    return override(experiment, assignments or [])


def _assigns_config(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    else:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "CONFIG" for target in targets)
