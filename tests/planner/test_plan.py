"""Plans are values: they survive JSON, say how they differ, and are refused when they make no sense."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from jax_deepcompile import errors
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
from jax_deepcompile.planner.cache import PlanCache, PlanCacheWarning
from jax_deepcompile.planner.layers import AROUND_PIPELINED
from jax_deepcompile.planner.plan import FORMAT, Plan, Prediction, Record
from jax_deepcompile.transforms import TRANSFORMS
from jax_deepcompile.transforms.accumulate_in_loops import AccumulateInLoops
from jax_deepcompile.transforms.compute_whole import ComputedWhole
from jax_deepcompile.transforms.delay_reductions import DelayedReductions
from jax_deepcompile.transforms.gradients_in_turn import GradientsInTurn
from jax_deepcompile.transforms.join_collectives import JoinedCollectives
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from jax_deepcompile.transforms.keep_on_device import KeptOnDevice
from jax_deepcompile.transforms.microbatch_loops import MicrobatchLoop
from jax_deepcompile.transforms.offload_activations import OffloadedActivations
from jax_deepcompile.transforms.offload_parameters import OffloadedParameters
from jax_deepcompile.transforms.offload_state import OffloadedState
from jax_deepcompile.transforms.offload_values import OffloadedValues
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.prefetch import Prefetch
from jax_deepcompile.transforms.products_after_loops import ProductsAfterLoop
from jax_deepcompile.transforms.reduce_in_order import OrderedReductions
from jax_deepcompile.transforms.rematerialize import Rematerialized
from jax_deepcompile.transforms.rematerialize_segments import RematerializedSegments
from jax_deepcompile.transforms.save_gathered import SavedGathers
from jax_deepcompile.transforms.stack_collectives import StackCollectives
from jax_deepcompile.transforms.unshard import ReusedGathers
from jax_deepcompile.transforms.update_in_loops import UpdatedInLoop
from tests.planner.situations import HEADED, START, in_pipelines
from tests.transforms.programs import assert_same_values, headed_loss, sharded

pytestmark = pytest.mark.pure

EXPECTED = Prediction(1.25, 1.0, 0.5, 0.25, 10**9)
AHEAD, BACK = "layers @forward", "layers @backward"
DECISIONS = (
    KeptOnDevice(),
    ProductsAfterLoop("time"),
    Rematerialized(AHEAD, BACK),
    RematerializedSegments("", ("head add @forward",)),
    StackCollectives(AHEAD, ("norm", "bias"), ("bias",)),
    SavedGathers(AHEAD, BACK, ("up", "down")),
    KeptActivations(AHEAD, BACK, ("mlp dot_general", "mlp tanh")),
    KeptActivations("", "", ("head dot_general @forward",)),
    OffloadedActivations(AHEAD, BACK, ("layers input",)),
    OffloadedValues("", ("head add @forward",)),
    GradientsInTurn("", 1 << 30),
    *AROUND_PIPELINED,
    UpdatedInLoop(BACK, ("optimizer/mu/up",)),
    LoopSchedule(AHEAD, 1, 0, 0, 3),
    LoopSchedule(BACK, 1, 1, 2, 1),
    KeptGathers("microbatches", ("head @forward", "head @backward")),
    DelayedReductions("microbatches", ("embed", "head"), first_apart=True),
    MicrobatchLoop("microbatches", overlap=True),
    ReusedGathers(("head @backward",)),
    Prefetch("head @forward", "mlp dot_general #2 @forward"),
    OrderedReductions(128 << 20),
    ComputedWhole(16 << 10),
    JoinedCollectives(32 << 10, 64 << 10),
    OffloadedParameters(("layers/up/kernel",)),
    OffloadedState(("optimizer/mu/up", "optimizer/nu/up")),
)
PLAN = Plan(
    "0123",
    DECISIONS,
    options=((DOUBLE_BUFFERING, True), (GATHER_COMBINER, 1 << 20)),
    prediction=EXPECTED,
    records=(Record("pipeline_loops", "two loops", EXPECTED, None, False, "does not compile", 0.5),),
)


def test_every_kind_is_in_the_plan_of_these_tests():
    assert set(map(type, DECISIONS)) == set(TRANSFORMS)
    assert len({kind.kind for kind in TRANSFORMS}) == len(TRANSFORMS)


def test_decisions_stand_in_the_order_in_which_they_are_carried_out():
    kinds = [TRANSFORMS.index(type(each)) for each in PLAN.decisions]
    assert kinds == sorted(kinds)
    assert Plan("0", DECISIONS[::-1]).of(LoopSchedule) == PLAN.of(LoopSchedule)[::-1]


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
        PLAN.to_json().replace(f'"{AHEAD}"', "7"),
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


def edited(change: Callable[[Any], None]) -> str:
    """The JSON of ``PLAN`` after ``change`` was made to it, or to what stands there instead."""
    document = json.loads(PLAN.to_json())
    change(document)
    return json.dumps(document)


def stacking(**fields: Any) -> Callable[[Any], None]:
    """Changes fields of the second decision, ``stack_collectives``; None takes them away."""

    def change(document: Any) -> None:
        decision = document["decisions"][4]
        decision.update(fields)
        for name in [name for name, value in fields.items() if value is None]:
            del decision[name]

    return change


def without_after(document: Any) -> None:
    (prefetch,) = (each for each in document["decisions"] if each["kind"] == "prefetch")
    del prefetch["after"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            stacking(kind="stack_collective"),
            r"decisions\[4\].kind: 'stack_collective' is none; .*: 'stack_coll",
        ),
        (stacking(kind="__class__"), "'__class__' is none"),
        (stacking(kind="\x1b[31m" + "k" * 10**6), r"'\\x1b\[31mk+ is none"),
        (stacking(kind=None), "None is none"),
        (stacking(kind=7), "7 is none"),
        (stacking(kind=["stack_collectives"]), r"\['stack_collectives'\] is none"),
        (stacking(kind={"kind": 1}), "{'kind': 1} is none"),
        (stacking(loop=None), r"decisions\[4\] \(stack_collectives\): loop: missing"),
        (stacking(loop=7), r"decisions\[4\] \(stack_collectives\): loop: .*str.* 7"),
        (stacking(loop=True), "loop: .*str.* True"),
        (stacking(gathers="up"), "gathers: .*'up'"),
        (stacking(gathers=[["up"]]), r"gathers\[0\]: .*str"),
        (stacking(gathers=[0]), r"gathers\[0\]: .*str"),
        (stacking(follows=[]), r"'?follows'?: an unknown key"),
        (stacking(reductions={"0": "up"}), "reductions: "),
        (without_after, r"\(prefetch\): after: missing"),
        (lambda document: document.pop("decisions"), "decisions: expected a list"),
        (lambda document: document.update(decisions=None), "decisions: expected a list"),
        (lambda document: document.update(decisions={"0": document["decisions"][0]}), "decisions: expected a list"),
        (lambda document: document["decisions"].insert(0, []), r"decisions\[0\].kind: None is none"),
        (lambda document: document["decisions"].insert(0, "prefetch"), r"decisions\[0\].kind: None is none"),
        (lambda document: document.pop("latencies"), "latencies: missing"),
        (lambda document: document.update(loops=[]), "loops'?: an unknown key"),
    ],
)
def test_what_is_no_decision_is_refused_and_said_where(change, why):
    with pytest.raises(errors.PlanError, match=rf"somewhere.json cannot be used: it cannot be read \(.*{why}") as it:
        Plan.from_json(edited(change), "somewhere.json")
    assert len(str(it.value)) < 1000
    assert "\x1b" not in str(it.value)


def test_kinds_of_ones_own_are_read_where_they_are_known():
    kinds = [kind for kind in TRANSFORMS if kind is not AccumulateInLoops]
    with pytest.raises(errors.PlanError, match="'accumulate_in_loops' is none"):
        Plan.from_json(PLAN.to_json(), decisions=kinds)
    assert Plan.from_json(PLAN.without(AccumulateInLoops).to_json(), decisions=kinds).of(LoopSchedule)


def test_as_deep_as_can_be_parsed_is_refused_too():
    for depth in range(800, 1100):
        for where in ("decisions", "records"):
            with pytest.raises(errors.PlanError, match="it cannot be read"):
                Plan.from_json(f'{{"format": {FORMAT}, "{where}": {"[" * depth + "]" * depth}}}')


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
    theirs = edited(lambda document: document.update(options=[[name, value]]))
    with pytest.raises(errors.PlanError, match=f"their.json cannot be used: {match}"):
        Plan.from_json(theirs, "their.json")
    cache = PlanCache(tmp_path)
    cache.store(PLAN)
    (tmp_path / "plans" / "0123.json").write_text(theirs)
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


def test_a_plan_says_what_was_changed():
    changed = PLAN.without(ReusedGathers).replace(options={DOUBLE_BUFFERING: False, GATHER_COMBINER: 1})
    assert changed.options == ((GATHER_COMBINER, 1), (DOUBLE_BUFFERING, False))
    assert PLAN.diff(changed).splitlines() == [
        "- stay gathered: head @backward",
        "- gather of head @forward: starts after mlp dot_general #2 @forward",
        f"- option {DOUBLE_BUFFERING} = True",
        f"- option {GATHER_COMBINER} = {1 << 20}",
        f"+ option {GATHER_COMBINER} = 1",
        f"+ option {DOUBLE_BUFFERING} = False",
    ]
    assert PLAN.diff(PLAN) == ""


def test_a_plan_reads_in_words():
    assert str(START) == "fully sharded, nothing more"
    assert str(PLAN.replace(options=(), latencies=(Latency("fusion", 1.5),))).splitlines() == [
        "what the step copies to the host by itself stays on the device",
        "time: products that it adds up are one product after it",
        "layers @backward: computes again what it reads of layers @forward, of each layer's input",
        "outside of loops: backward computes again what it reads, from head add @forward",
        "layers @forward: gathers norm, bias and reduces bias for all layers at once, outside of the loop",
        "layers @forward: saves up, down gathered for layers @backward",
        "layers @forward: keeps mlp dot_general, mlp tanh for layers @backward",
        "outside of loops: keeps head dot_general @forward until they are used again",
        "layers @forward: copies layers input to the host for layers @backward",
        "outside of loops: copies head add @forward to the host for backward",
        "outside of loops: backward waits for gradients that hold 1024 MiB",
        "sums that results of loops go into are added up in those loops",
        "layers @backward: updates the state of a layer as its gradients are there, on the host: optimizer/mu/up",
        "gradients of layers stay in the type they were reduced in",
        "in the host's memory, copied a layer ahead of its use: layers/up/kernel",
        "layers @forward: gathers a layer ahead, runs its last 3 layers apart",
        "layers @backward: gathers a layer ahead, reduces a layer behind, runs its first 2 layers apart, "
        "runs its last layer apart",
        "what is at hand is not computed or read again",
        "gradients that are ready before a loop are reduced before it",
        "microbatches: gathers head @forward, head @backward once",
        "what is needed after a loop is gathered after it",
        "microbatches: reduces embed, head in the next iteration, runs its first iteration apart",
        "microbatches: forward of the next iteration beside backward",
        "stay gathered: head @backward",
        "gather of head @forward: starts after mlp dot_general #2 @forward",
        "reductions follow one another, 128 MiB at a time",
        "values of up to 16 KiB that are reduced to be gathered are computed whole",
        "gathers of up to 32 KiB go together, and reductions of up to 64 KiB",
        "in the host's memory between steps: optimizer/mu/up, optimizer/nu/up",
        "scheduled by latencies of the cost model",
    ]


def test_an_edited_plan_has_no_prediction():
    predicted = PLAN.replace(prediction=Prediction(1.0, 1.0, 0.0, 0.0, 100))
    assert predicted.prediction is not None
    assert predicted.replace(records=()).prediction is predicted.prediction
    assert predicted.having(MicrobatchLoop, predicted.of(MicrobatchLoop)) is predicted
    assert predicted.without(ReusedGathers).prediction is None


def test_a_plan_edited_by_hand_has_no_prediction_and_may_leave_out_what_has_a_default():
    data = json.loads(PLAN.replace(prediction=EXPECTED).to_json())
    assert Plan.from_json(json.dumps(data, indent=4)).prediction == EXPECTED
    data["decisions"] = [{"kind": LoopSchedule.kind, "loop": AHEAD}]
    edited = Plan.from_json(json.dumps(data))
    assert (edited.decisions, edited.prediction, edited.records) == ((LoopSchedule(AHEAD),), None, ())
    del data["decisions"][0]["loop"]
    with pytest.raises(errors.PlanError, match=r"decisions\[0\] \(pipeline_loops\): loop: missing"):
        Plan.from_json(json.dumps(data))


NAMED_LATER = {DelayedReductions, ReusedGathers, Prefetch}


@pytest.mark.parametrize(
    ("kind", "dropped"),
    [
        (StackCollectives, NAMED_LATER),
        (SavedGathers, NAMED_LATER),
        (Rematerialized, {RematerializedSegments, KeptActivations, OffloadedActivations}),
        (RematerializedSegments, {KeptActivations, OffloadedActivations, OffloadedValues}),
        (KeptActivations, NAMED_LATER | {OffloadedActivations, OffloadedValues}),
        (LoopSchedule, NAMED_LATER),
        (KeptGathers, NAMED_LATER),
        (DelayedReductions, {ReusedGathers, Prefetch}),
        (MicrobatchLoop, {ReusedGathers, Prefetch}),
        (ReusedGathers, {Prefetch}),
        (Prefetch, set()),
        (OrderedReductions, set()),
        (AccumulateInLoops, set()),
    ],
)
def test_what_names_parts_that_others_made_goes_with_them(kind, dropped):
    gone = set(map(type, DECISIONS)) - set(map(type, PLAN.without(kind).decisions))
    assert gone == {kind, *dropped}


def test_a_plan_that_says_nothing_changes_nothing():
    program, mesh = sharded(headed_loss, HEADED)
    assert START.program(program, mesh) is program
    planned = in_pipelines(program)
    assert planned.program(program, mesh) is not program
    assert planned.program(program, mesh, until=SavedGathers) is program


@pytest.mark.cpu_mesh
def test_a_plan_edited_by_hand_as_json_is_carried_out():
    program, mesh = sharded(headed_loss, HEADED)
    document = json.loads(in_pipelines(program).to_json())
    schedules = [each for each in document["decisions"] if each["kind"] == "pipeline_loops"]
    schedules[0]["last_layers"] = 2
    handed = {
        "kind": "save_gathered",
        "forward": "stack @forward",
        "backward": "stack @backward",
        "gathers": ["stack/up"],
    }
    document["decisions"] = [*schedules, handed]
    plan = Plan.from_json(json.dumps(document))
    assert plan.decisions == (
        SavedGathers("stack @forward", "stack @backward", ("stack/up",)),
        LoopSchedule("stack @forward", 1, 0, 0, 2),
        LoopSchedule("stack @backward", 1, 1, 1, 1),
    )
    assert_same_values(plan.program(program, mesh), program, mesh)
