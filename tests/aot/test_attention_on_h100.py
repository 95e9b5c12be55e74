"""Attention by a library's kernel, in steps for H100s that are not here: cuDNN's, and Pallas kernels of one's own."""

from __future__ import annotations

import importlib
import re
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import jax_deepcompile as deepcompile
from jax_deepcompile.cli import main as cli
from jax_deepcompile.hlo.reader import read
from tests.schedules import instructions

pytestmark = pytest.mark.h100_aot

GPUS, LAYERS, EXAMPLES, TOKENS, WIDTH, HEADS, GROUPS = 8, 3, 16, 256, 256, 8, 2
FUSED = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
ASKED = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")
SHAPE = jax.ShapeDtypeStruct


@pytest.fixture(scope="module")
def mesh():
    return deepcompile.targets.h100().make_mesh((GPUS,), ("fsdp",))


def attention(**options):
    """``jax.nn.dot_product_attention`` by cuDNN, with what the batch has of masks and lengths."""

    def attend(query, key, value, batch):
        named = {name: batch[name] for name in batch.keys() - {"x", "segments"}}
        if "segments" in batch:
            segments = batch["segments"]
            named["mask"] = (segments[:, :, None] == segments[:, None, :])[:, None]
        return jax.nn.dot_product_attention(query, key, value, implementation="cudnn", **named, **options)

    return attend


def dropout(query, key, value, batch):
    return FUSED.dot_product_attention(query, key, value, scale=0.1, dropout_rate=0.1, seed=1)


def packed(query, key, value, batch):
    """Segments of different lengths in one row, each of which attends to itself."""
    lengths, starts = batch["lengths"], batch["starts"]
    return FUSED.dot_product_attention(
        query, key, value, None, None, lengths, lengths, starts, starts, mask_type=FUSED.MaskType.PADDING_CAUSAL
    )


def train_step(attend, head_size=64, groups=GROUPS, dtype=jnp.bfloat16):
    """A plain step of a few layers of attention, scanned and rematerialised, and the shapes of its parameters."""

    def layer(batch):
        def run(x, weights):
            project = lambda name, heads: (x @ weights[name]).reshape(*x.shape[:2], heads, head_size)  # noqa: E731
            y = attend(project("query", HEADS), project("key", groups), project("value", groups), batch)
            return x + y.reshape(*x.shape[:2], HEADS * head_size) @ weights["out"], None

        return jax.checkpoint(run)

    def step(params, batch):
        def loss_of(params):
            weights = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
            x, _ = jax.lax.scan(layer(batch), batch["x"].astype(dtype), weights)
            return jnp.mean(x.astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, grads), loss

    inner, shared = HEADS * head_size, groups * head_size
    sizes = {"query": (WIDTH, inner), "key": (WIDTH, shared), "value": (WIDTH, shared), "out": (inner, WIDTH)}
    return step, {name: SHAPE((LAYERS, *size), jnp.float32) for name, size in sizes.items()}


def batch_of(**leaves):
    return {"x": SHAPE((EXAMPLES, TOKENS, WIDTH), jnp.float32)} | {
        name: SHAPE((EXAMPLES, *shape), jnp.int32) for name, shape in leaves.items()
    }


def attention_calls(step, params, batch, mesh, **options):
    """What is called in the planned, compiled step, and the sequences and heads that each call is of."""
    compiled = deepcompile.shard(step, mesh, **options).lower(params, batch).compile()
    calls = [each for each in instructions(read(compiled.as_text() or "")) if each.target.startswith("__cudnn$fmha")]
    sizes = [each.config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]["dimensions"][:2] for each in calls]
    return {each.target.removeprefix("__cudnn$fmha") for each in calls}, {tuple(map(int, size)) for size in sizes}


