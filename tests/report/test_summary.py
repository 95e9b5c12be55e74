"""What objects show of themselves, last in a notebook's cell: a few lines, from shapes alone."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh

import jax_deepcompile as deepcompile
from jax_deepcompile.ir.paths import Leaf, tree_of
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.report.page.placements import leaves
from jax_deepcompile.report.words import line_text
from jax_deepcompile.summary import Summary, Text, size_text
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from jax_deepcompile.transforms.microbatch_loops import MicrobatchLoop
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.stack_collectives import StackCollectives
from jax_deepcompile.transforms.unshard import ReusedGathers
from models import llama

CONFIG = llama.LlamaConfig(vocab_size=64, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=64)
MOST = 1500


def create(key):
    model = llama.Llama(CONFIG)
    params = model.init(key, jnp.zeros((1, 16), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


def train_step(state, tokens):
    def loss_of(params):
        return llama.next_token_loss(state.apply_fn({"params": params}, tokens[:, :-1]), tokens[:, 1:])

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


TOKENS = jax.ShapeDtypeStruct((16, 17), jnp.int32)


@pytest.fixture(scope="module")
def traced():
    step = deepcompile.shard(train_step, {"fsdp": 8})
    return step, step.trace(jax.eval_shape(create, jax.random.key(0)), TOKENS)


@pytest.mark.pure
def test_a_step_says_what_it_is_before_and_after_it_is_traced_and_planned():
    step = deepcompile.shard(train_step, {"data": 2, "fsdp": 4})
    assert repr(step) == (
        "ShardedStep train_step\n  mesh    data=2 x fsdp=4 (cpu)\n  shapes  none yet: call it, or trace(...) it"
    )
    stage = step.trace(jax.eval_shape(create, jax.random.key(0)), TOKENS)
    for shown in (repr(step), repr(stage)):
        assert "data=2 x fsdp=4" in shown
        assert "state: state; batch: tokens" in shown
        assert "KiB a device, 38 leaves" in shown
        assert "not planned yet" in shown
    stage.plan()
    for shown in (repr(step), repr(stage), repr(stage.planned), repr(stage.plan())):
        assert "not planned yet" not in shown
        assert len(shown) < MOST
    assert "expected step  not simulated" in repr(stage)
    assert "train_step on data=2 x fsdp=4" in step.explain()


@pytest.mark.pure
def test_an_abstract_mesh_has_no_devices_to_name():
    step = deepcompile.shard(train_step, AbstractMesh((8,), ("fsdp",)))
    assert "fsdp=8 (abstract)" in repr(step)


@pytest.mark.pure
def test_a_target_says_how_many_gpus_and_what_network():
    shown = repr(deepcompile.targets.h100(nodes=4, nics_per_node=1))
    assert "4 nodes of 8 H100 SXM" in shown
    assert "1 cards of 400 Gbit/s a node" in shown
    assert len(shown) < MOST


@pytest.mark.cpu_mesh
@pytest.mark.usefixtures("quick_compilation")
def test_every_stage_and_what_is_simulated_of_it(traced):
    step, stage = traced
    lowered = stage.lower()
    compiled = lowered.compile()
    before, after = deepcompile.simulate(stage, step.mesh), deepcompile.simulate(compiled, step.mesh)
    for shown in map(repr, (step, stage, lowered, compiled)):
        assert "train_step" in shown
        assert "fsdp=8" in shown
        assert "46.8 KiB a device, 38 leaves" in shown
        assert "nothing to hide: collectives here do not run beside compute" in shown
    assert (before.is_scheduled, after.is_scheduled) == (False, True)
    assert "simulated before compilation, without XLA's fusions and schedule" in str(before)
    assert "simulated of XLA's schedule" in str(after)
    others = (stage.partitioned, stage.partitioned.layout, stage.program, stage.sharded, before, after, after.memory)
    for shown in (step, stage, lowered, compiled, *others):
        assert len(repr(shown)) < MOST
    assert "in all" in repr(stage.program)
    assert str(stage.program).startswith("# train_step: global view on fsdp=8\n")


@pytest.mark.cpu_mesh
@pytest.mark.usefixtures("quick_compilation")
def test_what_is_measured_and_arrays_that_are_gone():
    """Whatever reads a deleted array raises."""

    class Trainer(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(64, 64, rngs=nnx.Rngs(0))

        @deepcompile.shard
        def descend(self, x):
            loss, grads = nnx.value_and_grad(lambda dense: jnp.mean(dense(x) ** 2))(self.dense)
            nnx.update(self.dense, jax.tree.map(lambda leaf, grad: leaf - grad, nnx.state(self.dense), grads))
            return loss

    trainer = Trainer()
    trainer.descend(np.ones((8, 64), np.float32))
    bound = trainer.descend
    jax.tree.map(lambda leaf: leaf.delete(), nnx.state(trainer))
    assert "bound to a Trainer" in repr(bound).splitlines()[0]
    assert "2 leaves" in repr(bound)

    @deepcompile.shard(passes=())
    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(state)
        return state - 0.1 * grads, loss

    taken = step.profile(jnp.ones((64, 64)), jnp.ones((64, 64)), runs=1)
    jax.tree.map(lambda leaf: leaf.delete(), taken.args)
    assert taken.profile.step is not None
    for shown in (taken, taken.profile, taken.profile.memory, step):
        assert len(repr(shown)) < MOST
    for shown in map(repr, (taken, taken.profile)):
        assert f"{taken.profile.step.seconds:.4g} s, measured" in shown
        assert f"{len(taken.profile.ops)} ops" in shown
    assert f"measured step  {taken.profile.step.seconds:.4g} s" in repr(step)


@pytest.mark.pure
def test_explain_reads_the_same_printed_and_shown(traced):
    step, stage = traced
    for told in (
        stage.explain(),
        step.explain(),
        stage.plan().diff(stage.plan().having(ReusedGathers, [ReusedGathers(("head",))])),
    ):
        assert repr(told) == str(told)
    assert "  state: state, donated: " in stage.explain()
    assert "  tokens: batch: 16 examples\n" in stage.explain()
    assert "\\n" not in repr(stage.explain())


@pytest.mark.pure
def test_counters_are_summed_up_and_what_could_be_padded_is_not():
    def step(state, x):
        return {name: leaf + x.mean() for name, leaf in state.items()}, None

    counters = {f"count_{number}": jax.ShapeDtypeStruct((1,), jnp.float32) for number in range(30)}
    state = counters | {
        "odd": jax.ShapeDtypeStruct((4, 101), jnp.float32),
        "w": jax.ShapeDtypeStruct((8,), jnp.float32),
    }
    told = deepcompile.shard(step, {"fsdp": 8}).trace(state, jax.ShapeDtypeStruct((8,), jnp.float32)).explain()
    assert "state: 1 of 32 leaves sharded, 4 B a device; 31 replicated, 1.7 KiB a device" in told
    lines = [line for line in str(told).splitlines() if "padded by" in line]
    assert [line.partition(": ")[0] for line in lines] == [
        "  state['odd']",
        "  state['count_0'] and 29 more like it, 120 B a device",
    ]


@pytest.mark.pure
def test_collectives_are_counted_of_the_program_that_runs():
    """Over microbatches weights are gathered once, as planned; and before that in each."""

    def step(params, batch):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(params)
        return params - 0.1 * grads, loss

    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    counted = {}
    for passes in (None, ()):
        traced = deepcompile.shard(step, {"fsdp": 8}, microbatches=4, passes=passes).trace(*shapes)
        (line,) = (line for line in str(traced.explain()).splitlines() if "all_gather" in line)
        counted[passes] = line
        assert "collectives, as planned, before XLA joins any:" in traced.explain()
    assert counted[None] == "  all_gather over fsdp: 1 a step, 16.0 KiB"
    assert counted[()] == "  all_gather over fsdp: 4 a step, 64.0 KiB"


@pytest.mark.h100_aot
def test_collectives_are_counted_as_compiled():
    """XLA joins what the planned program has one by one: here all weights' gathers."""

    def step(params, batch):
        def loss(params):
            hidden = batch
            for weights in params:
                hidden = jnp.tanh(hidden @ weights)
            return jnp.mean(hidden**2)

        return [weights - 0.1 * grad for weights, grad in zip(params, jax.grad(loss)(params), strict=True)], None

    shapes = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3, jax.ShapeDtypeStruct((64, 64), jnp.float32)
    mesh = deepcompile.targets.h100(nodes=1).make_mesh((8,), ("fsdp",))
    traced = deepcompile.shard(step, mesh).trace(*shapes)
    compiled = traced.lower().compile().as_text()
    lines = str(traced.explain()).splitlines()
    (line,) = (line for line in lines if line.startswith("collectives a step, as compiled: "))
    told = dict(reversed(each.split()) for each in line.partition(": ")[2].split(", "))
    kinds = ("all-gather", "reduce-scatter", "all-reduce")
    launched = {kind: len(re.findall(rf" {kind}(?:-start)?\(", compiled)) for kind in kinds}
    assert told == {kind: str(count) for kind, count in launched.items() if count}
    assert launched["all-gather"] < 3
    assert "  all_gather over fsdp: 3 a step" in traced.explain()


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("passes", [None, ()])
@pytest.mark.parametrize("is_run", [True, False])
def test_once_compiled_what_runs_is_counted(passes, is_run):
    """XLA joins the reductions of all biases, here and on any platform; of so few on CPUs no plan foretells that."""

    def step(params, batch):
        def loss(params):
            hidden = batch @ params["weights"]
            return jnp.mean(hidden**2) + sum(jnp.mean(hidden * bias) for bias in params["biases"])

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), value

    state = {"weights": jnp.ones((64, 64)), "biases": [jnp.full(1, number / 10) for number in range(5)]}
    sharded = deepcompile.shard(step, {"fsdp": 8}, passes=passes)
    traced = sharded.trace(state, jnp.ones((64, 64)))
    assert ", as compiled" not in traced.explain()
    assert "collectives, as planned, before XLA joins any:" in traced.explain()
    compiled = sharded.reshard().lower(state, jnp.ones((64, 64))).compile().as_text()
    _ = sharded(state, jnp.ones((64, 64))) if is_run else traced.lower().compile()
    lines = str(sharded.explain()).splitlines()
    (line,) = (line for line in lines if line.startswith("collectives a step, as compiled: "))
    told = {kind: int(count) for count, kind in (each.split() for each in line.partition(": ")[2].split(", "))}
    assert told == {kind: len(re.findall(rf" {kind}\(", compiled)) for kind in told}
    (planned,) = (line for line in str(sharded.explain()).splitlines() if line.startswith("  all_reduce over "))
    assert told["all-reduce"] < int(planned.partition(": ")[2].split()[0])


