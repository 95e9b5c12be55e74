"""Fingerprints: equal in any process, different wherever a profile must not be used again."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from jax_deepcompile.costs.entries import Axis, Machine
from jax_deepcompile.costs.fingerprint import deciding_flags, fingerprint, program_text
from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.ir.program import Port, Program, Role

pytestmark = pytest.mark.pure

MACHINE = Machine("cpu", (Axis("fsdp", 8),), (("jax", "0.10.2"), ("jaxlib", "0.10.2")))
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")


def program(scale: float = 2.0) -> Program:
    """With what prints addresses and sets: a callback, a custom derivative, a region manual over several axes."""

    @jax.custom_jvp
    def scaled(x):
        return x * scale

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), scaled(*tangents)))

    def fun(x):
        mesh = jax.sharding.AbstractMesh((1,) * len(NAMES), NAMES)
        everywhere = jax.shard_map(scaled, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), axis_names=set(NAMES[:4]))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda value: value, shape, everywhere(x))

    port = Port("x", Role.OTHER, (8,), "float32")
    axes = MeshAxes(("fsdp",), (8,))
    return Program("fun", jax.make_jaxpr(fun)(jnp.ones(8)), (port,), (port,), jax.tree.structure(0), (), axes)


def digest(program_: Program, machine: Machine = MACHINE, **options) -> str:
    return fingerprint(program_text(program_), machine, **options)


@pytest.mark.parametrize("terminal", [False, True])
def test_two_processes_agree(terminal: bool):
    """In whatever order they have sets, and whether they print to a file or to a terminal, where JAX prints colors."""
    assert "gamma" in program_text(program())
    script = "from tests.costs.test_fingerprint import digest, program; print('DIGEST', digest(program()))"
    environment = os.environ | {"PYTHONHASHSEED": "2" if terminal else "1", "JAX_PLATFORMS": "cpu"}
    shown, written = os.openpty()
    with os.fdopen(shown, "rb", 0) as screen:
        command, out = [sys.executable, "-c", script], written if terminal else subprocess.PIPE
        done = subprocess.run(command, env=environment, stdout=out, stderr=subprocess.PIPE, check=False)
        printed = screen.read(1 << 12) if terminal and not done.returncode else done.stdout
        os.close(written)
    assert done.returncode == 0, done.stderr
    assert [line for line in printed.decode().splitlines() if "DIGEST" in line] == [f"DIGEST {digest(program())}"]


def test_colors_do_not_count_wherever_jaxprs_stand(monkeypatch):
    """A Pallas kernel's grid has jaxprs that its equation prints as it prints numbers."""

    def doubled(x):
        def kernel(read, written):
            written[...] = 2 * read[...]

        block = pl.BlockSpec((8,), lambda i: (i,))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, shape, grid=(2,), in_specs=[block], out_specs=block, interpret=True)(x)

    printed = program().replace(jaxpr=jax.make_jaxpr(doubled)(jnp.ones(16)))
    plain = program_text(printed)
    monkeypatch.setattr("jax._src.pretty_printer.CAN_USE_COLOR", True)
    assert "\x1b[" in str(printed)
    assert program_text(printed) == plain


@pytest.mark.parametrize(
    ("flags", "kind", "deciding"),
    [
        ("", "cpu", []),
        ("--xla_force_host_platform_device_count=8", "NVIDIA H100", []),
        ("--xla_force_host_platform_device_count=8 --xla_dump_to=/tmp/dump --xla_dump_hlo_as_text", "cpu", []),
        ("--xla_cpu_enable_fast_math=true", "NVIDIA H100", []),
        ("--xla_cpu_enable_fast_math=true", "cpu", [("--xla_cpu_enable_fast_math", "true")]),
        ("--xla_gpu_enable_triton_gemm=false", "cpu", []),
        ("--xla_gpu_enable_triton_gemm=false", "NVIDIA H100", [("--xla_gpu_enable_triton_gemm", "false")]),
        ("--xla_gpu_cuda_data_dir=/usr/local/cuda", "NVIDIA H100", []),
        ("--xla_b  --xla_a=1\t--xla_a=2", "cpu", [("--xla_a", "2"), ("--xla_b", "true")]),
    ],
)
def test_flags_count_where_they_decide_what_is_compiled(monkeypatch, flags, kind, deciding):
    assert deciding_flags(flags, kind) == deciding
    machine = replace(MACHINE, device_kind=kind)
    monkeypatch.setenv("XLA_FLAGS", "")
    bare = digest(program(), machine)
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert (digest(program(), machine) == bare) == (not deciding)


def test_options_that_print_addresses_are_the_same_in_every_process():
    class Own:
        pass

    assert digest(program(), options={"passes": (Own(),)}) == digest(program(), options={"passes": (Own(),)})
    assert digest(program(), options={"passes": (Own(),)}) != digest(program(), options={"passes": (MACHINE,)})


def test_tracing_again_changes_nothing():
    assert digest(program()) == digest(program())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_are_those_of_their_type(dtype: str):
    """JAX keeps Python's number in a literal, or one rounded to the array's type, as the caches have it."""

    def text(number) -> str:
        jaxpr = jax.make_jaxpr(lambda x: x * number)(jnp.ones(8, dtype))
        return program_text(program().replace(jaxpr=jaxpr))

    rounded = jnp.dtype(dtype).type(0.9)
    assert text(0.9) == text(rounded)
    assert text(0.9) != text(0.91)


@pytest.mark.parametrize(
    "other",
    [
        digest(program(scale=3.0)),
        digest(program().replace(inputs=(replace(program().inputs[0], memory_kind="pinned_host"),))),
        digest(program(), replace(MACHINE, device_kind="gpu")),
        digest(program(), replace(MACHINE, axes=(Axis("fsdp", 4),))),
        digest(program(), replace(MACHINE, axes=(Axis("fsdp", 8, hosts=2),))),
        digest(program(), replace(MACHINE, versions=(("jax", "0.11.2"), ("jaxlib", "0.10.2")))),
        digest(program(), options={"xla_gpu_enable_while_loop_double_buffering": True}),
    ],
    ids=["program", "memory kind", "device kind", "axis size", "hosts", "version", "compiler options"],
)
def test_another_program_machine_or_option(other: str):
    assert other != digest(program())
