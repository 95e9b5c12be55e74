"""Deciding a placement for every value of a jaxpr.

Four sweeps. A backward one carries the outputs' placements up through elementwise equations, so that a gradient knows
what its optimizer state looks like; a forward one lets placements flow from the inputs; a backward one collects, for
every value, the placements its consumers would like; and a forward one decides with both in hand. What no sweep can
know, the price of another choice, is weighed equation by equation in ``choice.py``. Examples that a step makes itself
are asked for as those of a batch are divided (``OwnExamples``), and flow on as they do.

A sharded parameter is gathered where it is used. The gathered copy serves the uses that follow closely and is then
released: a *use region* ends once more bytes of other parameters have been gathered than the parameter's own, so a copy
never outlives its turn, and the backward pass gathers again. Two things say themselves how long they last: the slice of
a stack that a layer loop hands to its body, and what a checkpointed region takes in. Their copies serve the whole
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jax.extend import core as jex

from jax_deepcompile._jax_compat import is_drop_var
from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.ir.placement import PARTIAL, REPLICATE, MeshAxes, Placement
from jax_deepcompile.ir.primitives import CONTROL_FLOW, PRODUCTS
from jax_deepcompile.ir.traversal import variables
from jax_deepcompile.partition.choice import Operand, choose_split
from jax_deepcompile.partition.layout import (
    Decision,
    Fetch,
    Layout,
    Nested,
    RegionRule,
    Request,
    Split,
    Step,
    finds_extrema_over,
    sums_over_features,
)
from jax_deepcompile.partition.own_examples import OwnExamples
from jax_deepcompile.partition.reshard import Size, axis_cost, collectives, full_bytes, size_of
from jax_deepcompile.partition.rules.base import OpRule

FindRule = Callable[[Equation], "OpRule | RegionRule"]
Demands = tuple[tuple[Placement, ...], ...]


@dataclass
class Propagator:
    """Decides jaxprs over one mesh with one set of rules; remembers what it has decided, as loops ask repeatedly."""

    mesh: MeshAxes
    find_rule: FindRule
    latency_bytes: float = 0.0
    """What a device could send in the time that a collective takes to begin."""

    own: OwnExamples | None = None
    """The examples that the step makes itself; None for none."""

    _layouts: dict = field(default_factory=dict)
    _rules: dict = field(default_factory=dict)

    def __call__(
        self,
        jaxpr: jex.Jaxpr,
        inputs: Sequence[Placement],
        batch: Sequence[bool],
        demands: Sequence[Sequence[Placement]],
        held: Sequence[bool] = (),
        late: Sequence[bool] = (),
        outermost: bool = False,
    ) -> Layout:
        """Decides ``jaxpr``, an open one; its constants, if any, count as replicated.

        Args:
          batch: for each input whether it depends on the batch.
          demands: for each output the placements wanted of it; it is brought to the first. Empty: as it comes.
          held: for each input whether a gathered copy of it serves the whole jaxpr; by default none does.
          late: for each output whether it is brought to what is wanted at the end, without a say in what comes before;
            by default none is.
          outermost: whether it is the whole program, not the body of a loop, branch or checkpointed region.
        """
        asked = tuple(map(tuple, demands))
        key = (id(jaxpr), tuple(inputs), tuple(batch), asked, tuple(held), tuple(late), outermost)
        if key not in self._layouts:
            self._layouts[key] = _Sweeps(self, jaxpr, *key[1:]).run()
        return self._layouts[key]

    def hints(self, jaxpr: jex.Jaxpr, demands: Sequence[Sequence[Placement]]) -> list[tuple[Placement, ...]]:
        """What demands on the outputs of ``jaxpr`` ask of its inputs, as far as elementwise equations tell."""
        sweeps = _Sweeps(self, jaxpr, (), (), tuple(map(tuple, demands)), (), (), False)
        sweeps._demand_outputs()
        sweeps._hint()
        return [tuple(sweeps.demands.get(var, ())) for var in jaxpr.invars]

    def within(self, mesh: MeshAxes) -> Propagator:
        """A propagator with the same rules over fewer axes."""
        return Propagator(mesh, self.find_rule, self.latency_bytes, _rules=self._rules)

    def rule_of(self, eqn: Equation) -> OpRule | RegionRule:
        if id(eqn) not in self._rules:
            self._rules[id(eqn)] = (self.find_rule(eqn), eqn)
        return self._rules[id(eqn)][0]


@dataclass
class _Copy:
    """A copy of a value in another placement; a parameter's gathered one is released when its use region ends."""

    gathered: bool
    used_at: float
    """How many bytes had been gathered when it was last used."""


