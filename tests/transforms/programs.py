"""Fully sharded programs to rewrite, and running one on given values."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.ir.paths import parts_of
from jax_deepcompile.ir.program import Port, Program
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.lowering.compile import compile_options, double_buffering
from jax_deepcompile.lowering.emit import emit, lower, sharding_of
from jax_deepcompile.transforms.keep_gathered import KeptGathers, hoistable_names
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from tests.partition.steps import lines, shapes, training_step

LAYERS, WIDTH, BATCH = 5, 16, 16


def layer(x, params):
    h = jnp.tanh(x @ params["up"] + params["bias"])
    return x + h @ params["down"]


def stack_shapes(layers: int = LAYERS) -> dict:
    return {"up": (layers, WIDTH, 2 * WIDTH), "down": (layers, 2 * WIDTH, WIDTH), "bias": (layers, 2 * WIDTH)}


def run_stack(stack, x, remat: bool = True, reverse: bool = False):
    body = jax.checkpoint(layer) if remat else layer
    return lax.scan(lambda x, params: (body(x, params), None), x, stack, reverse=reverse)[0]


def stack_loss(params, batch):
    return jnp.mean(run_stack(params["stack"], batch) ** 2)


STACK = {"stack": stack_shapes()}
HEADED = STACK | {"head": (WIDTH, 8 * WIDTH)}
FOOTED = STACK | {"foot": (WIDTH, WIDTH)}
GROUPS = {"groups": {name: (2, *shape) for name, shape in stack_shapes(3).items()}}


def plain_loss(params, batch):
    """Without rematerialisation: forward hands over more than each layer's input."""
    return jnp.mean(run_stack(params["stack"], batch, remat=False) ** 2)


def backwards_loss(params, batch):
    return jnp.mean(run_stack(params["stack"], batch, reverse=True) ** 2)


def two_stacks_loss(params, batch):
    return jnp.mean(run_stack(params["b"], run_stack(params["a"], batch)) ** 2)


def halves_loss(params, batch):
    """The same layers for two halves of the batch, as microbatches run them."""

    def again(total, part):
        return total + jnp.mean(run_stack(params["stack"], part) ** 2), None

    return lax.scan(again, 0.0, jnp.stack([batch, 2 * batch]))[0]


def headed_loss(params, batch):
    """Layers under a head, which is gathered after them, and whose gradient is ready before their backward pass."""
    return jnp.mean((run_stack(params["stack"], batch) @ params["head"]) ** 2)


def footed_loss(params, batch):
    """Layers on a foot, which is gathered before them (and again after them, which XLA sees is not needed), and whose
    gradient is ready only after their backward pass."""
    return jnp.mean(run_stack(params["stack"], batch @ params["foot"]) ** 2)


def groups_loss(params, batch):
    """A loop of checkpointed layers in a checkpointed loop over groups of them."""

    @jax.checkpoint
    def group(x, stack):
        return run_stack(stack, x), None

    return jnp.mean(lax.scan(group, batch, params["groups"])[0] ** 2)


def two_products_loss(params, batch):
    """Checkpointed layers of two products each, with nothing beside them."""

    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"]), None

    return jnp.mean(lax.scan(jax.checkpoint(layer), batch, params)[0] ** 2)


MATRICES = {"w": (4, WIDTH, WIDTH)}
UNDER_A_HEAD = MATRICES | {"head": (WIDTH, 3 * WIDTH)}


def run_matrices(stack, x):
    """Checkpointed layers of one matrix each: what becomes of them is short enough to compare as text."""
    return lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, stack)[0]


def matrices_loss(params, batch):
    return jnp.mean(run_matrices(params["w"], batch) ** 2)


def matrices_under_a_head_loss(params, batch):
    return jnp.mean((run_matrices(params["w"], batch) @ params["head"]) ** 2)


