"""What the leaves of a step's arguments are."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_deepcompile import errors
from jax_deepcompile.frontend.containers import children, kind_of
from jax_deepcompile.ir.program import Port, Role

_OPTIMIZER_NAMES = frozenset({"opt_state", "optimizer", "opt", "optimizer_state"})


@dataclass(frozen=True)
class Signature:
    """Which arguments of a step are what.

    Attributes:
      function: the step's name, for messages.
      state: positions of the arguments that the step must return anew.
      optimizers: positions of those that hold an optimizer's state; one of them at least is returned anew.
      networks: positions of those that it returns anew, or else only reads while it returns others.
      parameters: positions of those that look like parameters, returned or not.
      batch: positions of the batch arguments, whose leaves have examples unless they are scalars.
      keywords: names of those of the other arguments that are batch too.
      names: the name of every positional argument.
      objects: of every NNX object, where the first argument is their state.
      reasons: pairs (name, why it is what it is) of all arguments, for people to read.
      trains: whether what is state is beyond doubt: it was named, is in objects, or an optimizer's state is there.
    """

    function: str
    state: tuple[int, ...] = ()
    optimizers: tuple[int, ...] = ()
    networks: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    keywords: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()
    trains: bool = False

    @property
    def divided(self) -> tuple[int, ...]:
        """Positions of all arguments that are divided like state."""
        return tuple(sorted({*self.state, *self.optimizers, *self.networks, *self.parameters}))

    def role_of(self, argument: int | str) -> Role:
        """Of what is at a position, or is passed under a name."""
        if argument in self.divided:
            return Role.PARAM
        return Role.BATCH if argument in self.batch or argument in self.keywords else Role.OTHER

    def name_of(self, position: int) -> str:
        return self.names[position] if position < len(self.names) else f"args[{position}]"

    def path_of(self, argument: int | str, path: tuple) -> str:
        """Where the user finds what is at ``path`` in what is at a position, or is passed under a name."""
        if argument == 0 and self.objects:
            return in_objects(self.objects, path)
        name = argument if isinstance(argument, str) else self.name_of(argument)
        return f"{name}{jax.tree_util.keystr(path)}"


def in_objects(names: Sequence[str], path: tuple) -> str:
    """Where the user finds what is at ``path`` in the state of all NNX objects, which have ``names``."""
    if not path:
        return ", ".join(names)
    return f"{names[path[0].key]}{jax.tree_util.keystr(path[1:])}"


def input_ports(args: tuple, kwargs: dict, signature: Signature) -> tuple[tuple[Port, ...], Any]:
    """A port for every leaf, named as the user finds it, and the structure of ``(args, kwargs)``.

    Raises:
      LeafTypeError: a leaf is neither an array nor a number.
      MutableArrayError: a leaf is what the step would write into.
    """
    leaves, in_tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    counts = functools.cache(lambda name: examples(kwargs[name] if isinstance(name, str) else args[name]))
    ports = []
    for (path, leaf), is_optimizers in zip(leaves, optimizer_leaves((args, kwargs)), strict=True):
        argument = path[1].idx if path[0].idx == 0 else path[1].key
        where = argument if isinstance(argument, str) else signature.name_of(argument)
        rest, role = path[2:], signature.role_of(argument)
        role = state_role(rest, where, is_optimizers) if role is Role.PARAM else role
        name = signature.path_of(argument, rest)
        if not is_numeric(leaf):
            raise errors.LeafTypeError(name, leaf)
        if isinstance(leaf, jax.Ref):
            raise errors.MutableArrayError(f"argument leaf {name} is a mutable array (jax.new_ref)")
        port = port_of(name, role, leaf)
        if role is Role.BATCH and (not port.shape or port.shape[0] not in counts(argument)):
            port = replace(port, role=Role.OTHER)
        ports.append(port)
    return tuple(ports), in_tree


def examples(arg: Any) -> set[int]:
    """What the leaves of ``arg`` have along dimension 0, but for scalars and raw keys beside others."""
    leaves = [leaf for leaf in jax.tree.leaves(arg) if getattr(leaf, "shape", ())]
    others = {leaf.shape[0] for leaf in leaves if not is_raw_key(leaf)}
    return others or {leaf.shape[0] for leaf in leaves}


def is_raw_key(leaf: Any) -> bool:
    """Whether ``leaf`` looks like what ``jax.random.PRNGKey`` makes, two or four words."""
    return getattr(leaf, "dtype", None) == jnp.uint32 and leaf.shape in ((2,), (4,))


def port_of(path: str, role: Role, leaf: Any) -> Port:
    """What stands for ``leaf``, an array, number, tracer or shape."""
    shape = tuple(leaf.shape) if hasattr(leaf, "shape") else tuple(np.shape(leaf))
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    return Port(path, role, shape, str(dtype if extended else jax.dtypes.canonicalize_dtype(dtype)))


def is_numeric(leaf: Any) -> bool:
    """Whether ``leaf`` is a number or what JAX takes for an array of numbers or keys, a tracer or the shape of one."""
    if not hasattr(leaf, "dtype") or isinstance(leaf, type):
        return isinstance(leaf, bool | int | float | complex)
    if isinstance(leaf, np.ndarray):
        is_taken = leaf.dtype.isnative and not isinstance(leaf, np.ma.MaskedArray)
    else:
        is_taken = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | jax.Ref | np.generic)
    is_taken = is_taken or hasattr(leaf, "__jax_array__")
    return is_taken and any(jnp.issubdtype(leaf.dtype, kind) for kind in (np.number, np.bool_, jax.dtypes.extended))


def state_role(path: Sequence, argument: str = "", is_optimizers: bool = False) -> Role:
    """Whether a leaf of the state, at ``path`` in ``argument``, is the optimizer's, by its names if not known to be."""
    keys = [argument, *(str(getattr(key, "name", getattr(key, "key", ""))) for key in path)]
    names = {name for key in keys for name in re.split(r"[/.]", key)}
    return Role.OPTIMIZER if is_optimizers or names & _OPTIMIZER_NAMES else Role.PARAM