@dataclass
class _Sweeps:
    """The state of deciding one jaxpr."""

    propagator: Propagator
    jaxpr: jex.Jaxpr
    inputs: tuple[Placement, ...]
    input_batch: tuple[bool, ...]
    output_demands: Demands
    input_held: tuple[bool, ...]
    output_late: tuple[bool, ...]
    outermost: bool
    lazy: bool = False
    natural: dict = field(default_factory=dict)
    batch: dict = field(default_factory=dict)
    of_total: set = field(default_factory=set)
    demands: dict = field(default_factory=dict)

    @property
    def mesh(self) -> MeshAxes:
        return self.propagator.mesh

    @property
    def _activations_may_move(self) -> bool:
        """Not in loops: what they read again and again is gathered before them. Nor off one axis of several."""
        several = sum(size > 1 for size in self.mesh.sizes) > 1
        return self.outermost and not several and not self.mesh.virtual

    @cached_property
    def worked_on(self) -> set:
        """What products, loops or branches go on with, and what leaves the body of one."""
        found = set() if self.outermost else set(variables(self.jaxpr.outvars))
        for eqn in reversed(self.jaxpr.eqns):
            if eqn.primitive.name in PRODUCTS | CONTROL_FLOW or not found.isdisjoint(eqn.outvars):
                found.update(variables(eqn.invars))
        return found

    def run(self) -> Layout:
        self._mark_batch()
        self._demand_outputs()
        self._demand_own()
        self._hint()
        self.lazy = True
        self._forward()
        self.lazy = False
        self.demands.clear()
        self._demand_outputs()
        self._backward()
        return self._forward()

    def _mark_batch(self) -> None:
        self.batch = dict(zip(self.jaxpr.invars, self.input_batch, strict=True))
        self.batch.update((var, True) for var in self.jaxpr.constvars if self._own(var) is not None)
        for eqn in self.jaxpr.eqns:
            self.batch.update(zip(eqn.outvars, self._batch_through(eqn)[1], strict=True))

    def _batch_through(self, eqn: Equation) -> tuple[list[bool], Sequence[bool]]:
        """Which operands depend on the batch, and which results do, wherever they are summed."""
        operands = [self._is_of_batch(atom) for atom in eqn.invars]
        rule = self.propagator.rule_of(eqn)
        if not isinstance(rule, OpRule):
            return operands, rule.batch(eqn, operands)
        return operands, [any(operands) or self._own(var, eqn) is not None for var in eqn.outvars]

    def _own(self, var: jex.Var, eqn: Equation | None = None) -> Placement | None:
        """Where ``var``, made by ``eqn``, goes as an example of the step's own; None if it is none."""
        own = self.propagator.own
        if own is None or var in own.at_hand:
            return own and own.rows
        return own.made(eqn, self.mesh) if eqn is not None and not any(map(self._is_of_batch, eqn.invars)) else None

    def _is_of_batch(self, atom) -> bool:
        return not isinstance(atom, jex.Literal) and self.batch.get(atom, False)

    def _demand_outputs(self) -> None:
        late = self.output_late or (False,) * len(self.jaxpr.outvars)
        for atom, wanted, is_late in zip(self.jaxpr.outvars, self.output_demands, late, strict=True):
            for placement in () if is_late else wanted:
                self._demand(atom, placement)

    def _demand_own(self) -> None:
        made = ((var, self._own(var, eqn)) for eqn in self.jaxpr.eqns for var in eqn.outvars)
        for var, wanted in (*((var, self._own(var)) for var in self.jaxpr.constvars), *made):
            if wanted is not None:
                self._demand(var, wanted)

    def _hint(self) -> None:
        for eqn in reversed(self.jaxpr.eqns):
            rule = self.propagator.rule_of(eqn)
            results = tuple(tuple(self.demands.get(var, ())) for var in eqn.outvars)
            if not any(results):
                continue
            if isinstance(rule, OpRule):
                hints = _hints_through(rule, results[0])
            else:
                hints = rule.hints(eqn, results, self.propagator.hints)
            for atom, wanted in zip(eqn.invars, hints, strict=True):
                for placement in wanted:
                    self._demand(atom, placement)

    def _backward(self) -> None:
        for eqn in reversed(self.jaxpr.eqns):
            operands = [self._known(atom, (self._natural(atom),)) for atom in eqn.invars]
            decision = self._decide(eqn, operands)
            for atom, placement in zip(eqn.invars, decision.operands, strict=True):
                self._demand(atom, placement)

    def _forward(self) -> Layout:
        replicated = self.mesh.replicated()
        self.natural = dict.fromkeys(self.jaxpr.constvars, replicated)
        self.natural.update(zip(self.jaxpr.invars, self.inputs, strict=True))
        copies = _Copies(self)
        steps = []
        for eqn in self.jaxpr.eqns:
            operands = [self._known(atom, copies.held(atom)) for atom in eqn.invars]
            decision = self._decide(eqn, operands)
            fetches = tuple(
                copies.fetch(atom, placement) for atom, placement in zip(eqn.invars, decision.operands, strict=True)
            )
            if isinstance(decision.how, Nested):  # what it takes in sharded will be gathered inside
                copies.regathered.update(variables(eqn.invars))
            kept = decision.kept or decision.results
            steps.append(Step(eqn, decision.how, fetches, decision.results, kept))
            self.natural.update(zip(eqn.outvars, kept, strict=True))
            self._remark_batch(eqn, decision)
            if self._is_of_total(eqn, decision):
                self.of_total.update(eqn.outvars)
            copies.hold_what_follows(eqn)
        wanted = zip(self.jaxpr.outvars, self.output_demands, strict=True)
        outputs = [copies.fetch(atom, self._delivered(atom, placements)) for atom, placements in wanted]
        return Layout(
            self.jaxpr,
            self.inputs,
            tuple(outputs),
            tuple(steps),
            self.mesh,
            tuple(tuple(copies.uses.get(var, ())) for var in self.jaxpr.invars),
            tuple(var in copies.regathered for var in self.jaxpr.invars),
            tuple(map(self._is_of_batch, self.jaxpr.outvars)),
        )

    def _delivered(self, atom, wanted: Sequence[Placement]) -> Placement:
        """The first placement wanted, or the same with the sums left for later, if that is wanted too."""
        natural = self._natural(atom)
        if not wanted:
            return natural
        later = wanted[0].deferring(natural)
        return later if later in wanted else wanted[0]

    def _remark_batch(self, eqn: jex.JaxprEqn, decision: Decision) -> None:
        """What is summed over the batch (a gradient, a statistic) depends on it no more than a parameter does.

        An activation of which every device has computed a part of the sum over features is one still.
        """
        operands, static = self._batch_through(eqn)
        kept = decision.kept or decision.results
        taken = zip(operands, decision.operands, strict=True)
        of_features = any(depends and placement.is_partial for depends, placement in taken) or (
            isinstance(decision.how, Split) and sums_over_features(decision.how, operands)
        )
        for var, depends, placement in zip(eqn.outvars, decision.batch or static, kept, strict=True):
            self.batch[var] = depends and (of_features or not placement.is_partial)

    def _is_of_total(self, eqn: jex.JaxprEqn, decision: Decision) -> bool:
        """Whether ``eqn`` makes, or goes on with, a total over a virtual axis."""
        if isinstance(decision.how, Split) and finds_extrema_over(decision.how, self.mesh):
            return True
        for atom, placement in zip(eqn.invars, decision.operands, strict=True):
            pairs = enumerate(zip(self._natural(atom).axes, placement.axes, strict=True))
            brought = any(have not in (want, REPLICATE) and self.mesh.is_virtual(axis) for axis, (have, want) in pairs)
            if brought or (not isinstance(atom, jex.Literal) and atom in self.of_total):
                return True
        return False

    def _decide(self, eqn: Equation, operands: list[Operand]) -> Decision:
        demands = tuple(tuple(self.demands.get(var, ())) for var in eqn.outvars)
        rule = self.propagator.rule_of(eqn)
        if isinstance(rule, OpRule):
            may_move, latency_bytes = self._activations_may_move, self.propagator.latency_bytes
            light = self.worked_on.isdisjoint(eqn.outvars)
            return choose_split(eqn, rule, operands, demands, self.mesh, self.lazy, may_move, latency_bytes, light)
        offered, batch = map(self._best_for_region, operands), (operand.batch for operand in operands)
        return rule.decide(eqn, Request(tuple(offered), tuple(batch), demands, self.mesh), self.propagator)

    def _best_for_region(self, operand: Operand) -> Placement:
        """The placement a region is offered: partial sums come as what they will be summed into anyway."""
        offered = operand.held[0]
        if not offered.is_partial:
            return offered
        summed = [placement for placement in (*operand.held, *operand.expected) if not placement.is_partial]
        return summed[0] if summed else offered

    def _known(self, atom, held: tuple[Placement, ...]) -> Operand:
        if isinstance(atom, jex.Literal):
            return Operand((self.mesh.replicated(),), (), False, size_of(atom.aval))
        expected, batch = tuple(self.demands.get(atom, ())), self.batch.get(atom, False)
        return Operand(held, expected, batch, size_of(atom.aval), atom in self.of_total)

    def _natural(self, atom) -> Placement:
        return self.mesh.replicated() if isinstance(atom, jex.Literal) else self.natural[atom]

    def _demand(self, atom, placement: Placement) -> None:
        if isinstance(atom, jex.Literal) or is_drop_var(atom):
            return
        wanted = self.demands.setdefault(atom, [])
        if placement not in wanted:
            wanted.append(placement)


