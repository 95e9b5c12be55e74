"""Every section at tiny sizes, through the code that measures GPUs."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jax_deepcompile as deepcompile
from experiments.gpu_suite import attention, host_copies, llama_block, matmul, memory, simulated_vs_measured
from experiments.gpu_suite.cases import Deadline, OutOfTimeError, attempted, until
from experiments.gpu_suite.llama_block import Kernel
from experiments.gpu_suite.meshes import one_device_mesh
from experiments.gpu_suite.sizes import full, layer_shapes, tiny
from experiments.gpu_suite.suite import section_module
from experiments.gpu_suite.workloads import WORKLOADS
from experiments.trainings import Training
from models.llama import LLAMA3_70B

pytestmark = pytest.mark.cpu_mesh

TINY = tiny()


@pytest.fixture(autouse=True)
def _quick(quick_compilation):
    """Nothing here is about speed."""


def rows(section, sizes=TINY, part: str = "") -> list[dict]:
    found = list(section.rows(sizes, part, Deadline.after(60)))
    json.dumps(found, allow_nan=False)
    return found


def test_matmul():
    found = rows(matmul)
    assert len(found) == 2 * 5
    assert all(row["seconds"] > 0 for row in found)
    assert {(row["form"], row["dtype"]) for row in found} == {
        ("nn", "bf16"), ("nn", "f32"), ("nt", "bf16"), ("tn", "bf16"),
    }  # fmt: skip
    row = found[0]
    assert row["flops_per_s"] == pytest.approx(2 * row["m"] * row["n"] * row["k"] / row["seconds"])


def test_attention():
    found = {(row["implementation"], row["passes"]): row for row in rows(attention)}
    assert found["xla", "forward"]["seconds"] > 0
    assert found["xla", "forward and backward"]["seconds"] > 0
    assert "cuDNN" in found["cudnn", "forward"]["error"], "cuDNN needs a GPU, and its row says so"


def test_memory():
    found = rows(memory)
    tiny_rows = [row for row in found if row["kind"] == "tiny"]
    assert [row["launched"] for row in tiny_rows] == list(memory.GRAPHS)
    assert all(row["period_s"] > 0 and row["kernels"] == 8 for row in tiny_rows)
    others = [row for row in found if row["kind"] != "tiny"]
    assert {row["kind"] for row in others} == set(memory.KERNELS)
    assert all(row["bytes_per_s"] == pytest.approx(row["size_bytes"] / row["seconds"]) for row in others)


def test_host_copies():
    found = rows(host_copies)
    assert {(row["direction"], row["how"]) for row in found} == {
        (direction, how) for direction in ("to host", "from host") for how in ("alone", "beside products")
    }
    assert not [row for row in found if "error" in row]
    assert all(row["together_s"] > 0 for row in found if row["how"] == "beside products")


def test_llama_block():
    found = rows(llama_block)
    by_what = {what: [row for row in found if row["what"] == what] for what in ("step", "kind", "op")}
    assert by_what["step"][0]["measured_s"] > 0
    assert "matmul" in {row["kind"] for row in by_what["kind"]}
    assert sum(row["ops"] for row in by_what["kind"]) >= len(by_what["op"]) > 0
    assert all(row["width"] == 16 for row in found)


def test_kernels_are_summed_by_kind_and_the_heaviest_listed():
    kernels = [
        Kernel("dot.1", "matmul", "", executions=2, measured_s=3.0, predicted_s=1.5),
        Kernel("dot.2", "matmul", "", executions=1, measured_s=2.0, predicted_s=1.0),
        Kernel("add", "elementwise", "", executions=10, measured_s=1.0, predicted_s=2.0),
    ]
    elementwise, products = llama_block.by_kind(kernels)
    assert (elementwise["kind"], elementwise["predicted_over_measured"]) == ("elementwise", 2.0)
    assert (products["ops"], products["measured_s"], products["predicted_s"]) == (2, 8.0, 4.0)
    assert [row["name"] for row in llama_block.heaviest(kernels, 2)] == ["add", "dot.1"]


def test_simulated_vs_measured(monkeypatch):
    monkeypatch.setattr(simulated_vs_measured, "WORKLOADS", {"smallest": smallest_training})
    sharded, jitted = rows(simulated_vs_measured, part="smallest")
    assert (sharded["system"], jitted["system"]) == ("shard", "jit")
    assert sharded["first_loss"] == pytest.approx(jitted["first_loss"], rel=1e-5)
    assert sharded["simulated_over_measured"] == pytest.approx(sharded["simulated_s"] / sharded["step_s"])
    assert sharded["allocator_peak_bytes"] is None, "the CPU backend keeps none"
    assert sharded["xla_bytes"] > 0


def smallest_training() -> Training:
    def step(state: TrainState, x):
        loss, grads = jax.value_and_grad(lambda params: jnp.square(x @ params["w"]).mean())(state.params)
        return state.apply_gradients(grads=grads), loss

    def create() -> TrainState:
        params = {"w": jnp.full((8, 4), 0.5)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    return Training(create, step, np.ones((4, 8), np.float32))


@pytest.mark.parametrize("name", ["llama_smallest", "gpt2_tiny", "vit_tiny", "resnet_tiny", "mixtral_tiny"])
def test_steps_of_the_workloads_keep_their_state_as_it_is(name: str):
    work = WORKLOADS[name]()
    state = jax.eval_shape(work.create)
    new, loss = jax.eval_shape(work.step, state, work.batch)
    assert loss.shape == ()
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), new) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )


@pytest.mark.parametrize("name", ["llama_smallest", "gpt2_tiny", "vit_tiny", "mixtral_tiny"])
def test_on_one_device_they_can_be_sharded_in_microbatches(name: str):
    work, mesh = WORKLOADS[name](), one_device_mesh()
    state = jax.eval_shape(work.create)
    whole = deepcompile.shard(work.step, mesh).trace(state, work.batch)
    parts = deepcompile.shard(work.step, mesh, microbatches=2).trace(state, work.batch)
    assert whole.sharded.jaxpr.out_avals == parts.sharded.jaxpr.out_avals


def test_full_sizes():
    sizes = full()
    assert sum(seconds for _, seconds in sizes.budgets.sections_s) <= sizes.budgets.total_s
    assert sizes.budgets.total_s + sizes.budgets.grace_s < 8 * 60
    assert len(set(sizes.matmul.shapes)) == len(sizes.matmul.shapes)
    assert (4096, 28_672, 8192) in layer_shapes(LLAMA3_70B, 4096)
    assert set(layer_shapes(LLAMA3_70B, 4096)) <= set(sizes.matmul.shapes)
    assert all(callable(section_module(name).rows) for name, _ in sizes.budgets.sections_s)


def test_a_section_stops_when_its_time_is_over():
    assert list(until(Deadline.after(60), [1, 2])) == [1, 2]
    cases = until(Deadline.after(-1), [1, 2])
    with pytest.raises(OutOfTimeError, match="2 of 2 cases were not reached"):
        next(cases)


def test_a_case_that_fails_says_why():
    assert attempted({"m": 1}, lambda: {"seconds": 2.0}) == {"m": 1, "seconds": 2.0}
    failed = attempted({"m": 1}, lambda: {"seconds": 1 / 0})
    assert failed == {"m": 1, "error": "ZeroDivisionError: division by zero"}
