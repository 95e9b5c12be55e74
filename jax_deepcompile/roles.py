"""What each argument of a step is: state, batch, or neither."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jax_deepcompile import errors
from jax_deepcompile.arguments import examples, may_be_rows
from jax_deepcompile.binding import PureCall, PureStep
from jax_deepcompile.returned import returned_anew
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

    def signature(self, name: str, step: PureStep, args: tuple, outputs: Callable[[Signature], Any]) -> Signature:
        """Roles of the pure step's arguments.

        The batch is the first argument with examples that is neither state nor parameters nor a random key, with those
        behind it that have as many, such as labels. Where arguments differ in how many they have, what looks like more
        than an array of the batch, or stands in front of an optimizer's state, is no batch if the step returns it anew.

        Args:
          name: of the user's step.
          step: the pure step.
          args: its positional arguments.
          outputs: what the step returns, by the signature it is traced with; asked in case of doubt.
        """
        signature = self._state_of(name, step)
        counts = {
            index: examples(args[index])
            for index, argument in enumerate(step.arguments)
            if argument.has_arrays and not argument.has_objects and not argument.is_key and index not in signature.held
        }
        leading = [index for index, count in counts.items() if count]
        like = {index for index in leading if _holds_parameters(index, step, args, signature.held)}
        doubtful = _doubtful([index for index in leading if index not in like], counts, step, args)
        if doubtful and self.state is None and self.batch is None:
            asked = _with_parameters(signature, {*like, *doubtful})
            like |= set(doubtful).intersection(returned_anew(args, outputs(signature), asked))
        if self.batch is not None:
            places = _places(step)
            batch = [places[place] for place in self.batch if place in places]
        else:
            leading = [index for index in leading if index not in like] or leading
            alike = [index for index in leading if len(counts[index]) == 1 and counts[index] == counts[leading[0]]]
            batch = [index for index in leading if index == leading[0] or index in alike]
        if self.state is None:
            signature = _with_parameters(signature, like.difference(batch))
        return replace(signature, batch=tuple(batch))

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
            known = index == first or index in signature.held or argument.is_key
            if not known and may_be_rows(call.args[index], call.args[first], rows):
                places = (call.step.arguments[first].place, argument.place)
                raise errors.AmbiguousRowsError(signature.function, argument.name, places, jax.process_count())

    def _state_of(self, name: str, step: PureStep) -> Signature:
        """The arguments that are known to be state by where they stand and what kind they are.

        State is what is in NNX objects, which is the argument in front, or else the first argument with anything in it,
        and with it what holds the state of an optax optimizer. Random keys and numbers are neither state nor batch
        where there are others to be that.
        """
        arguments, places = step.arguments, _places(step)
        signature = Signature(name, names=tuple(argument.name for argument in arguments))
        if self.state is not None:
            state = [places[place] for place in self.state if place in places]
        else:
            state = [index for index in places.values() if arguments[index].has_optimizer]
        if step.structure is not None:
            return replace(signature, state=(0, *(index for index in state if not arguments[index].has_objects)))
        if self.state is not None or not places:
            return replace(signature, state=tuple(state))
        optimizers = tuple(index for index in state if arguments[index].is_optimizer)
        networks = [index for index in state if index not in optimizers]
        others = [index for index in places.values() if not arguments[index].is_key]
        eligible = [index for index in others if not arguments[index].is_number] if len(others) > 1 else []
        first = next((index for index in eligible or places.values() if index not in optimizers), None)
        if first is None:
            return replace(signature, state=optimizers)
        if any(index < first for index in optimizers):
            return replace(signature, state=optimizers, networks=tuple(networks), parameters=(first,))
        return replace(signature, state=optimizers, networks=tuple(sorted({first, *networks})))


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
    return depth > 1 and _before_optimizer(index, step)


def _doubtful(rest: Sequence[int], counts: dict[int, set[int]], step: PureStep, args: tuple) -> list[int]:
    """Those of ``rest`` that may be state by what they are, where not all have as many examples."""
    if len(set().union(*(counts[index] for index in rest))) < 2:
        return []
    return [index for index in rest if len(jax.tree.leaves(args[index])) > 1 or _before_optimizer(index, step)]


def _before_optimizer(index: int, step: PureStep) -> bool:
    return any(argument.has_optimizer for argument in step.arguments[index + 1 :])


def _with_parameters(signature: Signature, more: Collection[int]) -> Signature:
    return replace(signature, parameters=tuple(sorted({*signature.parameters, *more})))


def _kinds(arg: Any) -> tuple:
    """Structure, and shape and type of every leaf."""
    leaves, tree = jax.tree.flatten(arg)
    return tree, [(np.shape(leaf), getattr(leaf, "dtype", None)) for leaf in leaves]


def _places(step: PureStep) -> dict:
    """Positions among the pure step's arguments by those among the parameters of the user's."""
    return {argument.place: index for index, argument in enumerate(step.arguments) if argument.has_arrays}
