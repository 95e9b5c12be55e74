"""Every section at tiny sizes, measured as on a GPU: by pytest, in processes that it starts."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jax_deepcompile as deepcompile
from experiments.gpu_suite import memory, offload, simulated_vs_measured, two_processes
from experiments.gpu_suite.conftest import section_module
from experiments.gpu_suite.kernels import Kernel, by_kind, heaviest
from experiments.gpu_suite.meshes import one_device_mesh
from experiments.gpu_suite.rank import largest_difference
from experiments.gpu_suite.results import Results, Status
from experiments.gpu_suite.sizes import full, layer_shapes, tiny
from experiments.gpu_suite.suite import measure
from experiments.gpu_suite.workloads import WORKLOADS
from experiments.trainings import Training
from models.llama import LLAMA3_70B

pytestmark = pytest.mark.cpu_mesh


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    out = tmp_path_factory.mktemp("suite") / "folder" / "out.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        found = measure(out, "tiny", {"device_kind": "cpu", "versions": {}})
    assert out.read_text() == found.to_json() + "\n"
    assert sorted(path.name for path in out.parent.iterdir()) == ["out.json", "out.md"]
    return found


@pytest.mark.slow
def test_all_sections_are_measured(results):
    statuses = {section.name: section.status for section in results.sections}
    assert list(statuses) == [name for name, _ in tiny().budgets.sections_s]
    assert statuses.pop("attention") is Status.PARTIAL, "cuDNN needs a GPU"
    assert set(statuses.values()) == {Status.COMPLETE}


@pytest.mark.slow
def test_matmul(results):
    found = results.section("matmul").rows
    assert len(found) == 2 * 5
    assert all(row["seconds"] > 0 for row in found)
    assert {(row["form"], row["dtype"]) for row in found} == {
        ("nn", "bf16"), ("nn", "f32"), ("nt", "bf16"), ("tn", "bf16"),
    }  # fmt: skip
    row = found[0]
    assert row["flops_per_s"] == pytest.approx(2 * row["m"] * row["n"] * row["k"] / row["seconds"])


@pytest.mark.slow
def test_attention(results):
    found = results.section("attention")
    assert {(row["implementation"], row["passes"]) for row in found.measured} == {
        ("xla", "forward"), ("xla", "forward and backward"),
    }  # fmt: skip
    assert all(row["seconds"] > 0 for row in found.measured)
    failed = {row["case"]: row["error"] for row in found.rows if "error" in row}
    assert "cuDNN is not detected" in failed["tiny 4 2 8 32 cudnn forward"], "a case that fails says why"


@pytest.mark.slow
def test_memory(results):
    found = results.section("memory").rows
    tiny_rows = [row for row in found if row["kind"] == "tiny"]
    assert [row["launched"] for row in tiny_rows] == list(memory.GRAPHS)
    assert all(row["period_s"] > 0 and row["kernels"] == 8 for row in tiny_rows)
    others = [row for row in found if row["kind"] != "tiny"]
    assert {row["kind"] for row in others} == set(memory.KERNELS)
    assert all(row["bytes_per_s"] == pytest.approx(row["size_bytes"] / row["seconds"]) for row in others)


@pytest.mark.slow
def test_host_copies(results):
    found = results.section("host_copies").rows
    assert {(row["direction"], row["how"]) for row in found} == {
        (direction, how)
        for direction in ("to host", "from host")
        for how in ("alone", "beside products", "beside sums")
    }
    assert all(row["together_s"] > 0 for row in found if row["how"] != "alone")


@pytest.mark.slow
def test_llama_block(results):
    found = results.section("llama_block").rows
    by_what = {what: [row for row in found if row["what"] == what] for what in ("step", "kind", "op")}
    assert by_what["step"][0]["measured_s"] > 0
    assert "matmul" in {row["kind"] for row in by_what["kind"]}
    assert sum(row["ops"] for row in by_what["kind"]) >= len(by_what["op"]) > 0
    assert all(row["width"] == 16 for row in found)


@pytest.mark.slow
def test_two_processes(results):
    """Of one CPU device each, which talk by gloo where GPUs have NCCL."""
    *found, last = results.section("two_processes").rows
    losses = {row["system"]: row["losses"] for row in found if row["what"] == "losses"}
    assert list(losses) == ["jit", "shard", "planned", "measured"]
    assert all(values == pytest.approx(losses["jit"], rel=1e-5) for values in losses.values())
    assert losses["jit"][1] < losses["jit"][0]
    assert last["relative_difference"] < 1e-5
    assert set(last["step_s"]) == set(losses)


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


def test_kernels_are_summed_by_kind_and_the_heaviest_listed():
    found = [
        Kernel("dot.1", "matmul", "", executions=2, measured_s=3.0, predicted_s=1.5),
        Kernel("dot.2", "matmul", "", executions=1, measured_s=2.0, predicted_s=1.0),
        Kernel("add", "elementwise", "", executions=10, measured_s=1.0, predicted_s=2.0),
    ]
    elementwise, products = by_kind(found)
    assert (elementwise["kind"], elementwise["predicted_over_measured"]) == ("elementwise", 2.0)
    assert (products["ops"], products["measured_s"], products["predicted_s"]) == (2, 8.0, 4.0)
    assert [row["name"] for row in heaviest(found, 2)] == ["add", "dot.1"]


def test_simulated_vs_measured(monkeypatch):
    monkeypatch.setattr(simulated_vs_measured, "WORKLOADS", {"smallest": smallest_training})
    sharded, *kernels, jitted = simulated_vs_measured.both({"workload": "smallest"}, tiny().steps)
    assert (sharded["system"], jitted["system"]) == ("shard", "jit")
    assert {row["what"] for row in kernels} == {"step", "kind", "op"}
    assert sharded["first_loss"] == pytest.approx(jitted["first_loss"], rel=1e-5)
    assert sharded["simulated_over_measured"] == pytest.approx(sharded["simulated_s"] / sharded["step_s"])
    assert sharded["allocator_peak_bytes"] is None, "the CPU backend keeps none"
    assert sharded["xla_bytes"] > 0


def test_offload(monkeypatch):
    """One CPU device honours memory kinds; nothing is planned for it."""
    made = []
    monkeypatch.setattr(offload, "by_memory_kind", recorded(offload.by_memory_kind, made))
    rows = [next(offload.trained(case, tiny().offload)) for case in offload.cases(tiny())[:-1]]
    assert [row["system"] for row in rows] == [offload.PLAN, offload.MOMENTS, offload.EVERYTHING, offload.PLAN]
    for row in rows:
        assert "error" not in row
        assert row["losses"] == pytest.approx(rows[-1]["losses"], rel=1e-5)
        assert row["losses"][1] < row["losses"][0]
        assert row["tokens_per_s"] == pytest.approx(4 * 16 / row["step_s"])
    for compiled, state in made:
        before = jax.tree.map(lambda leaf: leaf.sharding.memory_kind, state)
        after = jax.tree.map(lambda sharding: sharding.memory_kind, compiled.output_shardings[0])
        assert before == after
        assert set(jax.tree.leaves(before.params)) == {"device"}
        assert set(jax.tree.leaves(before.opt_state[1][0].mu)) == {"pinned_host"}


def recorded(make: Callable, made: list) -> Callable:
    def record(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]

    return record


def test_copies_both_ways():
    (row,) = offload.rows(offload.cases(tiny())[-1], tiny(), 10.0)
    assert min(row["to_host_bytes_per_s"], row["from_host_bytes_per_s"], row["together_bytes_per_s"]) > 0


@pytest.mark.parametrize(
    ("gib", "parameter_bytes", "layers"),
    [(None, 12, 13), (24, 12, 13), (74.4, 12, 30), (74.4, 16, 22), (130, 12, 53), (400, 12, 64)],
)
def test_the_model_has_as_few_layers_as_do_not_fit(gib, parameter_bytes, layers):
    config = offload.sized(full().offload, gib and int(gib * 2**30), parameter_bytes)
    assert config.n_layers == layers
    assert 3e9 < offload.parameters(config) < 15e9


def test_a_way_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(offload, "sized", lambda *_: 1 / 0)
    (row,) = offload.trained({"system": offload.PLAN, "parameter_bytes": 12}, tiny().offload)
    assert row == {"system": "plan", "parameter_bytes": 12, "error": row["error"]}
    assert re.fullmatch(r"ZeroDivisionError: division by zero \(test_sections.py:\d+\)", row["error"])


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
    names = [name for name, _ in sizes.budgets.sections_s]
    assert sizes.budgets.until_s(names[-1]) + sizes.budgets.grace_s < 8 * 60
    assert sizes.budgets.until_s(names[1]) == sum(seconds for _, seconds in sizes.budgets.sections_s[:2])
    assert len(set(sizes.matmul.shapes)) == len(sizes.matmul.shapes)
    assert (4096, 28_672, 8192) in layer_shapes(LLAMA3_70B, 4096)
    assert set(layer_shapes(LLAMA3_70B, 4096)) <= set(sizes.matmul.shapes)
    cases = [(name, *case.values()) for name in names for case in section_module(name).cases(sizes)]
    assert len(set(cases)) == len(cases) > 100
