"""Kernels of a step: seconds by the profiler beside those of the cost model, by kind and the heaviest one by one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax_deepcompile as deepcompile
from experiments.gpu_suite.cases import Row
from experiments.gpu_suite.meshes import one_device_mesh
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.costs.work import work_of
from jax_deepcompile.hlo import opcodes
from jax_deepcompile.hlo import reader as hlo


@dataclass(frozen=True)
class Kernel:
    """One op of the compiled step.

    Attributes:
      name: of the instruction.
      kind: as ``kinds_of`` says.
      where: the user's line.
      executions: in a step.
      measured_s, predicted_s: of one execution.
    """

    name: str
    kind: str
    where: str
    executions: int
    measured_s: float
    predicted_s: float


def profiled(step: deepcompile.ShardedStep, args: tuple, runs: int, most: int) -> Iterator[Row]:
    """A row of the whole step, one a kind of op, and one for each of the heaviest ops.

    They share ``what`` and ``measured_s``, ``predicted_s``, ``predicted_over_measured``, of one step.

    Args:
      step: on one device.
      args: its state, which is used up, and its batch.
      runs: traced; the median counts.
      most: so many ops have a row.
    """
    compiled = step.lower(*args).compile()
    simulated = deepcompile.simulate(compiled, one_device_mesh())
    profile = step.profile(*args, runs=runs).profile
    kinds = kinds_of(compiled.as_text())
    predicted_s = predictions(simulated)
    kernels = [
        Kernel(op.name, kinds[op.name], op.where, op.executions, op.seconds, predicted_s[op.name])
        for op in profile.ops
        if op.seconds is not None and op.name in predicted_s
    ]
    if profile.step is not None:
        untimed = {"untimed_ops": len(profile.ops) - len(kernels), "untimed_because": _why(profile)}
        yield {"what": "step"} | untimed | _compared(profile.step.seconds, simulated.step_s)
    yield from by_kind(kernels)
    yield from heaviest(kernels, most)


def _why(profile: deepcompile.Profile) -> str:
    """Most ops without a time have none; empty if all have one."""
    reasons = Counter(op.source.note for op in profile.ops if op.seconds is None)
    return next((reason for reason, _ in reasons.most_common(1)), "")


def predictions(simulated: Simulation) -> dict[str, float]:
    """Seconds of one execution, by the name of the instruction."""
    return {event.name: event.end_s - event.start_s for event in simulated.timeline}


def by_kind(kernels: Iterable[Kernel]) -> list[Row]:
    """Sums over a step, of the kind that takes longest first."""
    groups: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.kind].append(kernel)
    sums = [
        {"what": "kind", "kind": kind, "ops": len(group)}
        | _compared(
            sum(kernel.executions * kernel.measured_s for kernel in group),
            sum(kernel.executions * kernel.predicted_s for kernel in group),
        )
        for kind, group in groups.items()
    ]
    return sorted(sums, key=lambda row: -row["measured_s"])


def heaviest(kernels: Iterable[Kernel], count: int) -> list[Row]:
    """Those that take longest in a step, one by one."""
    ordered = sorted(kernels, key=lambda kernel: -kernel.executions * kernel.measured_s)
    return [
        {"what": "op", "name": kernel.name, "kind": kernel.kind, "where": kernel.where}
        | _compared(kernel.executions * kernel.measured_s, kernel.executions * kernel.predicted_s)
        for kernel in ordered[:count]
    ]


def kinds_of(text: str) -> dict[str, str]:
    """What each instruction of a compiled module is: ``matmul``, ``reduction``, ``elementwise``, or its opcode."""
    module = hlo.read(text)
    return {
        instruction.name: _kind(module, computation, instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions
    }


def _kind(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> str:
    opcode, part = opcodes.split(instruction.opcode)
    if part or opcode not in ("fusion", "custom-call", "dot", "convolution"):
        return opcode
    if work_of(module, computation, instruction).products:
        return "matmul"
    if opcode == "fusion":
        reduces = any(part.opcode == "reduce" for part in module.body(instruction).instructions)
        return "reduction" if reduces else "elementwise"
    return opcode


def _compared(measured_s: float, predicted_s: float) -> Row:
    ratio = predicted_s / measured_s if measured_s else None
    return {"measured_s": measured_s, "predicted_s": predicted_s, "predicted_over_measured": ratio}
