"""Steps of ``jit`` FSDP and of ``deepcompile.shard``, run in turns: ``deepcompile bench cpu``.

On a mesh of 8 virtual CPU devices, for each workload, a whole train step (forward, backward, global-norm clipping,
AdamW) is compiled as each of:

* ``jit``: ``jax.jit`` with FSDP NamedShardings on state and batch, the same as those of ``deepcompile.shard``;
* ``jit, small leaves whole``: the same, but every device has all of each leaf of up to 4096 elements, as it is often
  written by hand;
* ``fully sharded``: ``deepcompile.shard(passes=())``;
* ``planned``: ``deepcompile.shard``, which on CPU devices joins small collectives, computes small statistics whole, and
  gathers once what a loop over microbatches gathers again and again.

With microbatches, ``jit`` runs the step with a loop of accumulation written by hand. They run one step each, again and
again, in an order that rotates, on states of their own. Reported are medians; the ratio of a system's step to the
``jit`` step of the same round, with the interval that holds the median of 95 % of bootstrap resamples; and the bytes
that one device sends in the collectives of a compiled step, each done as a ring.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_deepcompile as deepcompile
from experiments.small_models import SmallLSTM, SmallMoE, SmallResNet, SmallTransformer
from experiments.trainings import (
    Training,
    gpt2_training,
    image_training,
    llama_training,
    mixer_training,
    mixtral_training,
    mlp_training,
    next_token_training,
    resnet_training,
    vit_training,
)
from models import gpt2, llama, mixtral, resnet, vit

WARM_UP_ROUNDS = 2
ROUNDS = 20
SMALL_WHOLE = "jit, small leaves whole"
SMALL_ELEMENTS = 4096
RESAMPLES = 2000
INTERVAL_PERCENTILES = (2.5, 97.5)

LLAMA = llama.LlamaConfig(
    vocab_size=1024, d_model=256, n_layers=4, n_heads=8, n_kv_heads=4, d_ff=704, dtype=jnp.float32
)
LLAMA_SAVED = dataclasses.replace(LLAMA, remat_policy=None)
LLAMA_HALF = dataclasses.replace(LLAMA, dtype=jnp.bfloat16)
GPT2 = gpt2.GPT2Config(vocab_size=1024, max_length=128, d_model=256, n_layers=4, n_heads=8)
MIXTRAL = mixtral.MixtralConfig(
    vocab_size=1024,
    d_model=128,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    d_ff=256,
    n_experts=4,
    n_active_experts=2,
    dtype=jnp.float32,
)
MIXTRAL_CAPPED = dataclasses.replace(MIXTRAL, capacity_factor=1.25)
VIT = vit.ViTConfig(image_size=64, patch_size=8, n_classes=100, d_model=256, n_layers=4, n_heads=8, d_ff=1024)

PLAIN = functools.partial(SmallTransformer, is_written_out=True)

WORKLOADS: dict[str, Callable[[], Training]] = {
    "MLP": lambda: mlp_training(width=1024, layers=4, examples=2048),
    "MLP, fewer examples than it is wide": lambda: mlp_training(width=1024, layers=4, examples=256),
    "Llama, scanned, remat": lambda: llama_training(LLAMA, 64, 16),
    "Llama, scanned, remat, bfloat16": lambda: llama_training(LLAMA_HALF, 64, 16),
    "Llama, unrolled": lambda: llama_training(dataclasses.replace(LLAMA_SAVED, scan_layers=False), 64, 16),
    "GPT-2": lambda: gpt2_training(GPT2, 64, 16),
    "Mixtral": lambda: mixtral_training(MIXTRAL, 64, 16),
    "Mixtral, capped": lambda: mixtral_training(MIXTRAL_CAPPED, 64, 16),
    "ViT": lambda: vit_training(VIT, 16),
    "ResNet-50": lambda: resnet_training(resnet.RESNET50, 128, 16),
    "ResNet-50, images of 32 pixels": lambda: resnet_training(resnet.RESNET50, 32, 16),
    "small ResNet-20, layer by layer, 64 images": lambda: image_training(SmallResNet(), 10, 32, 64),
    "small ResNet-20, layer by layer, 8 images": lambda: image_training(SmallResNet(), 10, 32, 8),
    "small transformer, layer by layer": lambda: next_token_training(SmallTransformer(256, 64), 256, 64, 16),
    "plain transformer, 128 wide, 16 examples": lambda: next_token_training(PLAIN(256, 64), 256, 64, 16),
    "plain transformer, 128 wide, 32 examples": lambda: next_token_training(PLAIN(256, 64), 256, 64, 32),
    "plain transformer, 256 wide, 16 examples": lambda: next_token_training(PLAIN(512, 64, 256), 512, 64, 16),
    "small LSTM": lambda: next_token_training(SmallLSTM(256), 256, 32, 32),
    "small MoE": lambda: next_token_training(SmallMoE(256), 256, 64, 16),
    "small NNX mixer": lambda: mixer_training(16, 128, 4, 16, 64),
    "Llama, scanned, remat, 4 microbatches": lambda: llama_training(LLAMA, 32, 32, microbatches=4),
    "GPT-2, 4 microbatches": lambda: gpt2_training(GPT2, 32, 32, microbatches=4),
    "Mixtral, capped, 4 microbatches": lambda: mixtral_training(MIXTRAL_CAPPED, 32, 32, microbatches=4),
}


@dataclasses.dataclass(frozen=True)
class System:
    """One way to run a step, compiled.

    Attributes:
      run: ``(state, batch) -> (state, loss)``; donates the state.
      simulation: of its compiled program; only its collectives count here.
      compile_s: for tracing, lowering and compiling.
    """

    run: Callable
    simulation: Any
    compile_s: float

    def sent_bytes(self, *kinds: str) -> int:
        """What one device sends in a step, in collectives of these kinds."""
        return sum(event.trips * event.sent_bytes for event in self.simulation.timeline if event.kind in kinds)

    def collectives(self) -> dict[str, dict[str, int]]:
        """For each kind, how often a step runs it and what one device sends."""
        count: Counter[str] = Counter()
        for event in self.simulation.timeline:
            count[event.kind] += event.trips * bool(event.sent_bytes)
        return {kind: {"count": times, "sent_bytes": self.sent_bytes(kind)} for kind, times in count.items() if times}


@dataclasses.dataclass(frozen=True)
class Figures:
    """One system's step.

    Attributes:
      step_s, ratio_to_jit: medians, of ``all_step_s`` and of their ratios to the ``jit`` step of the same round.
      ratio_low, ratio_high: the interval of that.
      sent_bytes, sent_to_jit: by one device, and their ratio to those of ``jit``.
      collectives: of each kind how many, and what they send.
      compile_s: for tracing, lowering and compiling.
    """

    step_s: float
    ratio_to_jit: float
    ratio_low: float
    ratio_high: float
    sent_bytes: int
    sent_to_jit: float
    collectives: dict[str, dict[str, int]]
    compile_s: float
    last_loss: float
    all_step_s: list[float]


def placed(mesh: Mesh, made: Training) -> tuple[Any, Any]:
    """State and batch as shapes with shardings: the state's are those that ``shard`` chooses."""
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), made.batch)
    state = deepcompile.shard(made.step, mesh, passes=()).init(made.create)
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return state, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows), batch)


