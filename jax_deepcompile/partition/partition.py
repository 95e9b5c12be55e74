"""Global view in, local view out: the whole of partitioning in one function."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.placement import AnyMesh, MeshAxes, Placement
from jax_deepcompile.ir.program import Port, Program, Role, View
from jax_deepcompile.ir.retrace import trace_blocks
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.partition.batch_major import with_batch_major
from jax_deepcompile.partition.dealt_out import dealt_out
from jax_deepcompile.partition.layout import Layout
from jax_deepcompile.partition.own_examples import OwnExamples, own_examples
from jax_deepcompile.partition.own_order import with_own_order
from jax_deepcompile.partition.propagate import Propagator
from jax_deepcompile.partition.reshard import Move, MoveKind, apply_move
from jax_deepcompile.partition.rewrite import run_layout
from jax_deepcompile.partition.rules.families import REGISTRY
from jax_deepcompile.partition.state import LeafChoice, choose_state_placements
from jax_deepcompile.summary import Summarized, Summary


@dataclass(frozen=True, repr=False)
class Partitioned(Summarized):
    """A program in the local view, and what was decided for every equation of the global one and every state leaf."""

    program: Program
    layout: Layout
    leaves: tuple[LeafChoice, ...]

    def _summary(self) -> Summary:
        split = sum(not leaf.placement.is_replicated for leaf in self.leaves)
        rows = (("mesh", self.program.mesh_text), *self.program.state_rows(), ("sharded", f"{split} leaves"))
        return Summary(f"Partitioned {self.program.name}", (*rows, ("equations", str(len(self.layout.steps)))))


def partition_step(
    program: Program, mesh: AnyMesh, state_axes, batch_axes, microbatches: int = 1, latency_bytes: float = 0.0
) -> Partitioned:
    """Shards a step's state over ``state_axes`` and its batch over ``batch_axes``.

    With several microbatches each device's part of the batch is split further, along a virtual axis: the program that
    comes out says what is done with one microbatch, and sums over that axis are sums over all of them. A device could
    send ``latency_bytes`` in the time that a collective takes to begin.
    """
    program = dealt_out(program, program.mesh.size_of(state_axes))
    parts = program.mesh.size_of(batch_axes) * microbatches
    if parts > 1:
        examples = [port.role is Role.BATCH for port in program.inputs]
        program = program.replace(jaxpr=with_own_order(with_batch_major(program.jaxpr, examples), parts))
    if microbatches > 1:
        name = "microbatch" if "microbatch" not in mesh.axis_names else "deepcompile_microbatch"
        program = program.replace(mesh=program.mesh.with_loop(name, microbatches))
    leaves = choose_state_placements(program, state_axes, program.inputs)
    inputs = tuple(
        port.placed(_batch_placement(port, batch_axes, program.mesh) if port.role is Role.BATCH else leaf.placement)
        for port, leaf in zip(program.inputs, leaves, strict=True)
    )
    state = {port.path: port.where for port in inputs if port.role.is_state}
    whole = program.mesh.replicated()
    outputs = tuple(port.placed(state.get(port.path, whole)) for port in program.outputs)
    state_leaves = tuple(leaf for port, leaf in zip(program.inputs, leaves, strict=True) if port.role.is_state)
    rows = program.mesh.place({0: (*batch_axes, *program.mesh.virtual)})
    own = own_examples(program.jaxpr, inputs, rows, program.mesh)
    return _partition(program.replace(inputs=inputs, outputs=outputs), mesh, state_leaves, latency_bytes, own)


def partition_init(program: Program, mesh: AnyMesh, state_axes) -> Partitioned:
    """Shards the state a function creates, so that each device computes its own part only."""
    leaves = choose_state_placements(program, state_axes, program.outputs)
    whole = program.mesh.replicated()
    inputs = tuple(port.placed(whole) for port in program.inputs)
    outputs = tuple(port.placed(leaf.placement) for port, leaf in zip(program.outputs, leaves, strict=True))
    return _partition(program.replace(inputs=inputs, outputs=outputs), mesh, tuple(leaves))


def _batch_placement(port: Port, axes: Sequence[str], mesh: MeshAxes) -> Placement:
    parts, loops = mesh.size_of(axes), mesh.size_of(mesh.virtual)
    if port.shape[0] % parts:
        counted = f"devices along the mesh axes {', '.join(axes)}"
        raise errors.BatchNotDivisibleError(port.path, port.shape, parts, counted)
    if port.shape[0] // parts % loops:
        raise errors.MicrobatchNotDivisibleError(port.path, port.shape, parts, loops)
    return mesh.place({0: (*axes, *mesh.virtual)})


def _partition(
    program: Program,
    mesh: AnyMesh,
    leaves: tuple[LeafChoice, ...],
    latency_bytes: float = 0.0,
    own: OwnExamples | None = None,
) -> Partitioned:
    verify(program)
    jaxpr = open_jaxpr(program.jaxpr)
    layout = Propagator(program.mesh, REGISTRY.find, latency_bytes, own)(
        jaxpr,
        [port.where for port in program.inputs],
        [port.role is Role.BATCH for port in program.inputs],
        [(port.where,) for port in program.outputs],
        late=[bool(port.shape) and port.where.is_replicated for port in program.outputs],
        outermost=True,
    )

    def body(consts, *blocks):
        parts = [_part_in_turn(block, port, program.mesh) for block, port in zip(blocks, program.inputs, strict=True)]
        results = run_layout(layout, parts, consts)
        return [_as_traced(result, var.aval) for result, var in zip(results, jaxpr.outvars, strict=True)]

    return Partitioned(program.replace(jaxpr=trace_blocks(body, program, mesh), view=View.LOCAL), layout, leaves)


def _as_traced(value: Any, aval: Any) -> Any:
    """``value``, its type as weak as the user's step has it: another one would be another step when it comes back."""
    weak_type = getattr(aval, "weak_type", False)
    if not isinstance(value, jax.Array) or getattr(value.aval, "weak_type", False) == weak_type:
        return value
    return lax.convert_element_type_p.bind(value, new_dtype=aval.dtype, weak_type=weak_type, sharding=None)


def _part_in_turn(block: jax.Array, port: Port, mesh: MeshAxes) -> jax.Array:
    """The part of a device's block of an input that it works on in one iteration of the loops."""
    for name in mesh.virtual:
        dim = port.where.axes[mesh.names.index(name)]
        block = apply_move(block, Move(MoveKind.SLICE, (name,), dim), mesh) if dim >= 0 else block
    return block
