"""Llama-3-70B and Mixtral-8x7B on H100s that are not here: ``python -m experiments.h100_simulated``.

A whole train step (forward, backward, global-norm clipping, AdamW, float32 master weights) is compiled by XLA:GPU for
``--nodes`` machines of 8 H100s and simulated from its scheduled HLO, for each of:

* ``jit``: ``jax.jit`` with FSDP NamedShardings, XLA's default options;
* ``jit + flags``: the same with the options that NVIDIA recommends for JAX;
* ``jit, bf16 gathers``: the same with parameters cast to bfloat16 by hand before the loss, and those options;
* ``fully sharded``: ``deepcompile.shard(passes=())``;
* ``planned``: ``deepcompile.shard``.

Prints a Markdown table, and writes JSON with ``--out``. Nothing is run: these are simulations, by the constants in
``jax_deepcompile/costs/hardware.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax

import jax_deepcompile as deepcompile
from models import llama, mixtral

ONE_DEVICE_GEMMS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
"""Without a GPU nothing can be autotuned; these make dots cuBLAS calls, as tuning does."""

NVIDIA_FLAGS: dict[str, Any] = {
    "xla_gpu_all_gather_combine_threshold_bytes": 1 << 30,
    "xla_gpu_all_reduce_combine_threshold_bytes": 1 << 30,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 128 << 20,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
}
"""The options NVIDIA recommends for JAX on GPUs (JAX-Toolbox, GPU performance)."""

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Workload:
    """What one row of the table trains.

    Attributes:
      model: ``llama3_70b`` or ``mixtral_8x7b``.
      sequence: tokens an example.
      batch: examples a GPU and microbatch.
      microbatches: over which gradients are accumulated.
    """

    model: str
    sequence: int
    batch: int = 1
    microbatches: int = 1


WORKLOADS = (
    Workload("llama3_70b", 512),
    Workload("llama3_70b", 1024),
    Workload("llama3_70b", 2048),
    Workload("llama3_70b", 1024, batch=4),
    Workload("llama3_70b", 1024, microbatches=16),
    Workload("mixtral_8x7b", 2048),
    Workload("mixtral_8x7b", 1024, microbatches=16),
)


def llama_pieces(by_hand: bool) -> tuple[Callable, Any]:
    """``(gradients of (state, tokens), abstract state)`` of Llama-3-70B."""
    model = llama.Llama(llama.LLAMA3_70B)

    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, 16), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=OPTIMIZER)

    def gradients(state: TrainState, tokens: jax.Array):
        def loss_of(params):
            params = _as_bfloat16(params) if by_hand else params
            return llama.next_token_loss(state.apply_fn({"params": params}, tokens[:, :-1]), tokens[:, 1:])

        return jax.value_and_grad(loss_of)(state.params)

    return gradients, jax.eval_shape(create, jax.random.key(0))


def mixtral_pieces(by_hand: bool) -> tuple[Callable, Any]:
    """``(gradients of (state, tokens), abstract state)`` of Mixtral-8x7B, its experts with room for 1.25 even shares.

    The form that drops nothing, ``ragged_dot``, computes every slot with every expert on XLA:GPU.
    """
    config = dataclasses.replace(mixtral.MIXTRAL_8X7B, capacity_factor=1.25)
    abstract = nnx.eval_shape(lambda: mixtral.Mixtral(config, rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(abstract, nnx.Param, ...)

    def gradients(state: TrainState, tokens: jax.Array):
        def loss_of(params):
            params = _as_bfloat16(params) if by_hand else params
            logits, balance = nnx.merge(graph, params, rest)(tokens[:, :-1])
            return mixtral.next_token_loss(logits, tokens[:, 1:]) + 0.02 * balance

        return jax.value_and_grad(loss_of)(state.params)

    def create(params):
        return TrainState.create(apply_fn=None, params=params, tx=OPTIMIZER)

    return gradients, jax.eval_shape(create, params)


PIECES = {"llama3_70b": llama_pieces, "mixtral_8x7b": mixtral_pieces}


def _as_bfloat16(params: Any) -> Any:
    """The barrier keeps XLA from gathering first and converting then."""
    return lax.optimization_barrier(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))


def accumulated(gradients: Callable, microbatches: int, devices: int) -> Callable:
    """Gradients summed over microbatches in a loop, as users write it: every device keeps its own examples."""
    if microbatches == 1:
        return gradients

    def summed(state: TrainState, tokens: jax.Array):
        parts = tokens.reshape(devices, microbatches, -1, tokens.shape[-1]).swapaxes(0, 1)

        def add(total, part):
            made = gradients(state, part.reshape(-1, tokens.shape[-1]))
            return jax.tree.map(jnp.add, total, made), None

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state.params)
        total, _ = lax.scan(add, (jnp.float32(0.0), zeros), parts)
        return jax.tree.map(lambda leaf: leaf / microbatches, total)

    return summed


def training_step(gradients: Callable) -> Callable:
    """``(state, tokens) -> (state, loss)``."""

    def step(state: TrainState, tokens: jax.Array):
        loss, grads = gradients(state, tokens)
        return state.apply_gradients(grads=grads), loss

    return step


def judge(compiled: Any, mesh: Any, compile_s: float) -> dict[str, float]:
    """The figures of one compiled step on one GPU."""
    simulation, memory = deepcompile.simulate(compiled, mesh), compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return {
        "step_s": simulation.step_s,
        "compute_s": simulation.compute_s,
        "communication_s": simulation.communication_s,
        "exposed_s": simulation.exposed_communication_s,
        "peak_gib": peak / GIB,
        "compile_s": compile_s,
    }


def measure(workload: Workload, nodes: int, limit: str) -> Iterator[dict[str, Any]]:
    """One result a system."""
    mesh = deepcompile.targets.h100(nodes=nodes).make_mesh((8 * nodes,), ("fsdp",))
    count = workload.microbatches
    tokens = jax.ShapeDtypeStruct((mesh.size * workload.batch * count, workload.sequence + 1), jnp.int32)
    for name, by_hand, flags in (
        ("jit", False, {}),
        ("jit + flags", False, NVIDIA_FLAGS),
        ("jit, bf16 gathers", True, NVIDIA_FLAGS),
    ):
        gradients, state = PIECES[workload.model](by_hand)
        step = deepcompile.shard(training_step(accumulated(gradients, count, mesh.size)), mesh, passes=())
        lowered = step.lower_gspmd(state, tokens)
        began = time.perf_counter()
        compiled = lowered.compile(compiler_options=ONE_DEVICE_GEMMS | flags)
        yield {"system": name} | judge(compiled, mesh, time.perf_counter() - began)
    gradients, state = PIECES[workload.model](False)
    for name, passes in (("fully sharded", ()), ("planned", None)):
        step = deepcompile.shard(training_step(gradients), mesh, microbatches=count, memory_limit=limit, passes=passes)
        began = time.perf_counter()
        plan = step.plan(state, tokens)
        planned_s = time.perf_counter() - began
        lowered = step.lower(state, tokens)
        began = time.perf_counter()
        compiled = lowered.compile()
        compile_s = time.perf_counter() - began
        yield {"system": name} | judge(compiled, mesh, compile_s) | {"plan_s": planned_s, "plan": str(plan)}


def table(rows: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    head = (
        "| model | seq | batch | acc. | system | step s | x jit | exposed s | bound s | peak GiB | compile s | plan s |"
    )
    lines = [head, "|" + "---|" * 12]
    for row in rows:
        load, bound = row["workload"], max(row["compute_s"], row["communication_s"])
        lines.append(
            f"| {load['model']} | {load['sequence']} | {load['batch']} | {load['microbatches']} | {row['system']} "
            f"| {row['step_s']:.3f} | {row['speedup']:.2f} | {row['exposed_s']:.3f} | {bound:.3f} "
            f"| {row['peak_gib']:.1f} | {row['compile_s']:.0f} | {row.get('plan_s', 0.0):.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4, help="machines of 8 GPUs")
    parser.add_argument("--memory-limit", default="72GiB", help="a GPU's, for the planned step")
    parser.add_argument("--rows", type=int, nargs="*", help="rows of the table to make, from 0; all by default")
    parser.add_argument("--out", type=Path, help="file for the results as JSON; a table is written beside it")
    arguments = parser.parse_args()
    chosen = range(len(WORKLOADS)) if arguments.rows is None else arguments.rows
    rows: list[dict[str, Any]] = []
    for index in chosen:
        workload = WORKLOADS[index]
        results = list(measure(workload, arguments.nodes, arguments.memory_limit))
        for result in results:
            rows.append(
                {"workload": dataclasses.asdict(workload), "speedup": results[0]["step_s"] / result["step_s"]} | result
            )
        print(table(rows[-len(results) :]), flush=True)
        if arguments.out is not None:
            arguments.out.write_text(
                json.dumps({"nodes": arguments.nodes, "jax": jax.__version__, "rows": rows}, indent=1)
            )
            arguments.out.with_suffix(".md").write_text(table(rows) + "\n")


if __name__ == "__main__":
    main()
