"""``scan``: layer loops, recurrent cells, loops over microbatches and loops over examples.

Stacked inputs and outputs are split on a dimension that is not the loop's, so that a layer's parameters are gathered in
the body when its turn comes. Three kinds of loop deserve better than that, and are told apart by what they do:

* *recurrent*: the parameters are the same in every iteration and are all needed whole, once each. They are held
  gathered in every iteration anyway, so they are gathered once before the loop, and their gradients summed once after.
  Loops over chunks of activations are the same: few parameters read them, and the rest of the step has the batch whole.
* *over microbatches*: the batch was cut into pieces by the loop's dimension, and the pieces can be split among the
  devices along the dimension behind it.
* *over examples* (``lax.map``): they cannot. If nothing but sums passes from one iteration to the next, each device
  runs the iterations of its own examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import lax

from jax_deepcompile._jax_compat import closed_consts
from jax_deepcompile.ir.placement import PARTIAL, REPLICATE, AxisPlacement, MeshAxes, Placement
from jax_deepcompile.ir.primitives import ADDITIONS, Scan
from jax_deepcompile.ir.rewrite import abstract, without_barriers
from jax_deepcompile.ir.traversal import reached_from, variables
from jax_deepcompile.partition.layout import (
    Decision,
    Layout,
    Nested,
    Propagate,
    RegionRule,
    Request,
    Run,
    Split,
    Step,
    sums_over_features,
)
from jax_deepcompile.partition.rules.control_flow import (
    gathered_before,
    held_in_body,
    is_recurrent,
    settle_batch,
    settle_carry,
    settled_batch,
    sums_later,
)
from jax_deepcompile.partition.rules.registry import REGISTRY


@dataclass(frozen=True)
class ScanRule(RegionRule):
    """Decides and computes ``scan``.

    Attributes:
      shared_by: how many devices share the iterations among them; 1 but for a loop over examples.
    """

    shared_by: int = 1

    def trip_count(self, eqn) -> int:
        return Scan(eqn).length // self.shared_by

    def batch(self, eqn, operands):
        carry, ys = settled_batch(Scan(eqn).body, *Scan(eqn).split(operands))
        return [*carry, *ys]

    def hints(self, eqn, results, through):
        scan = Scan(eqn)
        carry, ys = scan.split_results(results)
        consts, carry, xs = scan.split(through(scan.body, [*carry, *map(_body_demands, ys)]))
        return [*consts, *carry, *([placement.shifted(1) for placement in wanted] for wanted in xs)]

    def decide(self, eqn, request: Request, propagate: Propagate) -> Decision:
        request = replace(request, operands=_behind_the_loop(eqn, request))
        axes = _splittable_axes(eqn, request)
        decision, layout = self._decide_whole(eqn, request, propagate)
        if not axes:
            return decision
        inside = layout.moves_activations or _sums_over_features(layout)
        as_batch = not inside and _still_split(eqn, request, decision, axes)
        return decision if as_batch else _decide_shared(eqn, request, propagate, axes)

    def _decide_whole(self, eqn, request: Request, propagate: Propagate) -> tuple[Decision, Layout]:
        """Every device runs every iteration."""
        scan = Scan(eqn)
        stacks = zip(scan.split(request.operands).xs, scan.operands.xs, scan.split(request.batch).xs, strict=True)
        xs = [
            _off_the_loop(placement.without_partial(), var.aval.shape, depends, request.mesh)
            for placement, var, depends in stacks
        ]
        consts, carry, ys, layout = _settle(eqn, request, propagate, xs)
        decision = Decision(Nested(self, (layout,)), (*consts, *carry, *xs), (*carry, *ys), batch=layout.batch_outputs)
        return decision, layout

    def emit(self, step: Step, operands, run: Run, mesh: MeshAxes):
        (layout,) = step.layouts
        scan = Scan(step.eqn)
        consts, carry, xs = scan.split(operands)

        def body(carry, xs):
            carry, ys = scan.split_results(run(layout, [*consts, *carry, *xs], closed_consts(scan.closed)))
            return carry, ys

        carry, ys = lax.scan(body, carry, list(xs), length=self.trip_count(step.eqn), **scan.options)
        return [*carry, *ys]


def _settle(eqn, request: Request, propagate: Propagate, xs: list[Placement]):
    """Decides the body for stacked inputs placed as ``xs``: ``(consts, carry, ys, layout)``."""
    scan = Scan(eqn)
    carry = list(zip(scan.operands.carry, scan.split(request.operands).carry, strict=True))
    batch = scan.split(request.batch)
    known, _ = settled_batch(scan.body, *batch)
    return settle_batch(carry, batch.carry, known, lambda flags: _settle_given(eqn, request, propagate, xs, flags))


def _settle_given(eqn, request: Request, propagate: Propagate, xs: list[Placement], carry_batch: Sequence[bool]):
    """Likewise, where it is known which carried values depend on the batch."""
    scan = Scan(eqn)
    consts, carry, _ = scan.split(request.operands)
    consts = [placement.without_partial() for placement in consts]
    jaxpr, num_carry = scan.body, len(carry)
    final_demands, ys_demands = scan.split_results(request.demands)
    ys_demands = [sums_later(_body_demands(wanted), request.mesh) for wanted in ys_demands]
    const_batch, _, xs_batch = scan.split(request.batch)
    batch = [*const_batch, *carry_batch, *xs_batch]
    inner_xs = [placement.shifted(-1) for placement in xs]

    def settle(consts, carry, keep_partial):
        return settle_carry(jaxpr, consts, carry, inner_xs, batch, ys_demands, final_demands, propagate, keep_partial)

    settled, layout = settle(consts, carry, [not any(demand.is_split for demand in wanted) for wanted in final_demands])
    if (
        is_recurrent(layout, len(consts))
        or _carries_examples(eqn, settled, inner_xs, carry_batch, xs_batch)
        or _reads_activations(scan, batch)
    ):
        whole = request.mesh.replicated()
        consts = gathered_before(consts, layout, const_batch, request.mesh)
        start = [whole if sums else placement for placement, sums in zip(carry, _sums(eqn), strict=True)]
        settled, layout = settle(consts, start, [True] * num_carry)
    consts = [_sliced_outside(placement, wanted) for placement, wanted in zip(consts, layout.wanted, strict=False)]
    layout = propagate(
        jaxpr,
        [*consts, *settled, *inner_xs],
        batch,
        [*[(placement,) for placement in settled], *ys_demands],
        held_in_body(len(consts) + num_carry, len(inner_xs)),
    )
    ys = [placement.shifted(1) for placement in layout.output_placements[num_carry:]]
    return consts, settled, ys, layout


def _behind_the_loop(eqn, request: Request) -> tuple[Placement, ...]:
    """Placements of the operands, where pieces of the batch that no device holds a part of are split behind the loop.

    Cutting a batch into fewer pieces than there are devices leaves every piece whole; cutting the pieces costs nothing.
    """
    scan = Scan(eqn)
    consts, carry, xs = scan.split(request.operands)
    for axis, size in enumerate(request.mesh.sizes):
        held = zip(request.operands, request.batch, strict=True)
        if any(placement.axes[axis] != REPLICATE for placement, depends in held if depends):
            continue
        for index, (var, depends) in enumerate(zip(scan.operands.xs, scan.split(request.batch).xs, strict=True)):
            asked = xs[index].replace(axis, 1)
            if depends and size > 1 and asked.fits(var.aval.shape, request.mesh):
                xs[index] = asked
    return (*consts, *carry, *xs)


def _off_the_loop(placement: Placement, shape: Sequence[int], batch: bool, mesh: MeshAxes) -> Placement:
    """``placement`` without the loop's dimension; a batch is split along the next one instead, if it divides."""
    behind = _moved_to(1, placement)
    return behind if batch and behind.fits(shape, mesh) else _moved_to(REPLICATE, placement)


