"""XLA options by target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_deepcompile import targets
from jax_deepcompile.lowering.compile import compile_options, kernel_options


@pytest.mark.pure
def test_other_platforms_have_no_options():
    assert compile_options("cpu") == {}
    assert kernel_options("cpu", Path("kernels")) == {}


@pytest.mark.pure
def test_kernels_are_kept_where_there_is_a_file_for_them():
    assert kernel_options("cuda", None) == {}
    assert list(kernel_options("cuda", Path("kernels")).values()) == ["kernels"]


@pytest.mark.pure
def test_the_users_own_cache_is_left_alone(tmp_path):
    """What it finds programs by would name another file in every run."""
    config: Any = jax.config
    before = config.jax_compilation_cache_dir
    config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        assert kernel_options("cuda", Path("kernels")) == {}
    finally:
        config.update("jax_compilation_cache_dir", before)


@pytest.mark.h100_aot
def test_kept_kernels_leave_the_scheduled_program_as_it_is(tmp_path):
    mesh, kernels = targets.h100().make_mesh((8,), ("fsdp",)), tmp_path / "kernels"
    x = jax.ShapeDtypeStruct((8, 128, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    step = jax.jit(lambda x: jax.nn.softmax(jnp.sort(x, 1) @ x) - x.sum(1, keepdims=True))
    lowered = step.trace(x).lower(lowering_platforms=("cuda",))
    bare: dict[str, Any] = compile_options("cuda")
    keeping = bare | kernel_options("cuda", kernels)
    # An option that changes nothing, or JAX would not compile a second time.
    another = keeping | {"xla_gpu_memory_limit_slop_factor": 96}
    texts = {lowered.compile(compiler_options=each).as_text() for each in (bare, keeping, another)}
    assert len(texts) == 1
    assert kernels.exists()