def in_two_iterations(loss: Callable) -> Callable:
    """Forward and backward of ``loss`` in each of two iterations, as microbatches have them; then ``stack_loss``."""

    def whole(params, batch):
        def one(total, part):
            value, grads = jax.value_and_grad(loss)(params, part)
            return total + value + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)), None

        return lax.stop_gradient(lax.scan(one, 0.0, jnp.stack([batch, 2 * batch]))[0]) + stack_loss(params, batch)

    return whole


def gated_loss(params, x):
    """Checkpointed gated layers in bfloat16, whose two large products are worth keeping."""

    def layer(x, w):
        w = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
        norm = lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)
        h = x * norm.astype(x.dtype) * w["norm"]
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    return jnp.mean(lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), params)[0].astype(jnp.float32) ** 2)


def gated_shapes(layers: int, width: int, hidden: int) -> dict:
    sizes = {"norm": (width,), "gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return {name: (layers, *size) for name, size in sizes.items()}


def sharded(
    loss: Callable,
    params,
    batch=(BATCH, WIDTH),
    mesh: Mapping[str, int] | jax.sharding.Mesh | None = None,
    optimizer=None,
    microbatches: int = 1,
):
    """The fully sharded training step of ``loss``: the program and its mesh."""
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)
    params = shapes(params)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    step = deepcompile.shard(training_step(loss, optimizer), mesh or {"fsdp": 8}, microbatches=microbatches)
    return step.trace(state, shapes(batch)).sharded, step.mesh


def h100s():
    return deepcompile.targets.h100().make_mesh((8,), ("fsdp",))


def compiled_for_h100s(program: Program, mesh, **options) -> jax.stages.Compiled:
    options = compile_options("cuda") | double_buffering() | options
    return lower(program, mesh, "cuda").compile(compiler_options=options)


def idle_loop_loss(params, batch):
    """A loop that does not communicate, between two layers that do."""
    y = jnp.tanh(batch @ params["w"])
    return jnp.mean(lax.scan(lambda x, _: (jnp.sin(x), None), y, None, length=3)[0] @ params["head"])


IDLE = {"w": (WIDTH, WIDTH), "head": (WIDTH, WIDTH)}


def outer_loops(program: Program) -> list[Loop]:
    return [loop for loop in find_loops(program) if len(loop.path) == 1]


def barriers(jaxpr) -> int:
    return sum(eqn.primitive.name == "optimization_barrier" for eqn in open_jaxpr(jaxpr).eqns)


def inner_loops(program: Program) -> list[Loop]:
    return [loop for loop in find_loops(program) if len(loop.path) > 1]


def loop_names(program: Program, loops: Callable[[Program], Iterable[Loop]] = find_loops) -> list[str]:
    return [loop.name for loop in loops(program)]


def keeping_gathered(program: Program, mesh) -> Program:
    """``program`` with all that its outer loops gather alike in every iteration gathered once."""
    kept = [KeptGathers(loop.name, tuple(hoistable_names(program, loop))) for loop in outer_loops(program)]
    return KeptGathers.apply(program, mesh, kept)


def run(program: Program, mesh, seed: int = 0) -> list[np.ndarray]:
    """Every output of ``program`` for random inputs, each equation computed and rounded by itself."""
    random = np.random.default_rng(seed)
    inputs = [jax.device_put(_value(port, random), sharding_of(port, program, mesh)) for port in program.inputs]
    options = {
        "xla_disable_hlo_passes": "fusion,cpu-instruction-fusion,dot-library-rewriter",
        "xla_allow_excess_precision": False,
    }
    if "xla_cpu_use_fusion_emitters" in os.environ["XLA_FLAGS"]:
        options["xla_cpu_use_fusion_emitters"] = True  # where nothing is fused the others are wrong
    unfused = jax.jit(emit(program, mesh), compiler_options=options)
    return [np.asarray(value) for value in unfused(*inputs)]


def _value(port: Port, random: np.random.Generator) -> np.ndarray:
    value = 0.3 * random.normal(size=port.shape)
    return (np.abs(value) if "nu" in parts_of(port.path) else value).astype(port.dtype)  # of a second moment


