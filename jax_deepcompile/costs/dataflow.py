"""Which values of a compiled program share a buffer.

A *value* is an array that some instruction computes. Tuples, views and the two halves of an asynchronous operation only
pass values on. Values share a buffer if they must have one address: what a loop carries from trip to trip, what an
operation updates in place, an output that takes a donated input. The rules are those of XLA's ``HloDataflowAnalysis``
and ``HloAliasAnalysis``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from jax_deepcompile.hlo import opcodes
from jax_deepcompile.hlo.reader import Array, Computation, Index, Instruction, Module, Shape, at, leaves

_VIEWS = frozenset({"bitcast", "opt-barrier", "optimization-barrier", "add-dependency", "domain"})
_IN_PLACE = frozenset({"dynamic-update-slice", "scatter"})

Place: TypeAlias = tuple[str, Index]
"""An array in an instruction's result: the instruction's name, and where in the result."""


@dataclass
class Flow:
    """Follows values through a program.

    Attributes:
      module: the program.
      value_at: for each place, the place where the value that is there was computed.
      arrays: the types of the values, by the places where they are computed.
      parents: a forest over those places, in which each tree is one buffer.
    """

    module: Module
    value_at: dict[Place, Place] = field(default_factory=dict)
    arrays: dict[Place, Array] = field(default_factory=dict)
    parents: dict[Place, Place] = field(default_factory=dict)

    @classmethod
    def of(cls, module: Module) -> Flow:
        """All values of ``module``, followed to wherever they are mentioned."""
        flow = cls(module)
        flow.computation(module.entry)
        for alias in module.aliases:
            parameter = module.entry.parameters[alias.parameter].name
            flow.unite((module.entry.root_name, alias.output), (parameter, alias.part))
        return flow

    def computation(self, computation: Computation) -> None:
        for instruction in computation.instructions:
            self.instruction(computation, instruction)

    def instruction(self, computation: Computation, instruction: Instruction) -> None:
        opcode, part = opcodes.split(instruction.opcode)
        if opcode == "while":
            self.loop(instruction)
        elif opcode == "conditional":
            self.branches(instruction)
        elif opcode == "call":
            self.call(instruction)
        elif opcode == "tuple":
            for number, operand in enumerate(instruction.operands):
                self.forward(operand, (), instruction, (number,), at(instruction.shape, (number,)))
        elif opcode == "get-tuple-element":
            self.forward(instruction.operands[0], (instruction.number,), instruction, (), instruction.shape)
        elif opcode in _VIEWS:
            self.forward(instruction.operands[0], (), instruction, (), instruction.shape)
        elif part == "-start":
            self.start(computation, instruction)
        elif part == "-update":
            self.forward(instruction.operands[0], (), instruction, (), instruction.shape)
        elif part == "-done":
            self.done(computation, instruction)
        elif opcode != "parameter" or computation is self.module.entry:
            self.define(instruction)
            self.in_place(instruction, ())

    def forward(self, operand: str, source: Index, instruction: Instruction, target: Index, shape: Shape) -> None:
        """What is at ``target`` of ``instruction`` is what is at ``source`` of ``operand``."""
        for index, array in leaves(shape):
            place = instruction.name, (*target, *index)
            known = self.value_at.get((operand, (*source, *index)))
            if known is None:
                self.new(place, array)
            else:
                self.value_at[place] = known

    def define(self, instruction: Instruction, under: Index = ()) -> None:
        """The arrays of the result (or of a part of it) are new."""
        for index, array in leaves(at(instruction.shape, under)):
            self.new((instruction.name, (*under, *index)), array)

    def new(self, place: Place, array: Array) -> None:
        self.value_at[place] = place
        self.arrays[place] = array
        self.parents[place] = place

    def start(self, computation: Computation, instruction: Instruction) -> None:
        """An asynchronous operation's result is (its operands, its results, bookkeeping); copies put results first."""
        shape = instruction.shape
        if instruction.opcode == "all-reduce-start" or isinstance(shape, Array) or len(shape) < 2:
            self.define(instruction)
            return
        passed = 1 if instruction.opcode == "copy-start" else 0
        for element in range(len(shape)):
            if element != passed:
                self.define(instruction, (element,))
        operands = shape[passed]
        if isinstance(operands, Array):
            self.forward(instruction.operands[0], (), instruction, (passed,), operands)
        else:
            for number, operand in enumerate(instruction.operands):
                self.forward(operand, (), instruction, (passed, number), operands[number])
        self.in_place(instruction, () if passed else (1,))

    def done(self, computation: Computation, instruction: Instruction) -> None:
        started = computation.operand(instruction, 0).shape
        whole = isinstance(started, Array) or instruction.opcode == "all-reduce-done"
        under = () if whole else (0,) if instruction.opcode == "copy-done" else (1,)
        self.forward(instruction.operands[0], under, instruction, (), instruction.shape)

    def in_place(self, instruction: Instruction, under: Index) -> None:
        """Results that take the buffers of operands."""
        for index, (number, part) in instruction.aliased_operands.items():
            self.unite((instruction.name, (*under, *index)), (instruction.operands[number], part))
        if opcodes.split(instruction.opcode)[0] != "fusion":
            if instruction.opcode in _IN_PLACE:
                self.unite((instruction.name, under), (instruction.operands[0], ()))
            return
        body = self.module.body(instruction)
        for index, number in updated_in_place(body):
            self.unite((instruction.name, (*under, *index)), (instruction.operands[number], ()))

    def loop(self, loop: Instruction) -> None:
        """Unchanged elements stay what they were; of the others, each trip's is a value of its own in one buffer."""
        body = self.module.body(loop)
        condition = self.module.condition(loop)
        carried = list(leaves(loop.shape))
        (init,) = loop.operands
        parameter = body.parameters[0].name
        changed = [index for index, _ in carried if not _passes(body, index)]
        for index, array in carried:
            if index in changed:
                self.new((parameter, index), array)
                self.unite((parameter, index), (init, index))
            else:
                self.forward(init, index, body.parameters[0], index, array)
        self.computation(body)
        for index, array in carried:
            if index in changed:
                self.new((loop.name, index), array)
                self.unite((parameter, index), (body.root_name, index))
                self.unite((parameter, index), (loop.name, index))
            else:
                self.forward(init, index, loop, index, array)
        for index, array in carried:
            self.forward(parameter, index, condition.parameters[0], index, array)
        self.computation(condition)

    def branches(self, conditional: Instruction) -> None:
        self.define(conditional)
        for number, name in enumerate(conditional.called):
            branch = self.module.computations[name]
            argument = branch.parameters[0]
            self.forward(conditional.operands[1 + number], (), argument, (), argument.shape)
            self.computation(branch)
            for index, _ in leaves(conditional.shape):
                self.unite((conditional.name, index), (branch.root_name, index))

    def call(self, call: Instruction) -> None:
        called = self.module.body(call)
        for operand, parameter in zip(call.operands, called.parameters, strict=True):
            self.forward(operand, (), parameter, (), parameter.shape)
        self.computation(called)
        self.forward(called.root_name, (), call, (), call.shape)

    def unite(self, one: Place, other: Place) -> None:
        if one in self.value_at and other in self.value_at:
            self.parents[self.buffer(self.value_at[one])] = self.buffer(self.value_at[other])

    def buffer(self, place: Place) -> Place:
        while self.parents[place] != place:
            self.parents[place] = place = self.parents[self.parents[place]]
        return place