@pytest.mark.pure
def test_the_decorator_says_what_it_was_asked_for():
    made = deepcompile.shard({"data": 2, "fsdp": 4}, microbatches=2)
    assert str(made).splitlines() == [
        "shard, to decorate a step",
        "  mesh          {'data': 2, 'fsdp': 4}",
        "  microbatches  2",
    ]
    assert repr(deepcompile.shard()) == "shard, to decorate a step"
    assert "0x" not in repr(made) + repr(deepcompile.shard(deepcompile.shard(train_step).mesh))
    assert made(train_step).mesh.axis_names == ("data", "fsdp")


@pytest.mark.pure
def test_a_table_of_what_is_shown():
    summary = Summary("Step <f>", (("mesh", "a=1 & b=2"), ("nothing", ""), ("lines", "\n".join("abcdefgh"))))
    assert str(summary) == "Step <f>\n  mesh   a=1 & b=2\n" + "  lines  a\n" + "".join(
        f"         {line}\n" for line in ("b", "c", "d", "e", "f", "… and 2 more")
    ).rstrip("\n")
    html = summary.html()
    assert "<caption>Step &lt;f&gt;</caption>" in html
    assert "a=1 &amp; b=2</td>" in html
    assert html.count("<tr>") == 2
    assert "a<br>b" in html
    step = deepcompile.shard(train_step, {"fsdp": 8})
    assert step._repr_html_() == step._summary().html()


