"""What each argument of a step is: state, batch, or neither."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jax_deepcompile import errors
from jax_deepcompile.frontend.arguments import may_be_rows
from jax_deepcompile.frontend.call import PureCall, PureStep
from jax_deepcompile.frontend.signature import Signature, examples, input_ports
from jax_deepcompile.frontend.state_matching import Returned, returned_anew
from jax_deepcompile.ir.program import AS_JITTED


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
        """Raises ArgnumsError where positions do not count from 0, StateAndBatchError where one is said to be both."""
        roles = cls(_positions("state_argnums", state_argnums), _positions("batch_argnums", batch_argnums))
        if both := sorted({*(roles.state or ())} & {*(roles.batch or ())}):
            raise errors.StateAndBatchError(both)
        return roles

    def signature(
        self,
        name: str,
        call: PureCall,
        returned: Callable[[Signature], Returned],
        flops: Callable[[PureCall], float],
    ) -> Signature:
        """Roles of a call's arguments.

        The batch is the first argument with examples that is neither state nor parameters nor random keys, and the
        others with as many, such as labels. Where some have more and some have fewer, it is what the step's ``flops``
        grow with most; or else what more arguments have as many examples as. What is passed under any name is batch if
        it has as many examples, or if no positional argument has any. What is returned anew is state where it cannot be
        told from a batch by its looks: in case of doubt what is ``returned`` is asked for.

        Raises:
          ArgnumsError: a position is named that the step has no argument for.
          LeafTypeError: a leaf is neither an array nor a number.
          MutableArrayError: a leaf is what the step would write into.
        """
        step, args = call.step, call.args
        last = max((argument.position for argument in step.arguments if argument.position is not None), default=-1)
        for parameter, positions in (("state_argnums", self.state), ("batch_argnums", self.batch)):
            if positions and max(positions) > last:
                raise errors.ArgnumsError(parameter, positions, last)
        unknown = Signature(name, names=tuple(each.name for each in step.arguments), objects=step.objects)
        input_ports(args, call.kwargs, unknown)  # refuses leaves that are neither arrays nor numbers
        known = _Known(
            step, args, functools.cache(lambda: returned(unknown)), lambda args: flops(replace(call, args=args))
        )
        signature = self._with_state(unknown, known)
        rest = known.with_examples(without=signature.divided)
        like = known.parameters(rest, signature, guess=self.state is None and self.batch is None)
        if self.batch is not None:
            batch = self._indices(self.batch, step)
        else:
            batch = known.batch([index for index in rest if index not in like])
        if self.state is None:
            parameters = {*signature.parameters, *like}.difference(batch)
            signature = replace(signature, parameters=tuple(sorted(parameters)))
        keywords = _keywords(call.kwargs, [args[index] for index in batch]) if self.batch is None else ()
        signature = replace(signature, batch=tuple(batch), keywords=keywords)
        return replace(signature, reasons=tuple(self._reasons(signature, call)))

    def _reasons(self, signature: Signature, call: PureCall) -> Iterator[tuple[str, str]]:
        """Why each argument is what it is, for people to read."""
        asked_state, asked_batch = self.state is not None, self.batch is not None
        for index, argument in enumerate(call.step.arguments):
            if argument.position is None:
                continue
            if argument.has_objects:
                reason = "NNX objects"
            elif index in signature.divided and asked_state:
                reason = "named in state_argnums"
            elif argument.has_optimizer and index in signature.divided:
                reason = "holds the state of an optax optimizer"
            elif index in signature.networks:
                reason = "the first argument that may be state"
            elif index in signature.parameters:
                reason = "like the parameters of a model"
            elif index in signature.batch:
                reason = "named in batch_argnums" if asked_batch else _examples_text(call.args[index])
            elif argument.is_key or argument.is_number:
                reason = "a random key" if argument.is_key else "a number"
            else:
                reason = "neither state nor as long as the batch"
            yield argument.name, reason
        yield from ((name, AS_JITTED) for name, _ in call.step.static)
        for name, arg in call.kwargs.items():
            yield name, _examples_text(arg) if name in signature.keywords else "not as long as the batch"

    def refuse_ambiguous(self, call: PureCall, signature: Signature, rows: NamedSharding) -> None:
        """Raises AmbiguousRowsError if an argument may be this process's rows, or the same in all processes."""
        if self.batch is not None or not signature.batch:
            return
        first = signature.batch[0]
        for index, argument in enumerate(call.step.arguments):
            known = index == first or index in signature.divided or argument.is_key
            if not known and may_be_rows(call.args[index], call.args[first], rows):
                positions = (call.step.arguments[first].position, argument.position)
                raise errors.AmbiguousRowsError(signature.function, argument.name, positions, jax.process_count())

    def _with_state(self, signature: Signature, known: _Known) -> Signature:
        """The arguments that are state by where they stand and what kind they are.

        State is what is in NNX objects, which is the argument in front, or else the first argument that may be, and
        with it what holds the state of an optax optimizer. Random keys and numbers are no state where others may be.
        """
        step = known.step
        arguments, indices = step.arguments, _indices(step)
        if self.state is not None:
            state = self._indices(self.state, step)
        else:
            state = [index for index in indices.values() if arguments[index].has_optimizer]
        signature = replace(signature, trains=bool(state) or step.structure is not None)
        if step.structure is not None:
            return replace(signature, state=(0, *(index for index in state if not arguments[index].has_objects)))
        if self.state is not None or not indices:
            return replace(signature, state=tuple(state))
        optimizers = tuple(index for index in state if arguments[index].is_optimizer)
        networks = {index for index in state if index not in optimizers}
        batch = self._indices(self.batch or (), step)
        first = known.first([index for index in indices.values() if index not in batch], optimizers, networks)
        signature = replace(signature, optimizers=optimizers, networks=tuple(sorted(networks)))
        if first is None or first in networks:
            return signature
        if any(index < first for index in optimizers):
            return replace(signature, parameters=(first,))
        return replace(signature, networks=tuple(sorted({*networks, first})))

    def _indices(self, positions: Sequence[int], step: PureStep) -> list[int]:
        indices = _indices(step)
        return [indices[position] for position in positions if position in indices]