class _Copies:
    """The copies of each value made so far in a forward sweep, and which of them are still held."""

    def __init__(self, sweeps: _Sweeps) -> None:
        self.sweeps = sweeps
        self.made: dict = {}
        self.held_throughout = {var for var, held in zip(sweeps.jaxpr.invars, sweeps.input_held, strict=False) if held}
        self.uses: dict = {}
        self.regathered: set = set()
        self.gathered_bytes = 0.0

    def held(self, atom) -> tuple[Placement, ...]:
        if isinstance(atom, jex.Literal):
            return (self.sweeps.mesh.replicated(),)
        alive = [placement for placement, copy in self.made.get(atom, {}).items() if not self._released(atom, copy)]
        return (self.sweeps.natural[atom], *alive)

    def hold_what_follows(self, eqn: Equation) -> None:
        """What a checkpointed region takes in is held, and so is what held parameters are turned into."""
        from_held = not self.held_throughout.isdisjoint(variables(eqn.invars))
        if eqn.primitive.name == "optimization_barrier" or from_held:
            self.held_throughout.update(var for var in eqn.outvars if not self.sweeps.batch[var])

    def fetch(self, atom, target: Placement) -> Fetch:
        mesh = self.sweeps.mesh
        if isinstance(atom, jex.Literal):
            return Fetch(mesh.replicated(), target)
        uses = self.uses.setdefault(atom, [])
        if target not in uses:
            uses.append(target)
        natural = self.sweeps.natural[atom]
        batch = self.sweeps.batch.get(atom, False)
        if target == natural:
            return Fetch(natural, target, batch=batch)
        made = self.made.setdefault(atom, {})
        whole = size_of(atom.aval)
        fresh = False
        if target in made:
            if not self._released(atom, made[target]):
                made[target].used_at = self.gathered_bytes
                return Fetch(target, target, batch=batch)
            fresh = True
            self.regathered.add(atom)
        sources = [natural, *(p for p, copy in made.items() if p != target and not self._released(atom, copy))]
        source = min(sources, key=lambda placement: _price(placement, target, whole, mesh))
        gathered = not batch and not source.is_partial and collectives(source, target, mesh) > 0
        if gathered:
            self.gathered_bytes += whole.bytes
        made[target] = _Copy(gathered, self.gathered_bytes)
        return Fetch(source, target, fresh, batch)

    def _released(self, atom, copy: _Copy) -> bool:
        if atom in self.held_throughout:
            return False
        return copy.gathered and self.gathered_bytes - copy.used_at >= full_bytes(atom.aval)


def _hints_through(rule: OpRule, wanted: Sequence[Placement]) -> list[list[Placement]]:
    """``wanted`` of the first result as placements of every operand that is made of the same factors."""
    result = rule.results[0]
    hints: list[list[Placement]] = []
    for operand in rule.operands:
        same = operand and {factors for factors in result if factors} == {factors for factors in operand if factors}
        asked = [placement.axes for placement in wanted if same]
        hints.append([Placement(tuple(operand.index(result[i]) if i >= 0 else i for i in axes)) for axes in asked])
    return hints


def _price(source: Placement, target: Placement, whole: Size, mesh: MeshAxes) -> tuple[float, int]:
    pairs = enumerate(zip(source.axes, target.axes, strict=True))
    return sum(axis_cost(have, want, whole, axis, mesh) for axis, (have, want) in pairs), target.axes.count(PARTIAL)
