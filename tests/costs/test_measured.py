"""What was measured goes before the tables; what was not is theirs."""

from __future__ import annotations

import pytest

from jax_deepcompile import errors
from jax_deepcompile.costs.cost_model import CostModel, Direction
from jax_deepcompile.costs.entries import (
    Axis,
    CollectiveFit,
    CollectiveKind,
    CopyDirection,
    CopyFit,
    LinearFit,
    Machine,
    Method,
    Source,
    analytical,
)
from jax_deepcompile.costs.measured import MeasuredCostModel
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.planning.session import Wishes, plan_program
from tests.passes.programs import sharded, stack_loss, stack_shapes

pytestmark = pytest.mark.pure

MEASURED = Source(Method.MEASURED, "2026-11-21", 5)
FIT = LinearFit(1e-3, 1e-9, 0.0, ((1024, 1e-3), (1 << 20, 2e-3)))
PROFILE = Profile(
    "0",
    Machine("a GPU", (Axis("data", 2), Axis("fsdp", 4)), ()),
    collectives=(
        CollectiveFit(CollectiveKind.ALL_GATHER, ("fsdp",), FIT, MEASURED),
        CollectiveFit(CollectiveKind.REDUCE_SCATTER, ("fsdp",), None, analytical("too little memory")),
    ),
    copies=(CopyFit(CopyDirection.TO_HOST, FIT, MEASURED),),
)
COSTS = MeasuredCostModel(profile=PROFILE)


def test_measured_collectives_and_copies_are_used():
    assert COSTS.collective_s("all-gather", 1 << 20, 4, 4) == FIT.seconds(1 << 20)
    assert COSTS.copy_s(1 << 20, Direction.TO_HOST) == FIT.seconds(1 << 20)


@pytest.mark.parametrize(
    ("kind", "group_size"), [("reduce-scatter", 4), ("all-reduce", 4), ("all-gather", 2), ("all-gather", 8)]
)
def test_other_collectives_come_from_the_tables(kind, group_size):
    expected = CostModel().collective_s(kind, 1 << 20, group_size, group_size)
    assert COSTS.collective_s(kind, 1 << 20, group_size, group_size) == expected


def test_other_work_comes_from_the_tables():
    assert COSTS.copy_s(1 << 20, Direction.FROM_HOST) == CostModel().copy_s(1 << 20, Direction.FROM_HOST)
    assert COSTS.memory_s(1 << 20) == CostModel().memory_s(1 << 20)


def test_a_profile_of_other_devices_is_refused():
    program, mesh = sharded(stack_loss, {"stack": stack_shapes()})
    with pytest.raises(errors.ProfileMismatchError, match="the profile is of another device kind"):
        plan_program(program, mesh, "cpu", Wishes(profile=PROFILE))