@dataclass(frozen=True)
class _Known:
    """What the arguments of a step tell by themselves, what it returns, and what it computes of others."""

    step: PureStep
    args: tuple
    returned: Callable[[], Returned]
    flops: Callable[[tuple], float]

    def with_examples(self, without: Collection[int]) -> list[int]:
        """Positions of arguments with arrays that may be divided by examples."""
        return [
            index
            for index, argument in enumerate(self.step.arguments)
            if argument.has_arrays
            and not (argument.has_objects or argument.is_key or index in without)
            and examples(self.args[index])
        ]

    def first(self, indices: Sequence[int], optimizers: Sequence[int], networks: Collection[int]) -> int | None:
        """The first argument that may be state, apart from optimizers' alone.

        One that may as well be a batch or a number is state only if it is returned anew, or nothing else is.
        """
        keys = [index for index in indices if self.step.arguments[index].is_key]
        others = [index for index in indices if index not in optimizers and index not in keys]
        arrays = [index for index in others if not self.step.arguments[index].is_number]
        if arrays and (arrays[0] in networks or self._looks_like_parameters(arrays[0])):
            return arrays[0]
        scalars = [not any(map(np.shape, jax.tree.leaves(self.args[index]))) for index in arrays]
        doubtful = bool(optimizers or networks or keys) or any(scalars)
        if len(arrays) + len(keys) > 1 and doubtful:
            anew = returned_anew(self.args, self.returned(), optimizers, [*networks, *arrays])
            if anew:
                return min((index for index in arrays if index in anew), default=None)
            if networks:
                return min(networks)
        candidates = arrays if len(arrays) > 1 or not keys else []
        return next(iter(candidates or [index for index in indices if index not in optimizers]), None)

    def parameters(self, rest: Sequence[int], signature: Signature, guess: bool) -> set[int]:
        """Those of ``rest`` that hold a model's parameters or the like; a ``guess`` asks, in doubt, what comes back."""
        state = signature.divided
        like = {index for index in rest if self._is_like(index, state)}
        like |= {index for index in rest if self._looks_like_parameters(index) and len(examples(self.args[index])) > 1}
        like |= {index for index in rest if self._is_like_a_part(index, state)}
        doubtful = self._doubtful([index for index in rest if index not in like])
        if doubtful and guess:
            asked = [*state, *like, *doubtful]
            known = (*signature.state, *signature.optimizers)
            like |= returned_anew(self.args, self.returned(), known, asked).intersection(doubtful)
        if not set(rest) - like:
            return {index for index in like if self._is_like(index, state) or index in doubtful}
        return like

    def batch(self, rest: Sequence[int]) -> list[int]:
        """Those of ``rest`` that have as many examples as the batch, which is neither keys nor before an optimizer."""
        behind = [index for index in rest if not self._before_optimizer(index)] or rest
        behind = [index for index in behind if not _are_keys(self.args[index])] or behind
        grown = self._grown([index for index in behind if len(examples(self.args[index])) == 1])
        shared = _most_common([self.args[index] for index in grown or behind])
        alike = [index for index in rest if examples(self.args[index]) == shared]
        return alike if len(shared) == 1 else alike[:1]

    def _grown(self, indices: Sequence[int]) -> list[int]:
        """Those of ``indices`` with which the work grows most, were there twice as many; none where that is unclear."""
        groups: dict[int, list[int]] = {}
        for index in indices:
            groups.setdefault(min(examples(self.args[index])), []).append(index)
        try:
            flops = {count: self._flops_of_twice(group) for count, group in groups.items() if len(groups) > 1}
        except Exception:  # whatever a step raises that is not written for as many
            return []
        most, is_clear = max(flops.values(), default=0.0), len(set(flops.values())) > 1
        return [index for count, group in groups.items() if is_clear and flops[count] == most for index in group]

    def _flops_of_twice(self, indices: Sequence[int]) -> float:
        twice = [jax.tree.map(_twice, arg) if index in indices else arg for index, arg in enumerate(self.args)]
        return self.flops(tuple(twice))

    def _doubtful(self, rest: Sequence[int]) -> list[int]:
        """Those of ``rest`` that may be state by what they are and where they stand."""
        differ = len(set().union(*(examples(self.args[index]) for index in rest))) > 1
        return [
            index for index in rest if differ or (self._before_optimizer(index) and self._looks_like_parameters(index))
        ]

    def _looks_like_parameters(self, index: int) -> bool:
        """Whether all arrays are floating and in containers in containers, as those of a model's layers are."""
        paths = jax.tree.flatten_with_path(self.args[index])[0]
        floating = all(jnp.issubdtype(leaf.dtype, jnp.floating) for _, leaf in paths if getattr(leaf, "shape", ()))
        return floating and max((len(path) for path, _ in paths), default=0) > 1

    def _is_like(self, index: int, state: Sequence[int]) -> bool:
        """Whether an argument has the leaves of one that is state."""
        several = len(jax.tree.leaves(self.args[index])) >= _SEVERAL
        return several and any(_kinds(self.args[index]) == _kinds(self.args[other]) for other in state)

    def _is_like_a_part(self, index: int, state: Sequence[int]) -> bool:
        """Whether an argument has the leaves, all floating, of a part of one that is state, as its parameters are."""
        kinds = _kinds(self.args[index])
        dtypes = [dtype for _, dtype in kinds[1] if dtype is not None and jnp.issubdtype(dtype, jnp.floating)]
        if not _SEVERAL <= len(dtypes) == len(kinds[1]):
            return False

        def is_alike(node: Any) -> bool:
            return _kinds(node) == kinds

        return any(is_alike(node) for at in state for node in jax.tree.leaves(self.args[at], is_leaf=is_alike))

    def _before_optimizer(self, index: int) -> bool:
        return any(argument.has_optimizer for argument in self.step.arguments[index + 1 :])


