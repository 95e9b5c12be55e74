"""Traces: read as GPUs write them, as the CPU backend does, and lived without."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from jax_deepcompile.profilers.trace import read_profiles, read_trace, traced

GPU_TRACE = """
planes {
  name: "/host:CPU"
  lines { name: "launcher" events { metadata_id: 1 duration_ps: 900000000
      stats { metadata_id: 1 str_value: "fusion.1" } stats { metadata_id: 2 str_value: "jit_step" } } }
  event_metadata { key: 1 value { id: 1 name: "launch" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
}
planes {
  name: "/device:GPU:1"
  lines { name: "Stream #16(Compute)"
    events { metadata_id: 1 duration_ps: 2000000
      stats { metadata_id: 1 str_value: "fusion.1" } stats { metadata_id: 2 str_value: "jit_step" } }
    events { metadata_id: 1 duration_ps: 3000000
      stats { metadata_id: 1 str_value: "fusion.1" } stats { metadata_id: 2 str_value: "jit_step" } }
    events { metadata_id: 1 duration_ps: 7000000
      stats { metadata_id: 1 str_value: "fusion.1" } stats { metadata_id: 2 str_value: "jit_other" } }
    events { metadata_id: 1 duration_ps: 8000000 } }
  lines { name: "Stream #20(Collectives)" events { metadata_id: 1 duration_ps: 4000000
      stats { metadata_id: 1 str_value: "all-gather-start" } stats { metadata_id: 2 str_value: "jit_step" } } }
  lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 5000000
      stats { metadata_id: 1 str_value: "fusion.1" } stats { metadata_id: 2 str_value: "jit_step" } } }
  event_metadata { key: 1 value { id: 1 name: "kernel" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
}
"""
"""One GPU: its streams, a heading that repeats them, another program's kernel, one of none; launches on the host."""


def from_text(text: str) -> ProfileData:
    return ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text))


@pytest.mark.pure
def test_a_gpus_streams_are_summed_and_nothing_else():
    trace = read_profiles([from_text(GPU_TRACE)], "jit_step")
    assert trace.seconds == pytest.approx({(1, "fusion.1"): 5e-6, (1, "all-gather-start"): 4e-6})
    assert trace.events == {(1, "fusion.1"): 2, (1, "all-gather-start"): 1}
    assert trace.problem == ""


@pytest.mark.pure
def test_another_module_has_no_events():
    assert read_profiles([from_text(GPU_TRACE)], "jit_step.1").seconds == {}


@pytest.mark.pure
def test_no_trace_file(tmp_path: Path):
    assert read_trace(tmp_path, "jit_step").problem == "the profiler wrote no trace"


@pytest.fixture
def call():
    def double(x):
        return jnp.sin(x @ x) * 2

    x = jax.device_put(jnp.ones((64, 64)), jax.devices()[3])
    run = jax.jit(double)
    run(x)
    return lambda: run(x)


@pytest.mark.cpu_mesh
def test_the_cpu_backend(call):
    result, trace = traced(call, "jit_double")
    assert result.shape == (64, 64)
    assert trace.problem == ""
    assert {device for device, _ in trace.seconds} == {3}
    assert all(seconds > 0 for seconds in trace.seconds.values())


@pytest.mark.cpu_mesh
def test_a_profiler_that_is_in_use_is_the_problem_but_the_call_is_made(call, tmp_path: Path):
    with jax.profiler.trace(str(tmp_path)):
        result, trace = traced(call, "jit_double")
    assert result.shape == (64, 64)
    assert trace.seconds == {}
    assert trace.problem.startswith("RuntimeError: ")


@pytest.mark.cpu_mesh
def test_a_profiler_that_cannot_write_is_the_problem_but_the_call_is_made(call, monkeypatch: pytest.MonkeyPatch):
    stop = jax.profiler.stop_trace

    def fail():
        stop()
        raise OSError("no space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    result, trace = traced(call, "jit_double")
    assert result.shape == (64, 64)
    assert trace.problem == "OSError: no space left on device"


@pytest.mark.cpu_mesh
def test_an_error_of_the_call_is_the_callers(call):
    def broken():
        raise ValueError("of the step")

    with pytest.raises(ValueError, match="of the step"):
        traced(broken, "jit_double")
    assert traced(call, "jit_double")[1].problem == "", "and the profiler is free again"
