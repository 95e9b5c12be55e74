"""Two processes of one CPU device each, which talk by gloo where GPUs have NCCL."""

from __future__ import annotations

import pytest

from experiments.gpu_suite import two_processes
from experiments.gpu_suite.cases import Deadline
from experiments.gpu_suite.rank import largest_difference
from experiments.gpu_suite.sizes import tiny

pytestmark = pytest.mark.cpu_mesh


def test_three_ways_to_train_have_the_same_losses(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    found = list(two_processes.rows(tiny(), "", Deadline.after(100)))
    losses = {row["system"]: row["losses"] for row in found if row["what"] == "losses"}
    assert list(losses) == ["jit", "shard", "planned"]
    assert all(values == pytest.approx(losses["jit"], rel=1e-5) for values in losses.values())
    assert losses["jit"][1] < losses["jit"][0]
    *_, last = found
    assert last["relative_difference"] < 1e-5
    assert set(last["step_s"]) == set(losses)


def test_workers_out_of_time_are_an_error_of_the_section():
    with pytest.raises(two_processes.WorkersFailedError, match="killed, for it did not end within 0 s"):
        list(two_processes.rows(tiny(), "", Deadline.after(0.2)))


def test_each_process_takes_itself_for_a_host_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("XLA_FLAGS", "--xla_some_flag")
    first, second = (two_processes.environment(index, tiny().pair) for index in range(2))
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert first["CUDA_VISIBLE_DEVICES"] == "3"
    assert first["XLA_FLAGS"] == "--xla_some_flag --xla_gpu_shard_autotuning=false"
    assert first["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_differences_of_losses():
    assert largest_difference([[4.0, 2.0], [4.0, 2.5], [4.0, 2.0]]) == 0.2
    assert largest_difference([[4.0]]) == 0.0
