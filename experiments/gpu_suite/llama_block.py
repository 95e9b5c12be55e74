"""Kernels of one Llama layer, forward, backward and update: seconds by the profiler beside those of the cost model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import jax_deepcompile as deepcompile
from experiments.gpu_suite.cases import Row
from experiments.gpu_suite.meshes import one_device_mesh
from experiments.gpu_suite.sizes import Sizes
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.costs.work import work_of
from jax_deepcompile.hlo import opcodes
from jax_deepcompile.hlo import reader as hlo
from jax_deepcompile.profilers import take_profile
from models.llama import Layer


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


def cases(sizes: Sizes) -> list[Row]:
    return [{"width": layer.d_model} for layer in sizes.llama_block.layers]


def rows(case: Row, sizes: Sizes, seconds: float) -> Iterator[Row]:
    """A row of the whole step, one a kind of op, and one for each of the heaviest ops.

    They share ``width``, ``what`` and ``measured_s``, ``predicted_s``, ``predicted_over_measured``, of one step.
    """
    mesh, wanted = one_device_mesh(), sizes.llama_block
    config = next(layer for layer in wanted.layers if layer.d_model == case["width"])
    x = jnp.ones((1, wanted.sequence, config.d_model), config.dtype)
    layer = Layer(config)

    def step(params, x):
        def loss_of(params):
            y, _ = layer.apply({"params": params}, x)
            return jnp.mean(jnp.square(jnp.asarray(y, jnp.float32)))

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda param, grad: param - 1e-3 * grad, params, grads), loss

    sharded = deepcompile.shard(step, mesh, passes=())
    args = (sharded.init(lambda: layer.init(jax.random.key(0), x)["params"]), x)
    traced = sharded.trace(*args)
    compiled = traced.lower().compile()
    simulated = deepcompile.simulate(compiled, mesh)
    profile = take_profile(sharded, args, compiled, traced.sharded, mesh, limit_bytes=0, runs=wanted.runs).profile
    kinds = kinds_of(compiled.as_text())
    predicted_s = predictions(simulated)
    kernels = [
        Kernel(op.name, kinds[op.name], op.where, op.executions, op.seconds, predicted_s[op.name])
        for op in profile.ops
        if op.seconds is not None and op.name in predicted_s
    ]
    untimed = len(profile.ops) - len(kernels)
    if profile.step is not None:
        times = _compared(profile.step.seconds, simulated.step_s)
        yield case | {"what": "step", "untimed_ops": untimed} | times
    for row in (*by_kind(kernels), *heaviest(kernels, wanted.heaviest)):
        yield case | row


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
    opcode, _ = opcodes.split(instruction.opcode)
    if opcode not in ("fusion", "custom-call", "dot", "convolution"):
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
