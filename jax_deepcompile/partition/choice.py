"""Choosing how one equation is split: every legal way is priced, the cheapest is taken.

Axes are chosen one after the other, major first. The price of a way is compared lexicographically:

1. bytes moved, the results' way to what their consumers demand included. Those of activations count several times, and
   with what could be sent while they begin: compute waits for them, while parameters are gathered ahead. Activations
   stay where the batch put them and parameters come to them, unless those are much larger, as the last kernels of a
   ResNet are on small images, and no device need compute what others do;
2. bytes of activations moved; these first for lookups in tables, in loops, and on meshes of several axes;
3. the number of collectives;
4. bytes computed on each device, so that work is shared where sharing is free.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.ir.placement import PARTIAL, REPLICATE, AxisPlacement, MeshAxes, Placement
from jax_deepcompile.partition.layout import Decision, Split
from jax_deepcompile.partition.reshard import Size, axis_cost, size_of
from jax_deepcompile.partition.rules.base import Dims, Kind, OpRule


@dataclass(frozen=True)
class Operand:
    """What is known of an operand when its equation is decided.

    Attributes:
      held: the placements it can be had in without communication.
      expected: placements other equations will bring it to; free for partial sums, which must be summed once anyway.
      batch: whether it depends on the batch.
      size: its whole size.
      of_total: whether it depends on a total over a virtual axis, known when that loop has ended.
    """

    held: tuple[Placement, ...]
    expected: tuple[Placement, ...]
    batch: bool
    size: Size
    of_total: bool = False


@dataclass(frozen=True)
class _Way:
    """One way to use one axis: the factor split (or None), and what it makes of every operand and result."""

    factor: int | None
    operands: tuple[AxisPlacement, ...]
    results: tuple[AxisPlacement, ...]
    combined: bool = False

    @property
    def is_partial(self) -> bool:
        return self.factor is None and PARTIAL in self.results


@dataclass(frozen=True)
class _Question:
    """All that the choice for one equation depends on; layers that repeat ask it once.

    Attributes:
      demands: for each result the placements its consumers ask for.
      lazy: leave partial sums unsummed where it costs nothing, as who needs them is not known yet.
      may_move: whether activations may move to save bytes of parameters.
      latency_bytes: what a device could send in the time that a collective takes to begin.
      light: whether no heavy work goes on with the result, so that every device may do it all.
    """

    rule: OpRule
    operands: tuple[Operand, ...]
    demands: tuple[tuple[Placement, ...], ...]
    result_sizes: tuple[Size, ...]
    mesh: MeshAxes
    lazy: bool
    may_move: bool
    latency_bytes: float
    light: bool


def choose_split(
    eqn: Equation,
    rule: OpRule,
    operands: Sequence[Operand],
    demands: Sequence[Sequence[Placement]],
    mesh: MeshAxes,
    lazy: bool = False,
    may_move: bool = False,
    latency_bytes: float = 0.0,
    light: bool = False,
) -> Decision:
    """The cheapest legal split of ``eqn``, axis by axis."""
    sizes = tuple(size_of(var.aval) for var in eqn.outvars)
    asked = tuple(map(tuple, demands))
    question = _Question(rule, tuple(operands), asked, sizes, mesh, lazy, may_move, latency_bytes, light)
    splits, operand_placements, computed, kept = _answer(question)
    updates_own = any(splits[factor] for factor in rule.updated)
    return Decision(Split(rule, splits), operand_placements, computed, kept, (False,) if updates_own else ())


@functools.lru_cache(maxsize=1 << 16)
def _answer(question: _Question):
    """``(splits, placements of operands, placements of results as computed, and as kept)``."""
    rule, mesh = question.rule, question.mesh
    remaining = [factor.size for factor in rule.factors]
    splits: list[list[str]] = [[] for _ in rule.factors]
    ways: list[_Way] = []
    kept: list[list[AxisPlacement]] = [[] for _ in rule.results]
    for axis, (name, size) in enumerate(zip(mesh.names, mesh.sizes, strict=True)):
        candidates = _ways(axis, remaining, question, ways)
        price = functools.partial(_price, axis=axis, question=question)
        way = min(candidates, key=price) if len(candidates) > 1 else candidates[0]
        ways.append(way)
        takes = way.factor in rule.looked_up | rule.cut and question.operands[0].batch
        lost = _gathers_the_batch(way, axis, question) or _divides_examples_otherwise(way, axis, question)
        for index, states in enumerate(kept):
            again = _split_again(question, index, axis, size, states) if lost and not takes else None
            if way.factor in rule.looked_up and not takes:
                again = _looked_up_by(question, axis)
            states.append(way.results[index] if again is None else again)
        if way.factor is not None:
            remaining[way.factor] //= size
            splits[way.factor].append(name)
    for index, states in enumerate(kept):
        if not Placement(tuple(states)).fits(_shape(rule, rule.results[index]), mesh):
            states[:] = [way.results[index] for way in ways]
    if _transposes_first(ways, question):
        natural = question.operands[0].held[0].axes
        ways = [
            _Way(None, (state,), (PARTIAL,)) if state == PARTIAL else way
            for state, way in zip(natural, ways, strict=True)
        ]
        splits = [[name for name in names if natural[mesh.names.index(name)] != PARTIAL] for names in splits]
    return (
        tuple(tuple(names) for names in splits),
        tuple(Placement(tuple(way.operands[i] for way in ways)) for i in range(len(rule.operands))),
        tuple(Placement(tuple(way.results[i] for way in ways)) for i in range(len(rule.results))),
        tuple(Placement(tuple(states)) for states in kept),
    )


def _transposes_first(ways: Sequence[_Way], question: _Question) -> bool:
    """Whether partial sums, about to be scattered and transposed, had better be transposed and scattered.

    A scatter along another dimension than the leading one rewrites the whole value first, so that what each device
    gets is in one piece. Transposing costs as much and is often free, as the matrix product that made the value can
    make it transposed. Bytes sent are the same, unless others want the scattered value as it was.
    """
    rule, mesh = question.rule, question.mesh
    if rule.linear != (frozenset({0}),) or not len(rule.operands) == len(rule.results) == 1:
        return False
    if sorted(rule.operands[0]) != sorted(rule.results[0]):
        return False
    (operand,), natural = question.operands, question.operands[0].held[0].axes
    moved = [axis for axis, way in enumerate(ways) if way.operands[0] != natural[axis]]
    known = {placement.axes[axis] for placement in (*operand.held, *operand.expected) for axis in moved}
    scattered = [axis for axis in moved if ways[axis].operands[0] >= 0]
    if known != {PARTIAL} or not scattered or any(mesh.is_virtual(axis) for axis in scattered):
        return False
    before = max(_pieces(rule.operands[0], ways[axis].operands[0], rule) for axis in scattered)
    after = max(_pieces(rule.results[0], ways[axis].results[0], rule) for axis in scattered)
    return after < before


def _pieces(dims: Dims, dim: int, rule: OpRule) -> int:
    """In how many pieces a part of ``dim`` lies in memory."""
    return math.prod(rule.factors[factor].size for factors in dims[:dim] for factor in factors)


def _looked_up_by(question: _Question, axis: int) -> int | None:
    """The dimension of what is looked up along which the examples that look are split; None if none are.

    Rows found in a table that is split go to them at once.
    """
    rule = question.rule
    state = question.operands[1].held[0].axes[axis]
    if state < 0:
        return None
    examples = rule.operands[1][state]
    return next((dim for dim, factors in enumerate(rule.results[0]) if factors == examples), None)


def _gathers_the_batch(way: _Way, axis: int, question: _Question) -> bool:
    """Whether ``way`` needs something whole that the batch had split over ``axis``."""
    if way.factor is not None or way.is_partial:
        return False
    return any(operand.batch and operand.held[0].axes[axis] >= 0 for operand in question.operands)


def _divides_examples_otherwise(way: _Way, axis: int, question: _Question) -> bool:
    """Whether examples that are needed all together are divided along another dimension for that."""
    pairs = zip(question.rule.operands, question.operands, strict=True)
    states = ((dims, operand.held[0].axes[axis]) for dims, operand in pairs if operand.batch)
    return way.factor is not None and any(_are_needed_together(dims, [state], question) for dims, state in states)


def _split_again(
    question: _Question, index: int, axis: int, size: int, before: Sequence[AxisPlacement]
) -> AxisPlacement | None:
    """The dimension along which a result is cut that had to be computed whole; else every device would go on with all.

    The one its consumers ask for; while they are not known, the one that was split before, or one that has examples of
    it; or else one that other axes split, or that was behind it, as what is left of ``x.reshape(parts, -1, n)[part]``.
    None if whole is wanted.
    """
    rule, mesh = question.rule, question.mesh
    shape = _shape(rule, rule.results[index])
    asked = [placement.axes[axis] for placement in question.demands[index]]
    if asked and max(asked) < 0:
        return None
    batch = [(dims, op.held[0].axes) for dims, op in zip(rule.operands, question.operands, strict=True) if op.batch]
    split = [[dims[states[other]] for dims, states in batch if states[other] >= 0] for other in range(len(mesh.sizes))]
    taken = [_in_result(rule, index, dims) for dims in split]
    wanted = asked or [*(states[axis] for _, states in batch), 0]
    for dim in [state for state in (*wanted, *taken[axis]) if state >= 0]:
        parts = size * math.prod(mesh.sizes[i] for i, state in enumerate(before) if state == dim)
        if dim < len(shape) and shape[dim] and shape[dim] % parts == 0:
            return dim
    if asked or mesh.is_virtual(axis):
        return None
    has_more = sum(size > 1 for size in shape) > 1
    behind = [dims[s[axis] + 1] for dims, s in batch if has_more and 0 <= s[axis] < len(dims) - 1]
    for dim in (*sorted(itertools.chain(*taken)), *_in_result(rule, index, behind)):
        parts = size * math.prod(mesh.sizes[other] for other, dims in enumerate(taken) if other != axis and dim in dims)
        if shape[dim] and shape[dim] % parts == 0:
            return dim
    return None


def _in_result(rule: OpRule, index: int, dims: Sequence[Sequence[int]]) -> list[int]:
    """The dimensions of a result that have a factor of one of ``dims``."""
    factors = set(itertools.chain(*dims))
    return [dim for dim, own in enumerate(rule.results[index]) if factors.intersection(own)]


def _shape(rule: OpRule, dims: Dims) -> list[int]:
    return [math.prod(rule.factors[factor].size for factor in factors) for factors in dims]


def _ways(axis: int, remaining: Sequence[int], question: _Question, before: Sequence[_Way]) -> list[_Way]:
    """The ways to use ``axis``, given those chosen for the axes ``before`` it."""
    rule, operands = question.rule, question.operands
    ways = [_Way(None, (REPLICATE,) * len(rule.operands), (REPLICATE,) * len(rule.results))]
    if question.mesh.sizes[axis] == 1:
        return ways
    ways += [_factor_way(rule, factor) for factor in sorted(_touched_factors(axis, remaining, question, before))]
    states = [{held.axes[axis] for held in operand.held} for operand in operands]
    virtual = question.mesh.is_virtual(axis)
    for group in (*rule.linear, *rule.rounded) if virtual else rule.linear:
        if virtual and _waits_for_a_total(group, operands, states):
            continue
        if any(PARTIAL in states[index] for index in group):
            placed = tuple(PARTIAL if index in group else REPLICATE for index in range(len(operands)))
            ways.append(_Way(None, placed, (PARTIAL,) * len(rule.results)))
    return ways


def _waits_for_a_total(
    group: frozenset[int], operands: Sequence[Operand], states: Sequence[set[AxisPlacement]]
) -> bool:
    """Whether the operands of ``group``, added up, would have to wait for the end of the loop that they are sums of.

    That is so where another operand, or one of them that is no sum of the loop, is or depends on a total.
    """
    each = zip(operands, states, strict=True)
    return any(
        operand.of_total and PARTIAL not in held if index in group else operand.of_total or PARTIAL in held
        for index, (operand, held) in enumerate(each)
    )


def _touched_factors(axis: int, remaining: Sequence[int], question: _Question, before: Sequence[_Way]) -> set[int]:
    """Factors that an operand or a demand already splits over this axis; splitting others would only invent work.

    A partial sum that nobody expects in a certain form may be scattered along any factor. And examples that are needed
    all together, to be joined with others or put in another order, may be divided along any other.
    """
    rule, virtual = question.rule, question.mesh.is_virtual(axis)
    touched: set[int] = set()
    for index, (dims, operand) in enumerate(zip(rule.operands, question.operands, strict=True)):
        chosen = [way.operands[index] for way in before]
        placements = [held for held in (*operand.held, *operand.expected) if not virtual or _refines(held, chosen)]
        states = {placement.axes[axis] for placement in placements}
        touched |= {_leading_factor(dims[state], remaining) for state in states if state >= 0}
        if states == {PARTIAL} or (operand.batch and _are_needed_together(dims, states, question)):
            touched |= {_leading_factor(factors, remaining) for factors in dims}
    for index, (dims, wanted) in enumerate(zip(rule.results, question.demands, strict=True)):
        chosen = [way.results[index] for way in before]
        for placement in wanted:
            if placement.axes[axis] >= 0 and (not virtual or _refines(placement, chosen)):
                touched.add(_leading_factor(dims[placement.axes[axis]], remaining))
    touched.discard(-1)
    if rule.by_number:
        touched -= rule.by_number - _movable(question)
    return {factor for factor in touched if _splittable(rule, factor, question.mesh.sizes[axis], remaining)}


def _are_needed_together(dims: Dims, states: Iterable[AxisPlacement], question: _Question) -> bool:
    """Whether an operand is split along what an equation cannot split, and nothing else.

    Not where there are microbatches: no device has all examples at a time.
    """
    split, rule = [dims[state] for state in states if state >= 0], question.rule
    whole = all(rule.factors[each].kind is Kind.WHOLE or each in rule.cut for along in split for each in along)
    return bool(split) and whole and not question.mesh.virtual


def _movable(question: _Question) -> frozenset[int]:
    """The factors of single elements, as rows of a table, that each device may serve those of which it has.

    Of activations only where few are taken. Not where all examples of a microbatch would be needed: no device works on
    them in its turn. And rows are not added up by where they are before it is known whether other sums are added to
    theirs, as to the gradient of a table that is multiplied too: then one scatter serves both.
    """
    rule = question.rule
    if question.operands[0].batch:
        return rule.looked_up | rule.cut if _takes_few(question) else frozenset()
    if question.mesh.virtual:
        return frozenset()
    return rule.looked_up if question.lazy else rule.looked_up | rule.updated


def _takes_few(question: _Question) -> bool:
    """Whether little is taken of activations, wherever examples are, as of the first ones to look at.

    A number for each example, such as its loss, is little itself.
    """
    first, *others = question.operands
    less = _FEW * question.result_sizes[0].bytes <= first.size.bytes and len(question.rule.operands[0]) > 1
    return question.light and less and not any(other.held[0].is_split or other.of_total for other in others)


_FEW = 4
"""So many times larger is what all devices would have to have for what is taken of it."""


def _refines(placement: Placement, chosen: Sequence[AxisPlacement]) -> bool:
    """Whether the axes before the next one split the dimension that ``placement`` has the next one split as it does.

    Examples are divided among devices first. A part of all examples is not what any device works on in its turn.
    """
    dim, pairs = placement.axes[len(chosen)], zip(chosen, placement.axes, strict=False)
    return dim < 0 or all((ours == dim) == (theirs == dim) for ours, theirs in pairs)


def _leading_factor(factors: Sequence[int], remaining: Sequence[int]) -> int:
    """The factor that the next axis would split: the first with more than one trip left."""
    return next((factor for factor in factors if remaining[factor] > 1), -1)


def _splittable(rule: OpRule, factor: int, size: int, remaining: Sequence[int]) -> bool:
    if rule.factors[factor].kind is Kind.WHOLE or remaining[factor] % size:
        return False
    every_dim = (factors for dims in (*rule.operands, *rule.results) for factors in dims if factor in factors)
    return all(_leading_factor(factors, remaining) == factor for factors in every_dim)


def _factor_way(rule: OpRule, factor: int) -> _Way:
    kind = rule.factors[factor].kind

    def place(dims: Dims, absent: AxisPlacement) -> AxisPlacement:
        return next((dim for dim, factors in enumerate(dims) if factor in factors), absent)

    operands = tuple(
        place(dims, PARTIAL if kind is Kind.SUM and index in rule.addends else REPLICATE)
        for index, dims in enumerate(rule.operands)
    )
    results = tuple(place(dims, PARTIAL if kind is Kind.SUM else REPLICATE) for dims in rule.results)
    return _Way(factor, operands, results, combined=kind in (Kind.MAX, Kind.MIN))


def _price(way: _Way, axis: int, question: _Question) -> tuple[float, float, int, float]:
    exposed = moved = computed = 0.0
    launched = waits = 0
    parts = question.mesh.sizes[axis]
    batch = any(operand.batch for operand in question.operands)
    for operand, wanted in zip(question.operands, way.operands, strict=True):
        bytes_sent, of_activation = min(_operand_price(operand, axis, wanted, question))
        moved += bytes_sent
        exposed += of_activation
        launched += bytes_sent > 0
        waits += of_activation > 0
        computed += operand.size.bytes / (parts if wanted >= 0 else 1)
    by_element = question.rule.looked_up | question.rule.updated
    stays = bool(by_element) or not question.may_move
    brought = exposed > 0 and not stays
    for yielded, wanted, whole in zip(way.results, question.demands, question.result_sizes, strict=True):
        computed += whole.bytes / (parts if yielded >= 0 else 1)
        if way.combined:
            moved += axis_cost(PARTIAL, REPLICATE, whole, axis, question.mesh)
            launched += 1
        for state in _asked(way, yielded, wanted, brought, axis, question):
            bytes_sent = axis_cost(yielded, state, whole, axis, question.mesh)
            moved += bytes_sent
            launched += bytes_sent > 0
            if batch and (brought or yielded >= 0):
                exposed += bytes_sent
                waits += bytes_sent > 0
    if (question.lazy and way.is_partial) or (question.rule.rearranges and _gathered_by_others(way, axis, question)):
        computed = 0.0
    if way.factor in question.rule.by_number:
        exposed = 0.0  # the table would come to the examples otherwise
    if exposed and _gathers_the_batch(way, axis, question) and (not stays or _multiplies(question.rule)):
        exposed = math.inf  # every device would compute all of it
    if stays:
        return exposed, moved, launched, computed
    return moved + (_EXPOSED - 1) * exposed + waits * question.latency_bytes, exposed, launched, computed


def _multiplies(rule: OpRule) -> bool:
    """Whether an equation is a matrix product or the like, so that computing all of it is not for free."""
    return len(rule.operands) > 1 and any(factor.kind is Kind.SUM for factor in rule.factors)


def _asked(
    way: _Way, yielded: AxisPlacement, wanted: Sequence[Placement], brought: bool, axis: int, question: _Question
) -> set[AxisPlacement]:
    """What a result must be turned into; ``brought`` says that activations came from where the examples are split."""
    if way.factor in question.rule.looked_up and (found := _looked_up_by(question, axis)) is not None:
        return {found}
    states = {placement.axes[axis] for placement in wanted}
    if way.is_partial and PARTIAL in states and question.mesh.is_virtual(axis):
        return {PARTIAL}  # who would take the sum of a loop, too, gets it when that has ended
    if brought and states <= {yielded}:
        return {0 if yielded else 1}  # it will be wanted where the examples are split again
    return states


_EXPOSED = 3.0
"""For how many bytes of parameters, gathered ahead, one byte of activations counts, which compute waits for."""


def _gathered_by_others(way: _Way, axis: int, question: _Question) -> bool:
    """Whether ``way`` takes a parameter whole, as another equation does: what is gathered alike is gathered once."""
    (operand,), (wanted,) = question.operands, way.operands
    expected = {placement.axes[axis] for placement in operand.expected}
    return not operand.batch and wanted == REPLICATE and REPLICATE in expected


def _operand_price(
    operand: Operand, axis: int, wanted: AxisPlacement, question: _Question
) -> list[tuple[float, float]]:
    partial = any(held.axes[axis] == PARTIAL for held in operand.held)
    sources = (*operand.held, *operand.expected) if partial and not question.lazy else operand.held
    states = [placement.axes[axis] for placement in sources]
    sent = [axis_cost(state, wanted, operand.size, axis, question.mesh) for state in states]
    exposed = operand.batch and not partial
    return [(cost, cost if exposed and state >= 0 else 0.0) for state, cost in zip(states, sent, strict=True)]