LENGTHS = {"query_seq_lengths": (), "key_value_seq_lengths": ()}
OWN_ROWS = {(EXAMPLES // GPUS, HEADS)}


@pytest.mark.parametrize(
    ("attend", "leaves", "sizes", "kernel"),
    [
        (attention(is_causal=True), {}, {}, "Softmax"),
        (attention(is_causal=True), {}, {"groups": HEADS, "head_size": 128, "dtype": jnp.float16}, "Softmax"),
        (attention(is_causal=True, local_window_size=(64, 0)), {}, {"groups": 1, "head_size": 256}, "Softmax"),
        (attention(is_causal=True), LENGTHS, {}, "Softmax"),
        (attention(is_causal=True), {"segments": (TOKENS,)}, {}, "ScaleBiasSoftmax"),
    ],
    ids=["grouped", "float16", "wide heads and a window", "lengths", "segments"],
)
def test_cudnn_attention_is_planned_on_each_devices_own_rows(mesh, attend, leaves, sizes, kernel):
    passes = (deepcompile.PrefetchGathers(),)
    found = attention_calls(*train_step(attend, **sizes), batch_of(**leaves), mesh, passes=passes)
    assert found == ({kernel, f"{kernel}Backward"}, OWN_ROWS)


def test_in_microbatches_it_is_of_the_rows_of_one(mesh):
    step, params = train_step(attention(is_causal=True))
    _, sizes = attention_calls(step, params, batch_of(), mesh, microbatches=2)
    assert sizes == {(EXAMPLES // GPUS // 2, HEADS)}


@pytest.mark.parametrize(
    ("attend", "leaves", "kernel", "reason"),
    [
        (dropout, {}, "SoftmaxDropout", "draws its dropout by position in the batch"),
        (packed, {"lengths": (3,), "starts": (4,)}, "Softmax", "packs the statistics of packed sequences"),
    ],
)
def test_attention_that_depends_on_the_whole_batch_is_computed_whole_and_reported(mesh, attend, leaves, kernel, reason):
    step, params = train_step(attend, groups=HEADS)
    sharded = deepcompile.shard(step, mesh, passes=())
    found = attention_calls(step, params, batch_of(**leaves), mesh, passes=())
    assert found == ({kernel, f"{kernel}Backward"}, {(EXAMPLES, HEADS)})
    assert reason in sharded.trace(params, batch_of(**leaves)).explain()


def test_what_jit_makes_of_the_step_can_be_compared(mesh):
    step, params = train_step(attention(is_causal=True))
    lowered = deepcompile.shard(step, mesh, passes=()).lower_gspmd(params, batch_of())
    assert "__cudnn$fmhaSoftmaxBackward" in (lowered.compile().as_text() or "")


def test_state_that_is_made_by_a_forward_pass_is_made_of_shapes(mesh):
    step, params = train_step(attention(is_causal=True))
    sharded = deepcompile.shard(step, mesh, passes=())

    def create(batch):
        _, loss = step(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params), batch)
        return jax.tree.map(lambda leaf: jnp.full(leaf.shape, 2.0) + loss, params)

    state = sharded.init(create, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), batch_of()))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), params
    )
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(state)} == {mesh}
    assert sharded.trace(state, batch_of()).plan() is not None


STEP = """
import jax, jax.numpy as jnp

def make():
    def attend(x):
        return jax.nn.dot_product_attention(x, x, x, implementation="cudnn").sum().astype(jnp.float32)

    x = jax.ShapeDtypeStruct((8, 256, 8, 64), jnp.bfloat16)
    state = jax.eval_shape(lambda x: jnp.zeros(8) + attend(x), x)
    return lambda state, batch: (state + attend(batch), 0.0), state, x
"""


def test_the_command_line_makes_the_step_as_if_its_gpus_were_here(tmp_path, capsys, monkeypatch):
    for name in ("XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL"):  # which the command line sets
        monkeypatch.setenv(name, "")
    path = tmp_path / "step_with_cudnn.py"
    path.write_text(STEP)
    assert cli.main(["trace", f"{path}:make", "--gpu", "h100"]) == 0
    assert "dot_product_attention" in capsys.readouterr().out


def of_own(batch):
    query = jnp.zeros((2, TOKENS, HEADS, 64), jnp.bfloat16)
    return jax.nn.dot_product_attention(query, query, query, implementation="cudnn")


def test_what_is_traced_elsewhere_asks_the_gpus_of_this_process(mesh):
    """In another thread while a step is traced, and here before and after it; a step that fails included."""
    outside, before = [], [getattr(FUSED, name) for name in ASKED]

    def elsewhere():
        with pytest.raises(RuntimeError, match=r"(?i)cudnn") as raised:
            jax.eval_shape(of_own, 0)
        outside.append(raised.value)

    def attend(query, key, value, batch):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        attention()(query, key, value, batch)
        raise LookupError("the user's")

    step, params = train_step(attend)
    with pytest.raises(LookupError, match="the user's"):
        deepcompile.shard(step, mesh).trace(params, batch_of())
    elsewhere()
    assert len(outside) == 2
    assert [getattr(FUSED, name) for name in ASKED] == before


