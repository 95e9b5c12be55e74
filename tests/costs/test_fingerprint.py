"""Fingerprints: equal in any process, different wherever a profile must not be used again."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jax_deepcompile.costs.entries import Axis, Machine
from jax_deepcompile.costs.fingerprint import fingerprint, program_text
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


def test_two_processes_agree():
    assert "gamma" in program_text(program())
    script = "from tests.costs.test_fingerprint import digest, program; print('DIGEST', digest(program()))"
    digests = set()
    for seed in ("1", "2", "3"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        digests |= {line for line in done.stdout.splitlines() if line.startswith("DIGEST")}
    assert digests == {f"DIGEST {digest(program())}"}


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
