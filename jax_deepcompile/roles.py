"""What each argument of a step is: state, batch, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jax_deepcompile import errors
from jax_deepcompile.arguments import examples, may_be_rows
from jax_deepcompile.binding import PureCall, PureStep
from jax_deepcompile.signature import Signature


@dataclass(frozen=True)
class Roles:
    """What the user said of it.

    Attributes:
      state: positions among the parameters of the user's step of those that are state; None if that is to be found out.
      batch: and of those that have examples.
    """

    state: tuple[int, ...] | None
    batch: tuple[int, ...] | None

    @classmethod
    def of(cls, state_argnums: int | Sequence[int] | None, batch_argnums: int | Sequence[int] | None) -> Roles:
        """Raises ArgnumsError if positions do not count from 0."""
        return cls(_positions("state_argnums", state_argnums), _positions("batch_argnums", batch_argnums))

    def signature(self, name: str, step: PureStep, args: tuple) -> Signature:
        """Roles of the pure step's arguments.

        The batch is the first argument with examples that is neither state nor parameters nor a random key, with those
        behind it that have as many, such as labels.
        """
        state = self._state_of(step)
        counts = {
            index: examples(args[index])
            for index, argument in enumerate(step.arguments)
            if argument.has_arrays and not (argument.has_objects or argument.is_key) and index not in state
        }
        leading = [index for index, count in counts.items() if count]
        parameters = [index for index in leading if _holds_parameters(index, step, args, state)]
        if self.batch is not None:
            places = _places(step)
            batch = [places[place] for place in self.batch if place in places]
        else:
            leading = [index for index in leading if index not in parameters] or leading
            alike = [index for index in leading if len(counts[index]) == 1 and counts[index] == counts[leading[0]]]
            batch = [index for index in leading if index == leading[0] or index in alike]
        parameters = [index for index in parameters if index not in batch and self.state is None]
        names = tuple(argument.name for argument in step.arguments)
        return Signature(name, state, tuple(parameters), tuple(batch), names)

    def refuse_ambiguous(self, call: PureCall, signature: Signature, rows: NamedSharding) -> None:
        """Raises AmbiguousRowsError if an argument may be this process's rows, or the same in all processes.

        Args:
          call: in a run of several processes.
          signature: of its arguments.
          rows: how the rows of the batch are divided.
        """
        if self.batch is not None or not signature.batch:
            return
        first = signature.batch[0]
        for index, argument in enumerate(call.step.arguments):
            known = index == first or index in (*signature.state, *signature.parameters) or argument.is_key
            if not known and may_be_rows(call.args[index], call.args[first], rows):
                places = (call.step.arguments[first].place, argument.place)
                raise errors.AmbiguousRowsError(signature.function, argument.name, places, jax.process_count())

    def _state_of(self, step: PureStep) -> tuple[int, ...]:
        """Positions of the pure step's arguments that are state.

        State is what is in NNX objects, which is the argument in front, or else the first argument with anything in it,
        and with it what holds the state of an optax optimizer. A random key is neither state nor batch where there are
        others to be that. What else may be state is in ``Signature.parameters``.
        """
        arguments, places = step.arguments, _places(step)
        if self.state is not None:
            state = [places[place] for place in self.state if place in places]
        else:
            state = [index for index in places.values() if arguments[index].has_optimizer]
        if step.structure is not None:
            return (0, *(index for index in state if not arguments[index].has_objects))
        if self.state is not None:
            return tuple(state)
        no_keys = [index for index in places.values() if not arguments[index].is_key]
        first = no_keys[:1] if len(no_keys) > 1 else list(places.values())[:1]
        return tuple(sorted({*first, *state}))


def _positions(parameter: str, argnums: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if argnums is None:
        return None
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if any(position < 0 for position in positions):
        raise errors.ArgnumsError(parameter, argnums)
    return positions


def _holds_parameters(index: int, step: PureStep, args: tuple, state: Sequence[int]) -> bool:
    """Whether an argument that is not known to be state holds a model's parameters or the like, rather than examples.

    Its leaves are those of the state; or they are floating, in dictionaries, and either not as long as one another or
    in front of an optimizer's state, as batch statistics are. Behind the batch dictionaries must be nested for that.
    """
    paths, tree = jax.tree.flatten_with_path(args[index])
    if tree.num_leaves > 1 and any(_kinds(args[index]) == _kinds(args[place]) for place in state):
        return True
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for _, leaf in paths if getattr(leaf, "shape", ())):
        return False
    depth = max(sum(isinstance(key, jax.tree_util.DictKey) for key in path) for path, _ in paths)
    if len(examples(args[index])) > 1:
        others = [place for place in range(index) if place not in state and len(examples(args[place])) == 1]
        return depth > (1 if others else 0)
    return depth > 1 and any(place > index and step.arguments[place].has_optimizer for place in state)


def _kinds(arg: Any) -> tuple:
    """Structure, and shape and type of every leaf."""
    leaves, tree = jax.tree.flatten(arg)
    return tree, [(np.shape(leaf), getattr(leaf, "dtype", None)) for leaf in leaves]


def _places(step: PureStep) -> dict:
    """Positions among the pure step's arguments by those among the parameters of the user's."""
    return {argument.place: index for index, argument in enumerate(step.arguments) if argument.has_arrays}
