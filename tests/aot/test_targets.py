"""Clusters of GPUs that are not here: their devices, their networks, and what they say when they cannot be had."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_deepcompile as deepcompile
from jax_deepcompile.costs.devices import hardware_of, latency_bytes_of, machine_of, network_of
from jax_deepcompile.costs.hardware import HARDWARE

pytestmark = pytest.mark.h100_aot


def compiled_gather(mesh):
    """A function that gathers its argument over the mesh."""
    shards = NamedSharding(mesh, P(mesh.axis_names))
    gather = jax.jit(lambda x: x * 2, in_shardings=shards, out_shardings=NamedSharding(mesh, P()))
    return gather.lower(jax.ShapeDtypeStruct((1 << 20, 64), jnp.float32)).compile()


@pytest.mark.parametrize("target", ["h100", "h200", "gh200", "b200"])
def test_a_target_has_devices_hardware_and_a_network(target):
    made = getattr(deepcompile.targets, target)(nodes=3, gpus_per_node=4)
    assert len(made.devices) == made.size == 12
    assert [device.process_index for device in made.devices] == [0] * 4 + [1] * 4 + [2] * 4
    assert made.hardware is HARDWARE[target] is hardware_of(made.devices[0].device_kind)
    assert made.network == network_of(made.devices)
    assert (made.network.nics_per_node, made.network.nvlink_bytes_per_s) == (4, made.hardware.nvlink_bytes_per_s)


@pytest.mark.parametrize("target", ["h100", "h200", "gh200", "b200"])
def test_xla_compiles_for_a_target(target):
    made = getattr(deepcompile.targets, target)()
    mesh = made.make_mesh((made.size,), ("fsdp",))
    assert "all-gather" in compiled_gather(mesh).as_text()


def test_a_slower_network_is_the_slower_step():
    fast, slow = (deepcompile.targets.h100(nodes=2, nics_per_node=cards) for cards in (8, 1))
    seconds = []
    for target in (fast, slow):
        mesh = target.make_mesh((16,), ("fsdp",))
        assert network_of(mesh.devices.flat) == target.network
        seconds.append(deepcompile.simulate(compiled_gather(mesh), mesh).communication_s)
    assert seconds[1] == pytest.approx(8 * seconds[0], rel=0.1)


def test_a_collective_begins_after_what_the_network_could_send_meanwhile():
    target = deepcompile.targets.h100(nodes=2)
    found = latency_bytes_of(target.make_mesh((16,), ("fsdp",)))
    assert found == target.network.ring_s(16, 8) * target.network.bus_bytes_per_s(16, 8) > 1 << 20
    assert latency_bytes_of(jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))) == 0
    assert latency_bytes_of(AbstractMesh((8,), ("fsdp",))) == 0


def test_the_network_is_the_meshs_whatever_mesh_the_devices_are_in():
    target = deepcompile.targets.h100(nodes=2, nics_per_node=1, nic_gbps=200.0)
    mesh = target.make_mesh((16,), ("fsdp",))
    again = Mesh(mesh.devices.reshape(2, 8)[::-1], ("data", "fsdp"))
    del mesh
    gc.collect()
    machine = machine_of(again)
    assert network_of(again.devices.flat) == target.network
    assert (machine.device_kind, machine.network) == ("NVIDIA H100 80GB HBM3", "1 x 200 Gbit/s a node")
    assert "; 1 x 200 Gbit/s a node; jax" in str(machine)
    assert machine_of(deepcompile.targets.h100(nodes=2).make_mesh((16,), ("fsdp",))).network == ""


def test_a_mesh_takes_all_gpus():
    with pytest.raises(deepcompile.errors.TargetMeshError, match=r"data=2, fsdp=4 has 8 places for the 16 GPUs"):
        deepcompile.targets.h100(nodes=2).make_mesh((2, 4), ("data", "fsdp"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"nodes": 0}, r"targets.h100\(nodes=0\): expected a whole number, at least 1"),
        ({"gpus_per_node": 2.0}, r"targets.h100\(gpus_per_node=2.0\): expected a whole number"),
        ({"nics_per_node": True}, r"targets.h100\(nics_per_node=True\): expected a whole number"),
        ({"nic_gbps": -1}, r"targets.h100\(nic_gbps=-1\): expected a speed in Gbit/s, more than 0"),
        ({"nic_gbps": "400"}, r"targets.h100\(nic_gbps='400'\): expected a speed in Gbit/s"),
    ],
)
def test_no_cluster_has_such_figures(arguments, sentence):
    with pytest.raises(deepcompile.errors.TargetError, match=sentence):
        deepcompile.targets.h100(**arguments)


def test_a_step_for_them_is_compiled_but_not_called():
    mesh = deepcompile.targets.h200().make_mesh((8,), ("fsdp",))
    step = deepcompile.shard(lambda state, batch: (state + batch.sum(), batch.mean()), mesh)
    assert step.lower(jnp.zeros(8), jnp.ones((8, 2))).compile().memory_analysis() is not None
    with pytest.raises(deepcompile.errors.DevicesNotAttachedError, match="NVIDIA H200 141GB HBM3e"):
        step(jnp.zeros(8), jnp.ones((8, 2)))


def in_fresh_process(program: str, **environment: str) -> str:
    """What ``program`` prints where nobody has set any of JAX's variables."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return run.stdout


