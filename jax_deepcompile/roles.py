"""What each argument of a step is: state, batch, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding

from jax_deepcompile import errors
from jax_deepcompile.arguments import examples, may_be_rows
from jax_deepcompile.binding import PureCall, PureStep
from jax_deepcompile.tracing import Signature


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

    def state_of(self, step: PureStep) -> tuple[int, ...]:
        """Positions of the pure step's arguments that are state.

        State is what is in NNX objects, which is the argument in front, or else the first argument with anything in it,
        and with it what holds the state of an optax optimizer. A random key is neither state nor batch where there are
        others to be that.
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

    def signature(self, name: str, step: PureStep, args: tuple) -> Signature:
        """Roles of the pure step's arguments.

        The batch is the first argument with examples that is neither state nor a random key, with those behind it that
        have as many, such as labels.
        """
        state = self.state_of(step)
        if self.batch is not None:
            places = _places(step)
            batch = [places[place] for place in self.batch if place in places]
        else:
            counts = {
                index: examples(args[index])
                for index, argument in enumerate(step.arguments)
                if argument.has_arrays and not (argument.has_objects or argument.is_key) and index not in state
            }
            leading = [index for index, count in counts.items() if count]
            alike = [index for index in leading if len(counts[index]) == 1 and counts[index] == counts[leading[0]]]
            batch = [index for index in leading if index == leading[0] or index in alike]
        return Signature(name, state, tuple(batch), tuple(argument.name for argument in step.arguments))

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
            known = index == first or index in signature.state or argument.is_key
            if not known and may_be_rows(call.args[index], call.args[first], rows):
                places = (call.step.arguments[first].place, argument.place)
                raise errors.AmbiguousRowsError(signature.function, argument.name, places, jax.process_count())


def _positions(parameter: str, argnums: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if argnums is None:
        return None
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if any(position < 0 for position in positions):
        raise errors.ArgnumsError(parameter, argnums)
    return positions


def _places(step: PureStep) -> dict:
    """Positions among the pure step's arguments by those among the parameters of the user's."""
    return {argument.place: index for index, argument in enumerate(step.arguments) if argument.has_arrays}
