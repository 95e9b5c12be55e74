"""How often a compiled loop runs its body, and so a compiled program each of its collectives."""

from collections import Counter
from collections.abc import Iterator, Sequence

from jax_deepcompile.hlo import opcodes
from jax_deepcompile.hlo.types import Computation, Instruction, Module


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Trips of a while, as XLA wrote them down or else as its condition tells; None if neither does.

    A condition tells if it is ``counter < bound``, with a bound that is a constant or carried unchanged from one. The
    counter is taken to start at 0 and to go up by 1, as that of every scan does.
    """
    known = loop.config.get("known_trip_count", {}).get("n")
    if known is not None:
        return int(known)
    condition = _steps(module, module.condition(loop).name)
    directions = [step.attribute("direction") for step in condition if step.opcode == "compare"]
    bounds = [step for step in condition if _is_count(step)] or list(_carried_counts(module, loop, condition))
    if directions not in (["LT"], ["LE"]) or len(bounds) != 1:
        return None
    return int(bounds[0].argument) + (directions == ["LE"])


def _steps(module: Module, name: str) -> list[Instruction]:
    """The instructions of a condition and of the fusions in it."""
    steps = list(module.computations[name].instructions)
    return steps + [inner for step in steps for called in step.called for inner in _steps(module, called)]


def _is_count(step: Instruction) -> bool:
    return step.opcode == "constant" and step.argument.isdigit()


def _carried_counts(module: Module, loop: Instruction, condition: Sequence[Instruction]) -> Iterator[Instruction]:
    """Constants that a condition reads out of what its loop carries, and that the loop's body only hands on."""
    body, start = module.body(loop), _made_by(module, loop.operands[0])
    if start is None or start.opcode != "tuple" or body.root.opcode != "tuple":
        return
    for number in {step.number for step in condition if step.opcode == "get-tuple-element"}:
        after, before = body.operand(body.root, number), _made_by(module, start.operands[number])
        if after.opcode == "get-tuple-element" and after.number == number and before is not None and _is_count(before):
            yield before


def _made_by(module: Module, name: str) -> Instruction | None:
    """The instruction of that name; of a copy, what it copies."""
    computation = next((each for each in module.computations.values() if name in each.by_name), None)
    while computation is not None:
        found = computation.by_name[name]
        if found.opcode not in ("copy", "bitcast"):
            return found
        name = found.operands[0]
    return None


def launches(module: Module, computation: Computation | None = None) -> Counter[str]:
    """Collectives of one run of ``module``, or of a ``computation`` of it, by opcode without ``-start``.

    A loop of unknown length counts once, and of a conditional's branches the one that launches most.
    """
    counts: Counter[str] = Counter()
    for instruction in (computation or module.entry).instructions:
        opcode, part = opcodes.split(instruction.opcode)
        if opcode in opcodes.COLLECTIVES and part in ("", "-start"):
            counts[opcode] += 1
        elif opcode == "while":
            trips = trip_count(module, instruction)
            inner = launches(module, module.body(instruction))
            counts.update({kind: number * (1 if trips is None else trips) for kind, number in inner.items()})
        elif opcode == "conditional":
            branches = [launches(module, module.computations[name]) for name in instruction.called]
            counts.update(max(branches, key=Counter.total, default=Counter()))
        elif opcode == "call" or instruction.opcode == "async-start":
            counts.update(launches(module, module.body(instruction)))
    return +counts
