"""The steps of published runs, rebuilt from ``models/`` and compiled for the clusters that they ran on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jax_deepcompile as deepcompile
from experiments.bench.steps import constrained, create_state, linen_gradients, training_step
from experiments.bench.systems import CUBLAS_GEMMS, NVIDIA_FLAGS, PREFETCH, tokens_of
from experiments.validation.runs import PublishedRun
from models import gpt2, llama


def saves_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """TransformerEngine's policies keep all that its attention's backward pass needs."""
    return primitive.name.startswith("dot_product_attention_fwd")


_DOTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims, saves_attention
)
"""MaxText's ``minimal_flash``."""

_ALL_BUT_MLP = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names("query", "key", "value", "out"), saves_attention
)
"""MaxText's ``save_dot_with_context_except_mlp``."""

_LLAMA2_7B = dataclasses.replace(llama.LLAMA2_7B, attention="cudnn", remat_policy=None)
_UNROLLED = dataclasses.replace(_LLAMA2_7B, scan_layers=False, remat_policy=_DOTS)
_EVERY_LAYER = jax.checkpoint_policies.nothing_saveable

MODELS: Mapping[str, Callable[[], Any]] = {
    "llama2_7b": lambda: llama.Llama(_LLAMA2_7B),
    "llama2_7b_dots": lambda: llama.Llama(_UNROLLED),
    "llama2_7b_dots_tf32": lambda: llama.Llama(dataclasses.replace(_UNROLLED, logits_dtype=jnp.float32)),
    "llama3_70b_context": lambda: llama.Llama(
        dataclasses.replace(llama.LLAMA3_70B, attention="cudnn", remat_policy=_ALL_BUT_MLP)
    ),
    "mpt_7b": lambda: gpt2.GPT2(gpt2.MPT_7B),
    "mpt_13b": lambda: gpt2.GPT2(gpt2.MPT_13B),
    "mpt_30b": lambda: gpt2.GPT2(dataclasses.replace(gpt2.MPT_30B, remat_policy=_EVERY_LAYER)),
    "mpt_70b": lambda: gpt2.GPT2(dataclasses.replace(gpt2.MPT_70B, remat_policy=_EVERY_LAYER)),
}
"""By name, what a run trains."""


def mesh_of(run: PublishedRun) -> Mesh:
    """Replicas by shards."""
    return run.cluster.make_mesh({"data": run.replicas, "fsdp": run.cluster.gpus // run.replicas})


def compiled(run: PublishedRun, mesh: Mesh) -> Any:
    """The executable of a run's step."""
    model = MODELS[run.model]()
    state = jax.eval_shape(partial(create_state, model), jax.random.key(0))
    tokens = tokens_of(run, mesh)
    step = training_step(linen_gradients())
    if run.how == "jit":
        lowered = deepcompile.shard(constrained(step, mesh), mesh, passes=()).lower_gspmd(state, tokens)
        return lowered.compile(compiler_options={**CUBLAS_GEMMS, **NVIDIA_FLAGS})
    sharded = deepcompile.shard(
        step, mesh, microbatches=run.microbatches, passes=PREFETCH.passes, memory_limit=_NO_LIMIT
    )
    return sharded.lower(state, tokens).compile()


_NO_LIMIT = "1000GiB"
"""A run that does not fit in this package's program is simulated, and its row says so."""