def with_small_leaves_whole(state: Any, mesh: Mesh) -> Any:
    """Shapes with shardings, those of small leaves replicated."""
    whole = NamedSharding(mesh, PartitionSpec())

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = whole if leaf.size <= SMALL_ELEMENTS else leaf.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, state)


def systems(made: Training, mesh: Mesh, state: Any, batch: Any) -> dict[str, Callable]:
    """For each system ``(state, batch) -> (state, loss)``, not yet compiled."""
    whole, rows = NamedSharding(mesh, PartitionSpec()), jax.tree.map(lambda leaf: leaf.sharding, batch)
    plain = made.step if made.by_hand is None else made.by_hand(mesh.size)
    sharded = functools.partial(deepcompile.shard, made.step, mesh, microbatches=made.microbatches)

    def jit(state: Any) -> Callable:
        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        return jax.jit(plain, in_shardings=(places, rows), out_shardings=(places, whole), donate_argnums=0)

    return {
        "jit": jit(state),
        SMALL_WHOLE: jit(with_small_leaves_whole(state, mesh)),
        "fully sharded": sharded(passes=()),
        "planned": sharded(),
    }


def compiled_system(run: Any, mesh: Mesh, state: Any, batch: Any) -> System:
    """Compiles a system.

    Raises:
      ValueError: it has collectives in a loop whose length its program does not tell.
    """
    began_s = time.perf_counter()
    compiled = run.lower(state, batch).compile()
    compile_s = time.perf_counter() - began_s
    simulation = deepcompile.simulate(compiled, mesh)
    uncounted = [loop.name for loop in simulation.loops if not loop.is_counted and loop.trip.communication_s]
    if uncounted:
        raise ValueError(f"collectives in loops of unknown length, so that bytes cannot be counted: {uncounted}")
    return System(run, simulation, compile_s)


def step_seconds(
    compiled: dict[str, System], states: dict[str, Any], batch: Any
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of every step after warming up, and the last loss, of each system; they take turns."""
    states = {name: jax.tree.map(jnp.copy, each) for name, each in states.items()}
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    losses: dict[str, float] = {}
    names = list(compiled)
    for number in range(WARM_UP_ROUNDS + ROUNDS):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            began_s = time.perf_counter()
            states[name], loss = jax.block_until_ready(compiled[name].run(states[name], batch))
            if number >= WARM_UP_ROUNDS:
                seconds[name].append(time.perf_counter() - began_s)
            losses[name] = float(loss)
    return seconds, losses


def ratio_interval(seconds: list[float], reference: list[float]) -> tuple[float, float, float]:
    """The median ratio of steps of the same round, and the interval of it over bootstrap resamples of the rounds."""
    ratios = np.array(seconds) / np.array(reference)
    resampled = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(resampled, axis=1), INTERVAL_PERCENTILES)
    return float(np.median(ratios)), float(low), float(high)


def measure(workload: str, mesh: Mesh) -> dict[str, Figures]:
    """Of each system."""
    made = WORKLOADS[workload]()
    state, batch_shapes = placed(mesh, made)
    runs = systems(made, mesh, state, batch_shapes)
    shapes = {name: with_small_leaves_whole(state, mesh) if name == SMALL_WHOLE else state for name in runs}
    compiled = {name: compiled_system(run, mesh, shapes[name], batch_shapes) for name, run in runs.items()}
    batch = jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), made.batch, batch_shapes)
    states = {
        name: jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), state, each)
        for name, each in shapes.items()
    }
    seconds, losses = step_seconds(compiled, states, batch)
    return {
        name: Figures(
            statistics.median(seconds[name]),
            *ratio_interval(seconds[name], seconds["jit"]),
            system.simulation.sent_bytes,
            system.simulation.sent_bytes / compiled["jit"].simulation.sent_bytes,
            system.collectives(),
            system.compile_s,
            losses[name],
            [round(second, 6) for second in seconds[name]],
        )
        for name, system in compiled.items()
    }
