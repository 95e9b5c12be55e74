"""XLA options by target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_deepcompile import targets
from jax_deepcompile.lowering.compile import compile_options

KERNELS = "xla_gpu_kernel_cache_file"


@pytest.mark.pure
def test_other_platforms_have_no_options():
    assert compile_options("cpu") == {}


@pytest.mark.pure
def test_kernels_are_kept_for_known_devices_only():
    assert KERNELS not in compile_options("cuda")


@pytest.mark.h100_aot
def test_each_kind_of_gpu_has_kernels_of_its_own():
    meshes = [target.make_mesh((8,), ("fsdp",)) for target in (targets.h100(), targets.h200())]
    files = {compile_options("cuda", mesh)[KERNELS] for mesh in meshes}
    assert len(files) == 2


@pytest.mark.h100_aot
def test_kept_kernels_leave_the_compiled_program_as_it_is():
    mesh = targets.h100().make_mesh((8,), ("fsdp",))
    x = jax.ShapeDtypeStruct((8, 128, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    step = jax.jit(lambda x: jax.nn.softmax(jnp.sort(x, 1) @ x) - x.sum(1, keepdims=True))
    lowered = step.trace(x).lower(lowering_platforms=("cuda",))
    options: dict[str, Any] = compile_options("cuda", mesh)
    bare = {name: value for name, value in options.items() if name != KERNELS}
    # An option that changes nothing, or JAX would not compile a second time.
    another = options | {"xla_gpu_memory_limit_slop_factor": 96}
    texts = {lowered.compile(compiler_options=each).as_text() for each in (bare, options, another)}
    assert len(texts) == 1
    assert Path(str(options[KERNELS])).exists()
