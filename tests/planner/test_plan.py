"""Plans are values: they survive JSON, say how they differ, and are refused when they make no sense."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.lowering.compile import (
    combiner_options,
    double_buffering,
    memory_options,
    strictly_limited,
    two_collectives,
)
from jax_deepcompile.lowering.latencies import Latency
from jax_deepcompile.lowering.xla_options import (
    DOUBLE_BUFFERING,
    GATHER_COMBINER,
    MEMORY_SLOP,
    OVERLAP_LIMIT,
    REDUCE_COMBINER,
    SLICE_FUSION,
)
from jax_deepcompile.planner import apply
from jax_deepcompile.planner.apply import apply_plan
from jax_deepcompile.planner.cache import PlanCache, PlanCacheWarning
from jax_deepcompile.planner.plan import FORMAT, KeptGathers, Plan, Prediction, Record
from jax_deepcompile.transforms.delay_reductions import DelayedReductions
from jax_deepcompile.transforms.hand_over import HandOver
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from jax_deepcompile.transforms.prefetch import Prefetch, parameter_gathers
from jax_deepcompile.transforms.stack_collectives import StackCollectives
from tests.partition.steps import shapes, training_step
from tests.transforms.programs import sharded, stack_loss, stack_shapes
from tests.transforms.test_unshard import accumulating

pytestmark = pytest.mark.pure

EXPECTED = Prediction(1.25, 1.0, 0.5, 0.25, 10**9)
PLAN = Plan(
    "0123",
    stacks=(StackCollectives("scan.0", (0, 2), (1,)),),
    handed_over=(HandOver("scan.0", "scan.1", (1, 3)),),
    activations=(KeptActivations("scan.0", "scan.1", (0, 1, 2, 5)), KeptActivations("", "", (4, 5))),
    loops=(LoopSchedule("scan.0", 1, 0, 0, 3), LoopSchedule("scan.1", 1, 1, 3, 1)),
    kept=(KeptGathers("scan.2", (0, 4)),),
    delayed=(DelayedReductions("scan.2", (1, 2, 3), first_apart=True),),
    overlapped=("scan.2",),
    unsharded=(1,),
    prefetches=(Prefetch(3, 40),),
    reduction_bucket_bytes=128 << 20,
    options=((DOUBLE_BUFFERING, True), (GATHER_COMBINER, 1 << 20)),
    prediction=EXPECTED,
    records=(Record("pipeline_loops", "two loops", EXPECTED, None, False, "does not compile", 0.5),),
)


def test_json_gives_the_same_plan_back():
    assert Plan.from_json(PLAN.to_json()) == PLAN


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        PLAN.to_json()[:-20],
        PLAN.to_json().replace(f'"format": {FORMAT}', '"format": 99'),
        PLAN.to_json().replace("prefetch_layers", "prefetch_players"),
        PLAN.to_json().replace('"scan.0"', "7"),
        "[" * 200_000 + "]" * 200_000,
        PLAN.to_json().replace(": 1.25", f": {'9' * 401}"),
        PLAN.to_json().replace(": 1.25", f": {'9' * 5000}"),
        PLAN.to_json().replace(": 1.25", ": 1e999"),
        PLAN.to_json().replace(": 1.25", ": NaN"),
        PLAN.to_json().replace(": 1000000000", f": {2**63}"),
        PLAN.to_json().replace("does not compile", "\\ud800"),
        PLAN.to_json().replace('"loop"', '"\\ud800"'),
        PLAN.to_json().replace("true", '["\\ud800"]'),
        PLAN.replace(latencies=(Latency("fusion", 1.5),)).to_json().replace(": 1.5", ": -1.5"),
    ],
    ids=[
        *("empty", "no fields", "a list", "null", "cut off", "another format", "unknown key", "wrong type"),
        *("deep", "401 digits", "5000 digits", "infinite", "not a number", "65 bits"),
        *("half a character", "in a key", "in a wrong type", "before its start"),
    ],
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(
        errors.PlanError, match=r"somewhere.json cannot be used: it cannot be read .*planned anew"
    ) as it:
        Plan.from_json(text, "somewhere.json")
    assert str(it.value).encode()


def test_as_deep_as_can_be_parsed_is_refused_too():
    for depth in range(800, 1100):
        with pytest.raises(errors.PlanError, match="it cannot be read"):
            Plan.from_json(f'{{"format": {FORMAT}, "plan": {"[" * depth + "]" * depth}}}')


FOREIGN_OPTIONS = [
    ("xla_gpu_cuda_data_dir", "/tmp/theirs"),
    ("xla_dump_to", "/tmp/theirs"),
    ("xla_gpu_kernel_cache_file", "/tmp/theirs"),
    ("xla_gpu_pgle_profile_file_or_directory_path", "/tmp/theirs"),
    ("xla_gpu_autotune_level", 0),
    ("fdo_profile", "text"),
    ("", True),
    ("\x1b[31m", 1),
]
WRONG_VALUES = [
    (DOUBLE_BUFFERING, 1),
    (DOUBLE_BUFFERING, "true"),
    (OVERLAP_LIMIT, 0),
    (OVERLAP_LIMIT, True),
    (OVERLAP_LIMIT, 2**31),
    (MEMORY_SLOP, 0),
    (MEMORY_SLOP, 2**31),
    (GATHER_COMBINER, -1),
    (REDUCE_COMBINER, "/tmp/theirs"),
]


@pytest.mark.parametrize(("name", "value"), [*FOREIGN_OPTIONS, *WRONG_VALUES])
def test_a_plan_sets_what_planning_sets_and_nothing_else(tmp_path, name, value):
    """XLA runs ``bin/ptxas`` in the folder that one option names, and writes where others say."""
    what = rf"it sets the XLA option {re.escape(repr(name))}, and plans set xla_gpu_enable.* only; .* XLA_FLAGS"
    match = what if (name, value) in FOREIGN_OPTIONS else rf"it sets {name} to {value!r}, which takes (a whole|True or)"
    for make in (lambda: Plan("0", options=((name, value),)), lambda: PLAN.replace(options={name: value})):
        with pytest.raises(errors.PlanError, match=f"the plan cannot be used: {match}"):
            make()
    document = json.loads(PLAN.to_json())
    document["plan"]["options"] = [[name, value]]
    with pytest.raises(errors.PlanError, match=f"their.json cannot be used: {match}"):
        Plan.from_json(json.dumps(document), "their.json")
    cache = PlanCache(tmp_path)
    cache.store(PLAN)
    (tmp_path / "plans" / "0123.json").write_text(json.dumps(document))
    with pytest.warns(PlanCacheWarning, match=match):
        assert cache.load("0123") is None


@pytest.mark.parametrize(
    "options",
    [
        double_buffering(),
        {SLICE_FUSION: False},
        two_collectives(),
        combiner_options(0, 2**40),
        memory_options(72 << 30, 25 << 30, 80 << 30),
        memory_options(72 << 30, (64 << 30) - 1, 80 << 30),
        strictly_limited(memory_options(2, 1, 80 << 30)),
    ],
)
def test_what_planning_sets_may_be_set(options):
    plan = Plan("0").replace(options=options)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.compiler_options() == options


def test_a_plan_can_be_edited_by_hand():
    edited = PLAN.replace(options={DOUBLE_BUFFERING: False, GATHER_COMBINER: 1}, unsharded=())
    assert edited.options == ((GATHER_COMBINER, 1), (DOUBLE_BUFFERING, False))
    assert "- repeated gathers 1: reuse the first" in PLAN.diff(edited).splitlines()
    assert f"+ option {DOUBLE_BUFFERING} = False" in PLAN.diff(edited).splitlines()
    in_order = "reductions follow one another, 128 MiB at a time"
    assert f"- {in_order}" in PLAN.diff(PLAN.replace(reduction_bucket_bytes=0)).splitlines()
    assert "- gather 3: starts after equation 40" in PLAN.diff(PLAN.replace(prefetches=())).splitlines()
    delayed = "loop scan.2: sums 1 to 3 reduced in the next iteration, first iteration apart"
    assert f"- {delayed}" in PLAN.diff(PLAN.replace(delayed=())).splitlines()
    assert PLAN.diff(PLAN) == ""


def test_a_plan_reads_in_words():
    assert str(Plan("0")) == "fully sharded, nothing more"
    assert str(PLAN).splitlines()[:5] == [
        "loop scan.0: gathers 0, 2 and reductions 1 outside, for all layers",
        "loops scan.0 and scan.1: 1, 3 gathered by the first only",
        "loops scan.0 and scan.1: activations 0 to 2, 5 computed once",
        "outside of loops: activations 4, 5 computed once",
        "loop scan.0: gathers 1 layer ahead, reduces 0 behind, first 0 and last 3 layers apart",
    ]


def test_a_plan_that_says_nothing_changes_nothing():
    program, mesh = sharded(stack_loss, {"stack": stack_shapes()})
    assert apply_plan(program, mesh, Plan("0")) is program
    assert apply_plan(program, mesh, Plan("0", loops=choose_schedules(program))) is not program


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan("0", loops=(LoopSchedule("scan.9"),)), "it speaks of scan.9, which the program does not have"),
        (Plan("0", unsharded=(7,)), "it keeps repeated gather 7 of 0"),
        (Plan("0", prefetches=(Prefetch(7, 1),)), "it starts gather 7 of 0"),
        (
            Plan("0", kept=(KeptGathers("scan.9", (0,)),)),
            "it keeps gathers over scan.9, which the program does not have",
        ),
        (Plan("0", kept=(KeptGathers("scan.0", (5,)),)), "it keeps gather 5 of 0 over scan.0"),
        (Plan("0", stacks=(StackCollectives("scan.0", (3,)),)), "it takes gather 3 of 3 out of scan.0"),
        (Plan("0", stacks=(StackCollectives("scan.0", (), (2,)),)), "it takes reduction 2 of 0 out of scan.0"),
        (Plan("0", stacks=(StackCollectives("scan.0"),) * 2), "it takes collectives out of scan.0 twice"),
        (Plan("0", handed_over=(HandOver("scan.0", "scan.1", (-1,)),)), "it hands over gather -1 of 3 from scan.0"),
        (Plan("0", handed_over=(HandOver("scan.1", "scan.0", (0,)),)), "scan.0 does not follow scan.1 in the same"),
        (Plan("0", loops=(LoopSchedule("scan.0"),) * 2), "it pipelines scan.0 twice"),
        (Plan("0", loops=(LoopSchedule("scan.0", prefetch_layers=-1),)), "it pipelines scan.0 by -1 layers"),
        (Plan("0", loops=(LoopSchedule("scan.0", first_layers=1 << 62),)), f"it pipelines scan.0 by {1 << 62} layers"),
        (Plan("0", stacks=(StackCollectives("scan.0", (1 << 62,)),)), f"it takes gather {1 << 62} of 3 out of scan.0"),
        (Plan("0", activations=(KeptActivations("scan.0", "scan.1", (-1,)),)), "it keeps activation -1 of"),
        (
            Plan("0", activations=(KeptActivations("", "", (0,)),)),
            "it keeps activation 0 of 0 of code outside of loops",
        ),
        (Plan("0", delayed=(DelayedReductions("scan.9", (0,)),)), "it speaks of scan.9, which the program does not"),
        (Plan("0", delayed=(DelayedReductions("scan.1", ()),) * 2), "it delays reductions of scan.1 twice"),
        (Plan("0", delayed=(DelayedReductions("scan.1", (3, 3)),)), "it delays in scan.1 what is added to sum 3 twice"),
        (Plan("0", delayed=(DelayedReductions("scan.1", (0,)),)), "it delays what scan.1 adds to sum 0, where nothing"),
        (Plan("0", reduction_bucket_bytes=-1), "its buckets of reductions have -1 bytes"),
    ],
)
def test_a_plan_for_another_program_is_refused(plan, why):
    program, mesh = sharded(stack_loss, {"stack": stack_shapes()})
    with pytest.raises(errors.PlanError, match=why):
        apply_plan(program, mesh, plan)


@pytest.mark.parametrize("where", ["its own equation", "its first use", "nothing"])
def test_a_gather_waits_for_what_is_there_before_its_use(where: str):
    def loss(params, x):
        jax.debug.print("before")
        return jnp.mean(jnp.tanh(x @ params["up"]) ** 2)

    program, mesh = sharded(loss, {"up": (16, 64)})
    eqns = open_jaxpr(program.jaxpr).eqns
    (gather,) = parameter_gathers(program)
    own = next(place for place, eqn in enumerate(eqns) if gather.result in eqn.outvars)
    use = next(place for place, eqn in enumerate(eqns) if gather.result in eqn.invars)
    nothing = next(place for place, eqn in enumerate(eqns) if not eqn.outvars)
    after = {"its own equation": own, "its first use": use, "nothing": nothing}[where]
    with pytest.raises(errors.PlanError, match=f"it starts gather 0 after equation {after}, which cannot be waited"):
        apply_plan(program, mesh, Plan("0", prefetches=(Prefetch(0, after),)))


def test_a_plan_is_for_partitioned_programs():
    params, optimizer = shapes({"stack": stack_shapes()}), optax.sgd(0.1)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    step = deepcompile.shard(training_step(stack_loss, optimizer), {"fsdp": 8})
    with pytest.raises(errors.PlanError, match="carried out on the global view of step, which has no collectives"):
        apply_plan(step.trace(state, shapes((16, 16))).program, step.mesh, PLAN)


def test_a_pass_that_makes_no_program_is_named(monkeypatch):
    def verify(program):
        raise errors.InvariantError(1, "defined once", "two of them")

    program, mesh = sharded(stack_loss, {"stack": stack_shapes()})
    monkeypatch.setattr(apply, "verify", verify)
    with pytest.raises(
        errors.InvariantError, match=r"invariant 1 does not hold after stack_collectives \(defined once\)"
    ):
        apply_plan(program, mesh, Plan("0", stacks=(StackCollectives("scan.0", (0,)),)))


def test_an_edited_plan_has_no_prediction():
    predicted = PLAN.replace(prediction=Prediction(1.0, 1.0, 0.0, 0.0, 100))
    assert predicted.prediction is not None
    assert predicted.replace(records=()).prediction is predicted.prediction
    assert predicted.replace(unsharded=(1,)).prediction is None


def test_positions_are_of_the_program_that_the_decisions_before_them_make():
    assert PLAN.replace(loops=()) == PLAN.replace(loops=(), delayed=(), unsharded=(), prefetches=())
    assert PLAN.replace(delayed=()) == PLAN.replace(delayed=(), unsharded=(), prefetches=())
    assert PLAN.replace(unsharded=()) == PLAN.replace(unsharded=(), prefetches=())
    assert PLAN.replace(loops=(), prefetches=PLAN.prefetches).prefetches == PLAN.prefetches
    for change in ({"prefetches": ()}, {"latencies": ()}, {"reduction_bucket_bytes": 0}):
        assert PLAN.replace(**change).unsharded == PLAN.unsharded


def test_a_first_iteration_with_loops_in_it_is_not_apart():
    program, mesh = accumulating(stack_loss, {"stack": stack_shapes()})
    plan = Plan("0", delayed=(DelayedReductions("scan.0", (), first_apart=True),))
    with pytest.raises(errors.PlanError, match=r"first iteration of scan\.0 apart, which has scan\.0/scan\.0 in it"):
        apply_plan(program, mesh, plan)