def test_what_jit_keeps_of_a_step_for_other_gpus_is_not_used_for_these(mesh):
    attend = jax.jit(of_own)
    deepcompile.shard(lambda state, batch: (state + attend(batch).sum() + batch.sum(), 0.0), mesh).trace(
        SHAPE((8,), jnp.float32), SHAPE((8, 2), jnp.float32)
    )
    with pytest.raises(RuntimeError, match=r"(?i)cudnn"):
        attend(0)


def test_heads_that_the_target_has_no_kernel_for_are_refused_by_jax(mesh):
    step, params = train_step(attention(), head_size=264)
    with pytest.raises(NotImplementedError, match="head dim must be <= 256"):
        deepcompile.shard(step, mesh).trace(params, batch_of())


@pytest.mark.filterwarnings("ignore:.*(attention is deprecated|Pallas Triton backend):DeprecationWarning")
def test_pallas_kernels_for_triton_are_planned_on_each_devices_own_rows(mesh):
    mha = importlib.import_module("jax.experimental.pallas.ops.gpu.attention").mha
    step, params = train_step(lambda query, key, value, _: mha(query, key, value, None, causal=True), groups=HEADS)
    sharded = deepcompile.shard(step, mesh, passes=(deepcompile.PrefetchGathers(),))
    text = sharded.lower(params, batch_of()).compile().as_text() or ""
    rows = re.findall(r"= \(?\w+\[(\d+),[\d,]+\].* custom-call\(.*gpu\.triton", text)
    assert len(rows) >= 4, "forward, forward again, and two of the backward pass"
    assert set(rows) == {f"{EXAMPLES // GPUS}"}


@pytest.mark.parametrize("manual", [False, True])
def test_a_kernel_that_only_a_gpus_machine_compiles_is_named(mesh, monkeypatch, manual: bool):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    def kernel(x, out):
        out[...] = x[...] + 1.0

    def step(state, batch):
        def call(x):
            shape = SHAPE(x.shape, x.dtype)
            return pl.pallas_call(kernel, out_shape=shape, compiler_params=plgpu.CompilerParams())(x)

        split = jax.P("fsdp")
        made = jax.shard_map(call, mesh=mesh, in_specs=split, out_specs=split, check_vma=False) if manual else call
        return state + made(batch).sum(), 0.0

    with pytest.raises(
        deepcompile.errors.KernelNeedsGpuError,
        match=r"step has a Pallas kernel for Mosaic GPU \(pallas_call\), made at \S*test_attention_on_h100.py:\d+ ",
    ):
        deepcompile.shard(step, mesh).trace(SHAPE((8,), jnp.float32), SHAPE((8, 128), jnp.float32))


@pytest.mark.parametrize("decomposed", [jnp.linalg.cholesky, jnp.linalg.qr, jnp.linalg.inv, jnp.linalg.eigvalsh])
def test_a_call_of_a_library_that_only_a_gpus_machine_has_is_named(mesh, monkeypatch, decomposed):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    def step(state, batch):
        return state - sum(map(jnp.sum, jax.tree.leaves(decomposed(batch.T @ batch)))), 0.0

    with pytest.raises(
        deepcompile.errors.LibraryNeedsGpuError, match=r"step has a \w+ at \S*test_attention_on_h100.py:\d+ .*cuSOLVER"
    ):
        deepcompile.shard(step, mesh).trace(SHAPE((8,), jnp.float32), SHAPE((8, 128), jnp.float32))


def test_what_xla_itself_computes_on_gpus_is_not_refused(mesh):
    def step(state, batch):
        solved = jax.scipy.linalg.solve_triangular(batch.T @ batch, batch.T)
        return state - jnp.sum(jnp.fft.fft(solved).real), 0.0

    deepcompile.shard(step, mesh).trace(SHAPE((8,), jnp.float32), SHAPE((8, 128), jnp.float32))
