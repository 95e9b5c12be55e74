"""Plans that speak of what a program does not have are refused, with what may have been meant."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.names import value_names
from jax_deepcompile.ir import verifier
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.transforms.decision import Decision
from jax_deepcompile.transforms.delay_reductions import DelayedReductions
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from jax_deepcompile.transforms.microbatch_loops import MicrobatchLoop
from jax_deepcompile.transforms.offload_activations import OffloadedActivations
from jax_deepcompile.transforms.offload_parameters import OffloadedParameters
from jax_deepcompile.transforms.offload_values import OffloadedValues
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.prefetch import Prefetch, parameter_gathers
from jax_deepcompile.transforms.reduce_in_order import OrderedReductions
from jax_deepcompile.transforms.rematerialize import Rematerialized
from jax_deepcompile.transforms.rematerialize_segments import RematerializedSegments
from jax_deepcompile.transforms.save_gathered import SavedGathers
from jax_deepcompile.transforms.stack_collectives import StackCollectives
from jax_deepcompile.transforms.unshard import ReusedGathers
from tests.partition.steps import shapes, training_step
from tests.planner.situations import HEADED, START, UNROLLED, accumulating, unrolled_loss
from tests.transforms.programs import headed_loss, sharded, stack_loss, stack_shapes

pytestmark = pytest.mark.pure

AHEAD, BACK = "stack @forward", "stack @backward"
PROGRAM, MESH = sharded(headed_loss, HEADED)
MICROBATCHED, _ = accumulating(headed_loss, HEADED)
UNROLLED_PROGRAM, _ = sharded(unrolled_loss, UNROLLED)
NO_LOOP = r"a loop that step does not have; the nearest names: .*'stack @forward'"
THERE_ARE = "of which there is none there; the nearest names"


def refused(program, *decisions: Decision, why: str) -> None:
    with pytest.raises(errors.PlanError, match=f"the plan cannot be used: .*{why}"):
        Plan("0", decisions).program(program, MESH)


@pytest.mark.parametrize(
    ("decision", "what"),
    [
        (StackCollectives("stak @forward"), "takes collectives out of"),
        (SavedGathers("stak @forward", BACK, ("stack/up",)), "saves gathered what is gathered by"),
        (SavedGathers(AHEAD, "stak @forward", ("stack/up",)), "saves gathered parameters for"),
        (KeptActivations("stak @forward", BACK, ("layer tanh",)), "keeps activations of"),
        (KeptActivations(AHEAD, "stak @forward", ("layer tanh",)), "keeps activations of"),
        (KeptActivations("stak @forward", "stak @forward", ("layer tanh",)), "keeps activations of"),
        (LoopSchedule("stak @forward"), "pipelines"),
        (KeptGathers("stak @forward", ("head @forward",)), "keeps gathers over"),
        (DelayedReductions("stak @forward", ("head",)), "delays reductions of"),
        (MicrobatchLoop("stak @forward"), "says how to run"),
        (Rematerialized("stak @forward", BACK), "computes again what is made by"),
        (Rematerialized(AHEAD, "stak @forward"), "computes again what is read by"),
        (RematerializedSegments("stak @forward", ("layer",)), "computes segments again of"),
        (OffloadedActivations("stak @forward", BACK, ()), "copies to the host what is made by"),
        (OffloadedActivations(AHEAD, "stak @forward", ()), "copies to the host what is read by"),
        (OffloadedValues("stak @forward", ()), "copies to the host what is made by"),
    ],
)
def test_a_loop_that_is_not_there(decision: Decision, what: str):
    refused(PROGRAM, decision, why=f"it {what} 'stak @forward', {NO_LOOP}")


def test_a_program_without_loops_has_no_nearest_ones():
    refused(
        UNROLLED_PROGRAM,
        LoopSchedule(AHEAD),
        why="it pipelines 'stack @forward', a loop that step does not have\\. Drop it",
    )


@pytest.mark.parametrize(
    ("program", "decision", "why"),
    [
        (
            PROGRAM,
            StackCollectives(AHEAD, ("stack/ap",)),
            f"out of '{AHEAD}' the gather of 'stack/ap', {THERE_ARE}: .*'stack/up'",
        ),
        (PROGRAM, StackCollectives(BACK, (), ("head",)), f"out of '{BACK}' the reduction of 'head', {THERE_ARE}"),
        (
            PROGRAM,
            StackCollectives(AHEAD, (), ("stack/up",)),
            f"out of '{AHEAD}' the reduction of 'stack/up', of which there is none there",
        ),
        (PROGRAM, SavedGathers(AHEAD, BACK, ("head",)), f"'head', {THERE_ARE}"),
        (
            PROGRAM,
            KeptActivations(AHEAD, BACK, ("layer dot",)),
            f"it keeps from '{AHEAD}' 'layer dot', {THERE_ARE}: .*'layer dot_general'",
        ),
        (
            PROGRAM,
            KeptActivations("", "", ("layer tanh",)),
            "it keeps from code outside of loops 'layer tanh', of which there is none there",
        ),
        (
            PROGRAM,
            OffloadedActivations(AHEAD, BACK, ("stack inputs",)),
            f"from '{AHEAD}' to the host for '{BACK}' 'stack inputs', {THERE_ARE}: 'stack input'",
        ),
        (PROGRAM, OffloadedActivations(AHEAD, BACK, ("layer tanh",)), "'layer tanh', of which there is none there"),
        (PROGRAM, OffloadedValues("", ("layer tanh",)), "outside of loops, 'layer tanh', of which there is none"),
        (PROGRAM, OffloadedParameters(("stack/upp",)), f"'stack/upp', {THERE_ARE}: 'stack/up'"),
        (PROGRAM, OffloadedParameters(("opt_state/0/trace/stack/up",)), "of which there is none there"),
        (
            UNROLLED_PROGRAM,
            RematerializedSegments("", ("layer tan",)),
            "outside of loops, from 'layer tan', of which there is none there",
        ),
        (
            MICROBATCHED,
            KeptGathers("microbatches", ("head",)),
            f"over 'microbatches' the gather of 'head', {THERE_ARE}: 'head @forward'",
        ),
        (
            MICROBATCHED,
            DelayedReductions("microbatches", ("heads",)),
            f"in 'microbatches' the reduction of 'heads', {THERE_ARE}: 'head'",
        ),
        (
            MICROBATCHED,
            DelayedReductions(BACK, ("stack/up",)),
            f"in '{BACK}' the reduction of 'stack/up', of which there is none there",
        ),
        (
            UNROLLED_PROGRAM,
            ReusedGathers(("layer0/up @forward",)),
            f"until used again 'layer0/up @forward', {THERE_ARE}: 'layer0/up @backward'",
        ),
        (
            UNROLLED_PROGRAM,
            Prefetch("layer0/ap @forward", "x"),
            f"the gather of 'layer0/ap @forward', {THERE_ARE}: 'layer0/up @forward'",
        ),
        (
            UNROLLED_PROGRAM,
            Prefetch("layer2/up @forward", "layer dot_genera @forward"),
            f"after 'layer dot_genera @forward', {THERE_ARE}: 'layer dot_general @forward'",
        ),
    ],
)
def test_a_part_that_is_not_there(program, decision: Decision, why: str):
    refused(program, decision, why=why)


def test_the_gather_of_another_phase_is_another():
    refused(
        MICROBATCHED,
        KeptGathers("microbatches", ("head @backward",)),
        why=f"'head @backward', {THERE_ARE}: 'head @forward'",
    )


@pytest.mark.parametrize(
    ("program", "decisions", "why"),
    [
        (PROGRAM, [StackCollectives(AHEAD)] * 2, rf"what becomes of '{AHEAD}' twice \(stack_collectives\)"),
        (
            PROGRAM,
            [LoopSchedule(AHEAD), LoopSchedule(AHEAD, 0, 0)],
            rf"what becomes of '{AHEAD}' twice \(pipeline_loops\)",
        ),
        (PROGRAM, [SavedGathers(AHEAD, BACK, ()), SavedGathers(BACK, AHEAD, ())], "twice"),
        (PROGRAM, [KeptActivations("", "", ())] * 2, "what becomes of .*code outside of loops.* twice"),
        (PROGRAM, [Rematerialized(AHEAD, BACK)] * 2, rf"what becomes of '{AHEAD}' twice \(rematerialize\)"),
        (PROGRAM, [RematerializedSegments("", ())] * 2, "what becomes of code outside of loops twice"),
        (PROGRAM, [OffloadedActivations(AHEAD, BACK, ())] * 2, r"becomes of '.*' twice \(offload_activations\)"),
        (PROGRAM, [OffloadedValues("", ())] * 2, "what becomes of code outside of loops twice"),
        (MICROBATCHED, [KeptGathers("microbatches", ())] * 2, "what becomes of 'microbatches' twice"),
        (MICROBATCHED, [DelayedReductions("microbatches", ())] * 2, "what becomes of 'microbatches' twice"),
        (MICROBATCHED, [MicrobatchLoop("microbatches")] * 2, "what becomes of 'microbatches' twice"),
        (PROGRAM, [StackCollectives(AHEAD, ("stack/up", "stack/up"))], "the gather of 'stack/up' twice"),
        (PROGRAM, [StackCollectives(BACK, (), ("stack/up",) * 2)], "the reduction of 'stack/up' twice"),
        (PROGRAM, [KeptActivations(AHEAD, BACK, ("layer tanh",) * 2)], f"from '{AHEAD}' 'layer tanh' twice"),
        (PROGRAM, [OffloadedActivations(AHEAD, BACK, ("stack input",) * 2)], f"for '{BACK}' 'stack input' twice"),
        (PROGRAM, [OffloadedParameters(("stack/up", "stack/up"))], "twice"),
        (MICROBATCHED, [DelayedReductions("microbatches", ("head", "head"))], "the reduction of 'head' twice"),
        (MICROBATCHED, [KeptGathers("microbatches", ("head @forward",) * 2)], "the gather of 'head @forward' twice"),
        (UNROLLED_PROGRAM, [ReusedGathers(("layer0/up @backward",) * 2)], "'layer0/up @backward' twice"),
        (
            UNROLLED_PROGRAM,
            [Prefetch("layer2/up @forward", "layer dot_general @forward")] * 2,
            "'layer2/up @forward' twice",
        ),
    ],
)
def test_what_is_said_twice(program, decisions: list[Decision], why: str):
    refused(program, *decisions, why=why)


@pytest.mark.parametrize(
    ("program", "decision", "why"),
    [
        (PROGRAM, SavedGathers(BACK, AHEAD, ("stack/up",)), f"'{AHEAD}' does not follow '{BACK}' in the same place"),
        (
            PROGRAM,
            KeptActivations(BACK, AHEAD, ("layer tanh",)),
            f"'{AHEAD}' does not follow '{BACK}' in the same place",
        ),
        (PROGRAM, SavedGathers(AHEAD, AHEAD, ("stack/up",)), f"'{AHEAD}' does not follow '{AHEAD}' in the same place"),
        (PROGRAM, Rematerialized(BACK, AHEAD), f"'{AHEAD}' does not follow '{BACK}' in the same place"),
        (PROGRAM, Rematerialized(AHEAD, AHEAD), f"'{AHEAD}' does not follow '{AHEAD}' in the same place"),
        (PROGRAM, OffloadedActivations(BACK, AHEAD, ()), f"'{AHEAD}' does not follow '{BACK}' in the same place"),
        (PROGRAM, KeptActivations("", BACK, ()), "activations of '', a loop that step does not have"),
        (PROGRAM, OffloadedActivations(AHEAD, "", ()), "read by '', a loop that step does not have"),
        (MICROBATCHED, SavedGathers(AHEAD, "microbatches", ("stack/up",)), "in the same place"),
        (PROGRAM, LoopSchedule(AHEAD, prefetch_layers=-1), f"it pipelines '{AHEAD}' by -1 layers"),
        (PROGRAM, LoopSchedule(AHEAD, delay_layers=65), f"it pipelines '{AHEAD}' by 65 layers"),
        (PROGRAM, LoopSchedule(AHEAD, first_layers=1 << 62), f"it pipelines '{AHEAD}' by {1 << 62} layers"),
        (PROGRAM, LoopSchedule(AHEAD, last_layers=-1), f"it pipelines '{AHEAD}' by -1 layers"),
        (PROGRAM, MicrobatchLoop(AHEAD), f"it says how to run '{AHEAD}', which has no loops in it"),
        (
            MICROBATCHED,
            DelayedReductions("microbatches", (), True),
            f"first iteration of 'microbatches' apart, which has '{AHEAD}' in it",
        ),
        (PROGRAM, OrderedReductions(0), "its buckets of reductions have 0 bytes"),
        (PROGRAM, OrderedReductions(-1), "its buckets of reductions have -1 bytes"),
    ],
)
def test_what_makes_no_sense_there(program, decision: Decision, why: str):
    refused(program, decision, why=why)


@pytest.mark.parametrize(
    ("program", "decisions"),
    [
        (PROGRAM, []),
        (PROGRAM, [StackCollectives(AHEAD)]),
        (PROGRAM, [SavedGathers(AHEAD, BACK, ())]),
        (PROGRAM, [KeptActivations(AHEAD, BACK, ())]),
        (PROGRAM, [OffloadedActivations(AHEAD, BACK, ())]),
        (MICROBATCHED, [KeptGathers("microbatches", ()), ReusedGathers(())]),
        (MICROBATCHED, [DelayedReductions("microbatches", ())]),
    ],
)
def test_decisions_of_nothing_change_nothing(program, decisions: list[Decision]):
    assert Plan("0", tuple(decisions)).program(program, MESH) is program


def test_as_many_layers_as_are_allowed_are_no_error():
    program = Plan("0", (LoopSchedule(AHEAD, 0, 0, 64, 64),)).program(PROGRAM, MESH)
    assert program is not PROGRAM


@pytest.mark.parametrize("where", ["its own equation", "its first use", "nothing"])
def test_a_gather_waits_for_what_is_there_before_its_use(where: str):
    def loss(params, x):
        jax.debug.print("before")
        return jnp.mean(jnp.tanh(x @ params["up"]) ** 2)

    program, mesh = sharded(loss, {"up": (16, 64)})
    eqns, names = open_jaxpr(program.jaxpr).eqns, value_names(program.jaxpr, phased=True)
    (gather,) = parameter_gathers(program)
    (use,) = (eqn for eqn in eqns if gather.result in eqn.invars and eqn.primitive.name == "dot_general")
    after = {"its own equation": names[gather.result], "its first use": names[use.outvars[0]], "nothing": ""}[where]
    why = f"the gather of 'up @forward' after '{after}', " + (
        "of which" if where == "nothing" else "which it cannot wait"
    )
    with pytest.raises(errors.PlanError, match=why):
        Plan("0", (Prefetch("up @forward", after),)).program(program, mesh)


def test_a_plan_is_for_partitioned_programs():
    params, optimizer = shapes({"stack": stack_shapes()}), optax.sgd(0.1)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    step = deepcompile.shard(training_step(stack_loss, optimizer), {"fsdp": 8})
    with pytest.raises(errors.PlanError, match="carried out on the global view of step, which has no collectives"):
        START.program(step.trace(state, shapes((16, 16))).program, step.mesh)


def test_a_transform_that_makes_no_program_is_named(monkeypatch):
    def check(program):
        raise errors.InvariantError(1, "defined once", "two of them")

    monkeypatch.setattr(verifier, "_check", check)
    plan = Plan("0", (StackCollectives(AHEAD, ("stack/up",)),))
    with pytest.raises(
        errors.InvariantError, match=r"invariant 1 does not hold after stack_collectives \(defined once\)"
    ):
        plan.program(PROGRAM, MESH)