def tree_rows(shown: str) -> list[str]:
    """What is in each row of the trees, without tags."""
    rows = re.findall(r"<b>(.*?)</b> <small>(.*?)</small>", shown)
    return [": ".join(filter(None, row)) for row in rows]


@pytest.mark.pure
def test_a_notebook_unfolds_the_state_with_its_shards_and_where_it_is_gathered(traced):
    """Whose arrays are shapes alone: there is none to touch."""
    step, stage = traced
    shown = stage._repr_html_()
    rows = tree_rows(shown)
    assert rows[0] == "state: 38 leaves, 46.8 KiB a device"
    assert "step: int32[] · replicate · 4 B a device" in rows
    key = "key/kernel, value/kernel: float32[3,32,2,8] · shard(1: fsdp) = [3,4,2,8] · 768 B a device"
    assert f"{key} · gathered: layers @forward, layers @backward" in rows
    assert key in rows, "moments are as parameters are, and are not gathered"
    assert "mu, nu: 12 leaves, 15.6 KiB a device" in rows
    assert shown.count("<details") == shown.count("</details>") > 3
    assert tree_rows(step._repr_html_()) == rows
    assert tree_rows(stage.sharded._repr_html_())[0] == rows[0]
    assert tree_rows(stage.program._repr_html_())[0] == "state: 38 leaves, 374.6 KiB in all"


