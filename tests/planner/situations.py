"""Programs to plan, and candidates whose figures are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_deepcompile as deepcompile
from jax_deepcompile.costs.cost_model import CostModel, Kernel
from jax_deepcompile.costs.memory import MemoryUse
from jax_deepcompile.costs.simulation import Totals
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner import schedule as schedule_module
from jax_deepcompile.planner import search as search_module
from jax_deepcompile.planner.candidate import Candidate, Environment, Evaluation
from jax_deepcompile.planner.layers import pipelined
from jax_deepcompile.planner.plan import Plan, Prediction
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.pipeline_loops import choose_schedules
from tests.partition.steps import shapes, training_step
from tests.transforms.programs import BATCH, WIDTH, layer, sharded, stack_shapes

START = Plan("0")
NO_MEMORY = MemoryUse(0, 0, 0, 0, (), (), ())
WAITS = Prediction(1.0, 1.0, 1.0, 1.0, 0)
MICROBATCHES = 4
SGD = optax.sgd(0.1)


@dataclass(frozen=True)
class Clock(CostModel):
    """A product takes a second, a collective as long as it is told, all else nothing."""

    gather_s: float = 1.0

    def matmul(self, products, size_bytes):
        return Kernel(1.0, is_memory_bound=False)

    def memory_s(self, size_bytes):
        return 0.0

    def collective_s(self, kind, size_bytes, group_size, ranks_per_node):
        return self.gather_s


def unrolled_loss(params, x):
    for index in range(3):
        x = jax.checkpoint(layer)(x, params[f"layer{index}"])
    return jnp.mean(x**2)


UNROLLED = {f"layer{index}": {name: shape[1:] for name, shape in stack_shapes().items()} for index in range(3)}


HEADED = {"stack": stack_shapes(), "head": (WIDTH, WIDTH)}


def accumulating(loss: Callable, params: Any, optimizer: optax.GradientTransformation = SGD):
    """The fully sharded step over microbatches, and its mesh."""
    return sharded(loss, params, (BATCH * MICROBATCHES, WIDTH), optimizer=optimizer, microbatches=MICROBATCHES)


def in_pipelines(program: Program, plan: Plan = START) -> Plan:
    """``plan`` with all layer loops of ``program`` pipelined, a layer each way."""
    return pipelined(plan, program, choose_schedules(program))


def candidate(
    program: Program, plan: Plan = START, prediction: Prediction = WAITS, simulation: Any = None, module: Any = None
) -> Candidate:
    """``plan`` as if it had been compiled and simulated to these figures."""
    nothing: Any = None
    played = simulation or SimpleNamespace(totals=Totals(), loops=())
    return Candidate(plan, program, Evaluation(nothing, module, played, prediction, 10))


def situation(loss: Callable, params: Any, costs: CostModel, limit: int | None = 1 << 30, plan: Plan = START):
    """The fully sharded step, a candidate in which all communication is waited for, and what it is for."""
    program, mesh = sharded(loss, params)
    return program, candidate(program, plan), Environment(mesh, "cuda", costs, limit)


def eight_layers(rows: int):
    """Eight layers of 50 MB, four microbatches, on 32 H100s: the sharded step, and shapes of its state and its batch.

    Args:
      rows: of a microbatch, on each GPU.
    """
    width, layers = 2048, 8
    shape = {"up": (width, 4 * width), "down": (4 * width, width), "bias": (4 * width,)}
    params = shapes({f"layer{index}": shape for index in range(layers)})

    def loss(params, x):
        for index in range(layers):
            x = jax.checkpoint(layer)(x, params[f"layer{index}"])
        return jnp.mean(x**2)

    mesh, optimizer = deepcompile.targets.h100(nodes=4).make_mesh((32,), ("fsdp",)), SGD
    step = deepcompile.shard(training_step(loss, optimizer), mesh, microbatches=4, memory_limit="40GiB")
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    return step, state, shapes((4 * 32 * rows, width))


@dataclass(frozen=True)
class Proposes:
    """Proposes the same plans whenever it is asked."""

    plans: tuple[Plan, ...]
    name: str = "fake"
    stage: Stage = Stage.MAIN

    def propose(self, base, best, environment):
        return [Proposal(plan, "try it") for plan in self.plans]


def evaluate_as(monkeypatch, made_up):
    for module in (search_module, schedule_module):
        monkeypatch.setattr(module, "evaluate", made_up)


def accepted(plan: Plan) -> list[str]:
    """The strategies that led to ``plan``, each of which began where the last one had ended."""
    chain = [record for record in plan.records if record.accepted]
    assert [record.after for record in chain[:-1]] == [record.before for record in chain[1:]]
    assert not chain or chain[-1].after == plan.prediction
    return [record.strategy for record in chain]