def updated_in_place(body: Computation) -> Iterator[tuple[Index, int]]:
    """Results of a fusion that overwrite parts of a parameter, and that parameter's number."""
    root = body.root
    results = list(enumerate(root.operands)) if root.opcode == "tuple" else [(None, root.name)]
    for number, name in results:
        result = body.seen_through(body.by_name[name], {"bitcast"})
        if result.opcode in _IN_PLACE:
            updated = body.seen_through(body.operand(result, 0), {"bitcast"})
            if updated.opcode == "parameter":
                yield (() if number is None else (number,)), updated.number


def _passes(body: Computation, index: Index) -> bool:
    """Whether a loop's body returns what is at ``index`` of its tuple as it came."""
    name, root = body.parameters[0].name, body.root
    if root.opcode == "parameter":
        return True
    if root.opcode != "tuple":
        return False
    instruction, inner = body.operand(root, index[0]), index[1:]
    while instruction.opcode in ("get-tuple-element", "tuple", "bitcast"):
        if instruction.opcode == "tuple":
            instruction, inner = body.operand(instruction, inner[0]), inner[1:]
            continue
        if instruction.opcode == "get-tuple-element":
            inner = (instruction.number, *inner)
        instruction = body.operand(instruction, 0)
    return instruction.name == name and inner == index