_SEVERAL = 2
"""Leaves of which it is no chance that two arguments have the same."""


def _positions(parameter: str, argnums: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if argnums is None:
        return None
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if any(position < 0 for position in positions):
        raise errors.ArgnumsError(parameter, argnums)
    return positions


def _examples_text(arg: Any) -> str:
    return f"{' or '.join(map(str, sorted(examples(arg))))} examples"


def _most_common(args: Sequence[Any]) -> set[int]:
    """How many examples most of ``args`` have, or the first; vectors of numbers go behind what has more dimensions."""
    counts = [examples(arg) for arg in args]

    def rank(count: set[int]) -> tuple[int, bool]:
        alike = [arg for arg, other in zip(args, counts, strict=True) if other == count]
        return len(alike), not all(map(_is_vectors, alike))

    return max(counts, key=rank, default=set())


def _twice(leaf: Any) -> Any:
    """What stands for ``leaf`` with twice as many examples."""
    shape = getattr(leaf, "shape", ())
    return jax.ShapeDtypeStruct((2 * shape[0], *shape[1:]), leaf.dtype) if shape else leaf


def _are_keys(arg: Any) -> bool:
    """Whether all of ``arg`` are random keys, typed or in pairs of raw words, of which there may be several."""
    leaves = jax.tree.leaves(arg)
    return bool(leaves) and all(
        hasattr(leaf, "dtype")
        and (
            jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            or (leaf.dtype == jnp.uint32 and len(leaf.shape) == 2 and leaf.shape[1] == 2)
        )
        for leaf in leaves
    )


def _is_vectors(arg: Any) -> bool:
    """Whether all of ``arg`` are numbers and vectors, floating ones."""
    leaves = [leaf for leaf in jax.tree.leaves(arg) if getattr(leaf, "shape", ())]
    return all(len(leaf.shape) == 1 and jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)


def _keywords(kwargs: dict, batch: Sequence[Any]) -> tuple[str, ...]:
    """The names of what has as many examples as ``batch``, or without one, as most of ``kwargs``."""
    with_examples = {name: arg for name, arg in kwargs.items() if examples(arg)}
    shared = examples(batch[0]) if batch else _most_common(list(with_examples.values()))
    return tuple(name for name, arg in with_examples.items() if examples(arg) == shared and len(shared) == 1)


def _kinds(arg: Any) -> tuple:
    """Structure, and shape and type of every leaf."""
    leaves, tree = jax.tree.flatten(arg)
    return tree, [(np.shape(leaf), getattr(leaf, "dtype", None)) for leaf in leaves]


def _indices(step: PureStep) -> dict:
    """Positions among the pure step's arguments by those among the parameters of the user's."""
    return {argument.position: index for index, argument in enumerate(step.arguments) if argument.has_arrays}