def _moved_to(dim: AxisPlacement, placement: Placement) -> Placement:
    """``placement`` with what splits the loop's dimension splitting ``dim`` in its place, or nothing."""
    return Placement(tuple(dim if axis == 0 else axis for axis in placement.axes))


def _body_demands(wanted) -> tuple[Placement, ...]:
    """What the body should yield for a stacked output: demands on its own dimensions, not on the loop's."""
    inner = [_moved_to(REPLICATE, placement).shifted(-1) for placement in wanted if not placement.is_partial]
    return tuple(dict.fromkeys(placement for placement in inner if placement.is_split))


def _carries_examples(
    eqn,
    carry: Sequence[Placement],
    xs: Sequence[Placement],
    carry_batch: Sequence[bool],
    xs_batch: Sequence[bool],
) -> bool:
    """Whether examples go from one iteration to the next, and do not only come with it, as microbatches do.

    A cell may read its parameters several times, where ``jax.checkpoint`` computes it again.
    """
    scan = Scan(eqn)
    came = _split_sizes(scan.inputs.xs, xs, xs_batch)
    stays = [depends and not sums for depends, sums in zip(carry_batch, _sums(eqn), strict=True)]
    return not came.isdisjoint(_split_sizes(scan.inputs.carry, carry, stays))


def _reads_activations(scan: Scan, batch: Sequence[bool]) -> bool:
    """Whether the pieces are of what layers have computed, as chunks of a sequence are for its loss, not of a batch.

    Such pieces are multiplied by what all of them share, and their cotangents leave the loop.
    """
    eqns = without_barriers(scan.body).eqns
    depends = dict(zip(scan.body.invars, batch, strict=True))
    left = {(size.shape, size.dtype) for size in map(abstract, scan.outputs.ys)}
    shared = reached_from(eqns, [var for var in scan.inputs.consts if not depends[var]])
    for piece in scan.inputs.xs:
        if depends[piece] and (piece.aval.shape, piece.aval.dtype) in left:
            made = reached_from(eqns, [piece])
            if any(_multiplies(eqn, piece.aval.shape, made, shared - made) for eqn in eqns):
                return True
    return False


