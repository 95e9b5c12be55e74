"""What the train step needs of a model: parameters from a key, and the loss of a batch.

:func:`build_model` is open: a model of yours joins by registering a function of its config's type.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jax_deepcompile.training.config import ConfigError

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as functions.

    Attributes:
        init: key -> the parameters that are trained.
        loss: (parameters, batch, dropout key) -> (what to minimise, metrics), all scalars. The metrics have ``loss``,
            the mean cross-entropy per target in nats. The batch has ``inputs`` and ``targets``; of text both are
            ``i32[batch, length]``. Without a key nothing is dropped.
        frozen: key -> parameters that are not trained, which ``loss`` is given as a fourth argument; none where all are
            trained.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[..., tuple[jax.Array, Metrics]]
    frozen: Callable[[jax.Array], Any] | None = None


@functools.singledispatch
def build_model(config: Any, data: Any) -> Model:
    """The model that a config describes, for the data that another one does.

    Raises:
        ConfigError: the sizes in the config do not fit one another, or the data.
    """
    raise ConfigError(
        f"no model is registered for a {type(config).__name__}: decorate a function (config, data) -> Model "
        f"with @build_model.register, in the module of the config or one that it imports"
    )


def check_sizes(
    config: Any, divisions: Sequence[tuple[str, str]] = (), smallest: Mapping[str, int] | None = None
) -> None:
    """Checks that the integers of a model's config are positive and fit one another.

    Args:
        config: the model's config.
        divisions: pairs of field names, of which the second must divide the first.
        smallest: the least values of fields, 1 where it is not said.

    Raises:
        ConfigError: with the nearest size that fits.
    """
    for field in dataclasses.fields(config):
        value, least = getattr(config, field.name), (smallest or {}).get(field.name, 1)
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise ConfigError(f"model.{field.name}={value}: must be at least {least}; the nearest is {least}")
    for whole_name, part_name in divisions:
        whole, part = getattr(config, whole_name), getattr(config, part_name)
        if whole % part:
            nearest = min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: abs(n - part))
            raise ConfigError(
                f"model.{part_name}={part}: must divide model.{whole_name}={whole}; the nearest that does is {nearest}"
            )
