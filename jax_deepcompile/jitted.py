"""A planned step as XLA is given it: a jitted function, and where that has its arguments and results."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from jax_deepcompile._jax_compat import is_tracing
from jax_deepcompile.frontend.arguments import explicit_axes
from jax_deepcompile.frontend.call import leaf_type
from jax_deepcompile.frontend.containers import contained
from jax_deepcompile.frontend.meshes import MeshUse
from jax_deepcompile.frontend.trace import Traced
from jax_deepcompile.ir.program import Port, Program
from jax_deepcompile.lowering.compile import launched_singly
from jax_deepcompile.lowering.emit import emit, sharding_of, shardings_of
from jax_deepcompile.lowering.first_nan import is_looked_for, without_nans
from jax_deepcompile.planner.session import Planned


class OtherTypes(Exception):
    """What was compiled for arguments of some types was called with others, or of a mesh with other axes."""


@dataclass(frozen=True)
class Shardings:
    """Where a jitted step has its arguments and results.

    Attributes:
      inputs: for every leaf of ``(*args, kwargs)``; None where it may stay.
      in_shardings, out_shardings: for ``jax.jit`` of a function of ``(*args, kwargs)``.
    """

    inputs: tuple[NamedSharding | None, ...]
    in_shardings: tuple
    out_shardings: Any

    @classmethod
    def of(cls, program: Program, traced: Traced, use: MeshUse) -> Shardings:
        """Of ``program``, in the local view. State that may be divided over automatic axes too is XLA's to place."""
        automatic = len(use.mesh.axis_names) > len(use.axes.names)

        def sharding(port: Port) -> NamedSharding | None:
            return None if automatic and port.role.is_state else sharding_of(port, program, use.mesh)

        inputs = tuple(map(sharding, program.inputs))
        positional, keywords = traced.in_tree.children()
        wanted = [None if at in program.unread_state else one for at, one in enumerate(inputs)]
        divided = contained((*positional.children(), keywords), wanted)
        return cls(inputs, divided, shardings_of(program.out_tree, tuple(map(sharding, program.outputs))))


def jit(
    planned: Planned,
    traced: Traced,
    shardings: Shardings,
    types: Sequence[Hashable],
    use: MeshUse,
    singly: bool = False,
) -> Any:
    """``jax.jit`` of ``(*args, kwargs) -> out``; it raises OtherTypes for leaves of other ``types`` or axes.

    Where JAX has it computed once more to find the first value that is no number, that is done as it was written.

    Args:
      singly: every kernel is launched by itself, for profiles to tell them apart.
    """
    program, run = planned.program, emit(planned.program, use.mesh)
    options = planned.plan.compiler_options() | (launched_singly(use.platform) if singly else {})

    def step(*args):
        leaves = jax.tree.leaves(args)
        if is_looked_for() and not is_tracing():
            return jax.tree.unflatten(program.out_tree, without_nans(traced.program.jaxpr, leaves))
        axes = frozenset[str]().union(*map(explicit_axes, leaves))
        if tuple(map(leaf_type, leaves)) != types or not axes <= set(use.mesh.axis_names):
            raise OtherTypes
        return jax.tree.unflatten(program.out_tree, run(*leaves))

    step.__name__ = step.__qualname__ = program.name.rsplit(".", 1)[-1]
    return jax.jit(
        step,
        in_shardings=shardings.in_shardings,
        out_shardings=shardings.out_shardings,
        donate_argnums=traced.donated,
        keep_unused=bool(program.unread_state),
        compiler_options=options or None,
    )