def count(program: Program, primitive: str, executed: bool = True) -> int:
    """How often a step runs ``primitive``; or, if not ``executed``, how many equations of it there are."""

    def of(jaxpr) -> int:
        total = 0
        for eqn in jaxpr.eqns:
            total += eqn.primitive.name == primitive
            for name in ("jaxpr", "body_jaxpr"):
                if name in eqn.params:
                    trips = eqn.params.get("length", 1) if executed else 1
                    total += trips * of(eqn.params[name].jaxpr)
        return total

    return of(program.jaxpr.jaxpr if hasattr(program.jaxpr, "jaxpr") else program.jaxpr)


def outline(program: Program, *others: str) -> list[str]:
    """The names of a program's collectives, products and ``others``, indented as the loops are that they run in."""
    found = lines(program, ("all_gather", "reduce_scatter", "dot_general", *others))
    return [re.sub(r"^( *(?:scan \d+|\S+)).*", r"\1", line) for line in found]


def deeper_schedules(program: Program, ahead: int, behind: int) -> tuple[LoopSchedule, ...]:
    """Those of ``program`` with so many layers in the place of one."""
    deeper = (
        dataclasses.replace(
            each,
            prefetch_layers=ahead * each.prefetch_layers,
            delay_layers=behind * each.delay_layers,
            first_layers=behind * each.first_layers,
            last_layers=ahead * each.last_layers,
        )
        for each in choose_schedules(program)
    )
    return tuple(each for each in deeper if each.prefetch_layers or each.delay_layers)


def assert_same_work(planned: Program, program: Program, mesh) -> None:
    """That ``planned`` is valid, communicates as often as ``program``, and computes the same bits."""
    for primitive in ("all_gather", "reduce_scatter", "psum"):
        assert count(planned, primitive) == count(program, primitive)
    assert_same_values(planned, program, mesh)


def assert_same_values(planned: Program, program: Program, mesh) -> None:
    """That ``planned`` is valid, and computes the same bits but for what a product of another layout rounds otherwise.

    Which products those are, if any, depends on the CPU: every value may differ by 16 roundings of the largest.
    """
    verify(planned)
    for got, expected in zip(run(planned, mesh), run(program, mesh), strict=True):
        assert got.dtype == expected.dtype
        if jnp.issubdtype(got.dtype, jnp.inexact):
            allowed = 16 * jnp.finfo(got.dtype).eps * float(np.abs(expected).max(initial=0))
            np.testing.assert_allclose(got, expected, rtol=0, atol=float(allowed))
        else:
            np.testing.assert_array_equal(got, expected)


OPERATIONS: dict[str, Callable] = {
    "up": lambda x, p: jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"],
    "relu": lambda x, p: jax.nn.relu(x @ p["up"]) @ p["down"] + x,
    "softmax": lambda x, p: jax.nn.softmax((x @ p["up"]).reshape(-1, 4, 8), axis=-1).reshape(-1, 32) @ p["down"],
    "norm": lambda x, p: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3),
    "top": lambda x, p: x + lax.top_k(x @ p["up"], 16)[0],
    "named": lambda x, p: checkpoint_name(jnp.sin(x @ p["up"]), "sin") @ p["down"],
    "bf16": lambda x, p: (x.astype(jnp.bfloat16) @ p["up"].astype(jnp.bfloat16)).astype(jnp.float32) @ p["down"],
}
POLICIES = {
    "all": None,
    "products": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("sin"),
}


def layers_loss(operations: Iterable[str], policy: str, reverse: bool) -> Callable:
    """A loss of a scanned stack whose layers do one of ``OPERATIONS`` after the other, under one of ``POLICIES``."""

    @partial(jax.checkpoint, policy=POLICIES[policy])
    def layer(x, params):
        for name in operations:
            x = OPERATIONS[name](x, params)
        return x, None

    return lambda params, batch: jnp.mean(lax.scan(layer, batch, params["stack"], reverse=reverse)[0] ** 2)