@pytest.mark.parametrize("uses_jax_first", [False, True])
def test_nothing_need_be_set_before_importing_jax(uses_jax_first):
    printed = in_fresh_process(
        f"""
        import jax, jax.numpy as jnp
        import jax_deepcompile as deepcompile
        if {uses_jax_first}:
            jnp.ones(3).sum()
        mesh = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))
        step = deepcompile.shard(lambda state, batch: (state + batch.sum(), batch.mean()), mesh)
        shapes = jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((8, 2), jnp.float32)
        print("all-reduce" in step.lower(*shapes).compile().as_text(), jax.config.jax_platforms)
        print(jnp.ones(3).sum(), jax.default_backend())
        """
    )
    assert printed == "True None\n3.0 cpu\n"


def test_the_compiler_may_be_where_other_programs_do_not_find_it(tmp_path):
    """In the folder of ``deepcompile install-compiler``; as if no plugin was installed."""
    found = importlib.util.find_spec("jax_plugins.xla_cuda12")
    assert found is not None
    program = """
        import sys
        sys.prefix, sys.modules["jax_plugins"] = {prefix!r}, None
        import jax, jax.numpy as jnp
        import jax_deepcompile as deepcompile
        from jax_deepcompile.lowering import cuda_compiler
        if {installed}:
            folder = cuda_compiler.folder() / "jax_plugins"
            folder.mkdir(parents=True)
            (folder / "xla_cuda12").symlink_to({plugin!r})
        try:
            mesh = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))
        except deepcompile.errors.TargetUnavailableError as error:
            sys.exit(print(error))
        step = deepcompile.shard(lambda state, batch: (state + batch.sum(), batch.mean()), mesh)
        shapes = jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((8, 2), jnp.float32)
        print("all-reduce" in step.lower(*shapes).compile().as_text(), jax.default_backend())
        """
    plugin = str(Path(found.origin or "").parent)
    for installed, sentence in ((False, "`deepcompile install-compiler`"), (True, "True cpu")):
        assert sentence in in_fresh_process(program.format(prefix=str(tmp_path), installed=installed, plugin=plugin))


def test_what_is_missing_is_named(monkeypatch):
    def missing(*_):
        raise ImportError("neither jax-cuda12-pjrt nor jax-cuda13-pjrt is installed")

    monkeypatch.setattr("jax_deepcompile.lowering.targets.cuda_topology_devices", missing)
    sentence = (
        r"h100 GPUs that are not here .*pip install 'jax-deepcompile\[h100\]'` and `deepcompile install-compiler`"
        r".*neither jax-cuda12-pjrt"
    )
    with pytest.raises(deepcompile.errors.TargetUnavailableError, match=sentence):
        _ = deepcompile.targets.h100().devices


def test_a_thousand_gpus_are_one_mesh():
    mesh = deepcompile.targets.h100(nodes=128).make_mesh((1024,), ("fsdp",))
    text = compiled_gather(mesh).as_text()
    assert "all-gather" in text
    assert "->f32[1048576,64]" in text


def test_jits_cudnn_attention_is_partitioned_where_nobody_has_named_a_platform():
    printed = in_fresh_process(
        """
        import jax, jax.numpy as jnp
        import jax_deepcompile as deepcompile
        mesh = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))
        def step(state, x):
            y = jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn")
            return state + y.astype(jnp.float32).sum(), y
        shapes = jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((8, 128, 4, 64), jnp.bfloat16)
        text = deepcompile.shard(step, mesh, passes=()).lower_gspmd(*shapes).compile().as_text()
        print("__cudnn$fmha" in text, "CustomSPMDPartitioning" in text)
        """
    )
    assert printed == "True False\n"