def _multiplies(eqn, shape: Sequence[int], made: set, shared: set) -> bool:
    """Whether ``eqn`` contracts vectors of something of this shape that is ``made`` with something ``shared``."""
    if eqn.primitive.name != "dot_general":
        return False
    contracted, _ = eqn.params["dimension_numbers"]
    return any(
        atom in made and other in shared and atom.aval.shape == shape and any(shape[dim] > 1 for dim in dims)
        for atom, other, dims in zip(eqn.invars, reversed(eqn.invars), contracted, strict=True)
    )


def _split_sizes(values: Sequence[Any], placements: Sequence[Placement], counted: Sequence[bool]) -> set[int]:
    """Of the dimensions that those ``counted`` are split along."""
    return {
        var.aval.shape[dim]
        for var, placement, is_counted in zip(values, placements, counted, strict=True)
        for dim in placement.axes
        if is_counted and dim >= 0
    }


def _sliced_outside(placement: Placement, wanted) -> Placement:
    """A whole constant of which the body only ever uses one slice is sliced once, before the loop."""
    if placement.is_replicated and len(wanted) == 1 and not wanted[0].is_partial:
        return wanted[0]
    return placement


def _splittable_axes(eqn, request: Request) -> tuple[int, ...]:
    """Axes over which examples are split along the loop, if only sums pass from one iteration to the next."""
    xs, batch = Scan(eqn).split(request.operands).xs, Scan(eqn).split(request.batch).xs
    stacks = [placement.axes for placement, depends in zip(xs, batch, strict=True) if depends]
    axes = tuple(axis for axis in range(len(request.mesh.names)) if any(states[axis] == 0 for states in stacks))
    return axes if axes and all(_sums(eqn)) else ()


def _sums(eqn) -> list[bool]:
    """For every carried value whether it is only ever added to, or passed on, and never seen by anything else."""
    scan = Scan(eqn)
    readers: dict[Any, list] = {}
    for inner in scan.body.eqns:
        for atom in variables(inner.invars):
            readers.setdefault(atom, []).append(inner)
    return [
        _only_added_to(before, after, readers, scan.body.outvars)
        for before, after in zip(scan.inputs.carry, scan.outputs.carry, strict=True)
    ]


def _only_added_to(value: Any, final: Any, readers: dict[Any, list], outvars: list) -> bool:
    """Follows ``value`` through a chain of additions, each its only reader, to ``final``, which nothing else reads."""
    while value is not final:
        if len(readers.get(value, ())) != 1 or any(atom is value for atom in outvars):
            return False
        (reader,) = readers[value]
        if reader.primitive.name not in ADDITIONS or reader.outvars[0].aval.shape != value.aval.shape:
            return False
        (value,) = reader.outvars
    return value not in readers and sum(atom is value for atom in outvars) == 1


def _still_split(eqn, request: Request, decision: Decision, axes: tuple[int, ...]) -> bool:
    """Whether splitting behind the loop kept every batch input split over ``axes``."""
    pairs = zip(Scan(eqn).split(request.operands).xs, Scan(eqn).split(decision.operands).xs, strict=True)
    return all(after.axes[axis] >= 0 for before, after in pairs for axis in axes if before.axes[axis] == 0)


def _sums_over_features(layout: Layout) -> bool:
    """Whether a parameter is contracted with a split dimension of an activation: then that dimension is no batch's."""
    splits = ((step, step.how) for step, _ in layout.walk() if isinstance(step.how, Split))
    return any(sums_over_features(how, [fetch.batch for fetch in step.fetches]) for step, how in splits)


def _decide_shared(eqn, request: Request, propagate: Propagate, axes: tuple[int, ...]) -> Decision:
    """Each device runs the iterations of its own examples: over ``axes`` the body is one device's business."""
    rest = [axis for axis in range(len(request.mesh.names)) if axis not in axes]
    mesh = request.mesh.keep(rest)

    def inside(placement: Placement) -> Placement:
        return Placement(tuple(placement.axes[axis] for axis in rest))

    def outside(placement: Placement, state: int) -> Placement:
        states = dict(zip(rest, placement.axes, strict=True))
        return Placement(tuple(states.get(axis, state) for axis in range(len(request.mesh.names))))

    inner = Request(
        tuple(inside(placement) for placement in request.operands),
        request.batch,
        tuple(tuple(inside(placement) for placement in wanted) for wanted in request.demands),
        mesh,
    )
    xs = [_moved_to(REPLICATE, placement.without_partial()) for placement in Scan(eqn).split(inner.operands).xs]
    consts, carry, ys, layout = _settle(eqn, inner, propagate.within(mesh), xs)
    shared_by = request.mesh.size_of(request.mesh.names[axis] for axis in axes)
    return Decision(
        Nested(ScanRule(shared_by), (layout,)),
        (
            *(outside(placement, REPLICATE) for placement in consts),
            *(outside(placement, PARTIAL) for placement in carry),
            *(outside(placement, 0) for placement in xs),
        ),
        (*(outside(placement, PARTIAL) for placement in carry), *(outside(placement, 0) for placement in ys)),
        batch=layout.batch_outputs,
    )


REGISTRY.register_region("scan", ScanRule())