@pytest.mark.pure
def test_a_plan_and_a_candidate_unfold_their_decisions(traced):
    plan = traced[1].plan().having(ReusedGathers, [ReusedGathers(("head/<b>",))])
    (row,) = (row for row in tree_rows(plan._repr_html_()) if "head/" in row)
    assert "head/&lt;b&gt;" in row
    candidate = deepcompile.Candidate(plan, traced[1].sharded)
    assert row in tree_rows(candidate._repr_html_())
    assert "expected step  not compiled" in repr(candidate)
    assert len(repr(candidate)) < MOST


@pytest.mark.pure
@pytest.mark.parametrize("names", ["layers_{}", "<i>{}", "&" * 100 + "{}"], ids=["plain", "a tag", "long"])
@pytest.mark.parametrize("different", [False, True])
def test_thousands_of_leaves_fold_and_stay_short(names: str, different: bool):
    leaves = [
        Leaf(f"s['{names.format(number)}']['{name}']", 4, (f"f32[{number * different}]",))
        for number in range(3000)
        for name in ("kernel", "bias", "a" * 5000)
    ]
    shown = tree_of(leaves).html()
    assert len(shown) < 200_000
    assert shown.count("<details") == shown.count("</details>")
    assert "<i>" not in shown
    rows = tree_rows(shown)
    assert rows[0] == "s: 9000 leaves, 35.2 KiB"
    assert ("more</div>" in shown) == different
    assert different or [row for row in rows if "and 2999 like it" in row]


@pytest.mark.pure
@pytest.mark.parametrize("path", ["", "s", "s" + "['a']" * 3000, "s['a" + "'" * 50 + "']", "(a, b)[1]['<script>']"])
def test_whatever_a_path_looks_like_it_is_a_tree(path: str):
    shown = tree_of([Leaf(path, 4, ("f32[]",)), Leaf("s['other']", 4, ("f32[1]",))]).html()
    assert "f32[]" in shown
    assert "<script>" not in shown
    assert len(shown) < 2000


@pytest.mark.pure
def test_long_values_are_cut():
    assert len(str(Summary("x", (("y", "z" * 10_000), ("w", "v " * 10_000))))) < MOST


@pytest.mark.pure
def test_texts_and_sizes():
    assert repr(Text("a\nb")) == "a\nb"
    assert Text("a") + "b" == "ab"
    assert [size_text(size) for size in (0, 1023, 1024, 3 << 40)] == ["0 B", "1023 B", "1.0 KiB", "3.0 TiB"]


@pytest.mark.pure
@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("{here}/models/llama.py:84 (call)", "models/llama.py:84 (call)"),
        ("/m.py:84 (call)", "/m.py:84 (call)"),
        ("/tmp/ipykernel_123/456789.py:5 (loss_of)", "a cell's line 5 (loss_of)"),
        ("an unknown line", "an unknown line"),
    ],
)
def test_lines_are_told_by_the_shorter_path(line: str, shown: str):
    assert line_text(line.format(here=Path.cwd())) == shown


@pytest.mark.pure
@pytest.mark.parametrize("microbatches", [1, 2])
def test_planned_the_tree_and_the_page_say_where_what_runs_gathers(microbatches):
    """Of loops that gather ahead, run iterations apart, and lose their names among microbatches."""
    scale = ("layers/attention_norm/scale",)
    decisions = [StackCollectives(f"layers @{phase}", scale) for phase in ("forward", "backward")]
    decisions += [LoopSchedule(f"layers @{phase}", last_layers=1) for phase in ("forward", "backward")]
    if microbatches > 1:
        decisions += [
            KeptGathers("microbatches", ("lm_head/kernel @forward", *scale, f"{scale[0]} @backward")),
            MicrobatchLoop("microbatches"),
        ]
    step = deepcompile.shard(train_step, {"fsdp": 8}, microbatches=microbatches, plan=Plan("", tuple(decisions)))
    stage = step.trace(jax.eval_shape(create, jax.random.key(0)), TOKENS)
    stage.plan()
    told = {leaf["name"]: leaf["gathered"] for leaf in leaves(stage.planned, stage.sharded)}
    once, in_layers = told["layers/attention_norm/scale"], told["layers/mlp_norm/scale"]
    assert {where.partition(" @")[0] for where in once} == {"outside of loops"}
    assert in_layers == ["layers @forward", "layers @backward"]
    assert told["lm_head/kernel"] == ["outside of loops @forward"]
    rows = tree_rows(stage._repr_html_())
    for name, where in (("attention_norm", once), ("mlp_norm", in_layers)):
        assert any(name in row and row.endswith(f"gathered: {', '.join(where)}") for row in rows)