def optimizer_leaves(tree: Any) -> list[bool]:
    """Of every leaf whether it is in the state of an optax optimizer."""
    nodes = jax.tree.leaves(tree, is_leaf=is_optimizer_state)
    return [inside for node in nodes for inside in [is_optimizer_state(node)] * len(jax.tree.leaves(node))]


def is_optimizer_state(node: Any) -> bool:
    """Optax keeps its state in named tuples of its own; and parameters, if there are two sets of them."""
    kind = type(node)
    is_optax = isinstance(node, tuple) and hasattr(kind, "_fields") and kind.__module__.split(".")[0] == "optax"
    return is_optax and kind is not optax.LookaheadParams


def structure_changes(before: Any, after: Any, path_of: Callable[[tuple], str]) -> list[str]:
    """What tells the structures of two trees apart, in words; ``path_of`` says where the user finds it.

    These are the leaves that they do not share, or else the innermost nodes that differ.
    """
    flat = (jax.tree_util.tree_leaves_with_path(tree) for tree in (before, after))
    old, new = ({path_of(path) for path, _ in leaves} for leaves in flat)
    leaves = [f"{path} is missing" for path in sorted(old - new)] + [f"{path} is new" for path in sorted(new - old)]
    return leaves or list(_node_changes(before, after, path_of))


def _node_changes(before: Any, after: Any, path_of: Callable[[tuple], str], path: tuple = ()) -> Iterator[str]:
    if jax.tree.structure(before) == jax.tree.structure(after):
        return
    pairs = zip(children(before), children(after), strict=False)
    inside = [_node_changes(was, child, path_of, (*path, *key)) for (key, was), (_, child) in pairs]
    if found := [*itertools.chain.from_iterable(inside)]:
        yield from found
    elif kind_of(before) is not kind_of(after):
        yield f"{path_of(path)} was a {kind_of(before).__name__} and is a {kind_of(after).__name__}"
    else:
        yield f"the static fields of {path_of(path)} ({kind_of(before).__name__}) differ"
