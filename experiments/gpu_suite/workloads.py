"""The train steps that are measured, by name: in bfloat16 with float32 parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax.numpy as jnp

from experiments.gpu_suite.sizes import LLAMA_SMALLEST
from experiments.trainings import (
    Training,
    gpt2_training,
    llama_training,
    mixtral_training,
    resnet_training,
    vit_training,
)
from models import gpt2, llama, mixtral, resnet, vit

LLAMA_1B = dataclasses.replace(llama.LLAMA3_8B, d_model=2048, n_layers=16, n_heads=32, d_ff=8192)
"""Llama 3.2 1B, but with an output layer of its own: 1.5 billion parameters."""

GPT2_SMALL = dataclasses.replace(gpt2.GPT2_SMALL, dtype=jnp.bfloat16)
GPT2_MEDIUM = dataclasses.replace(GPT2_SMALL, d_model=1024, n_layers=24, n_heads=16)

MIXTRAL_SMALL = dataclasses.replace(
    mixtral.MIXTRAL_8X7B, d_model=1024, n_layers=4, n_heads=16, d_ff=3584, capacity_factor=1.25
)
VIT_B16 = dataclasses.replace(vit.VIT_B16, dtype=jnp.bfloat16)
RESNET50 = dataclasses.replace(resnet.RESNET50, dtype=jnp.bfloat16)

WORKLOADS: Mapping[str, Callable[[], Training]] = {
    "llama_1b_cudnn": lambda: llama_training(dataclasses.replace(LLAMA_1B, attention="cudnn"), 2048, 4),
    "llama_1b": lambda: llama_training(LLAMA_1B, 2048, 4),
    "gpt2_small": lambda: gpt2_training(GPT2_SMALL, GPT2_SMALL.max_length, 8),
    "gpt2_medium": lambda: gpt2_training(GPT2_MEDIUM, GPT2_MEDIUM.max_length, 4),
    "vit_b16": lambda: vit_training(VIT_B16, 128),
    "resnet50": lambda: resnet_training(RESNET50, 224, 128),
    "mixtral_small": lambda: mixtral_training(MIXTRAL_SMALL, 1024, 4),
    "llama_smallest": lambda: llama_training(LLAMA_SMALLEST, 16, 4),
    "gpt2_tiny": lambda: gpt2_training(gpt2.GPT2_TINY, gpt2.GPT2_TINY.max_length, 4),
    "vit_tiny": lambda: vit_training(vit.VIT_TINY, 4),
    "resnet_tiny": lambda: resnet_training(resnet.RESNET_TINY, 32, 4),
    "mixtral_tiny": lambda: mixtral_training(mixtral.MIXTRAL_TINY, 16, 4),
}
