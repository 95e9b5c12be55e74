"""The table of XLA's options: which XLA knows them, and what a plan may set."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_deepcompile import Plan, errors, targets
from jax_deepcompile.lowering import xla_options
from jax_deepcompile.lowering.compile import compile_options, kernel_options
from jax_deepcompile.lowering.xla_options import (
    DOUBLE_BUFFERING,
    OPTIONS,
    OVERLAP_LIMIT,
    OneOf,
    Option,
    Range,
    installed,
    known,
    objection_to,
)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("jaxlib", "is_known"),
    [((0, 9), False), ((0, 10), True), ((0, 11), True), ((0, 11, 2), True), ((0, 12), False)],
)
def test_an_option_is_known_from_one_version_to_another(jaxlib, is_known):
    assert Option("xla_gpu_some", bool, until=(0, 11)).is_known_to(jaxlib) is is_known


@pytest.mark.pure
def test_the_installed_xla_knows_every_option():
    options = dict.fromkeys(OPTIONS, True)
    with warnings.catch_warnings(action="error"):
        assert known(options) == options
    assert installed() >= (0, 10)


@pytest.mark.pure
def test_what_xla_does_not_know_is_left_out_aloud(monkeypatch):
    monkeypatch.setattr(xla_options, "installed", lambda: (0, 9))
    plan = Plan("0", options=((DOUBLE_BUFFERING, True), (OVERLAP_LIMIT, 2)))
    with pytest.warns(errors.UnknownXlaOptionWarning) as said:
        assert plan.compiler_options() == {}
    assert [str(each.message) for each in said] == [
        f"XLA of jaxlib 0.9 does not know the option {name}, and compiles without it: what the plan expects of it may "
        f"not come true."
        for name in (DOUBLE_BUFFERING, OVERLAP_LIMIT)
    ]


@pytest.mark.pure
def test_options_of_others_are_theirs(monkeypatch):
    monkeypatch.setattr(xla_options, "installed", lambda: (0, 9))
    assert known({"xla_gpu_of_the_user": 1}) == {"xla_gpu_of_the_user": 1}


def possible(option: Option) -> tuple:
    """The least and the most that it takes, or all there is."""
    match option.takes:
        case Range(least, most):
            return least, most
        case OneOf(values):
            return values
        case takes:
            return takes(0), takes(1)


@pytest.mark.pure
@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_a_plan_sets_what_planning_chooses(option):
    value = possible(option)[-1]
    assert not option.objection_to(value)
    assert bool(objection_to(option.name, value)) is not option.is_planned
    assert objection_to(option.name, None)


@pytest.mark.h100_aot
def test_xla_takes_every_option_with_the_least_and_the_most_of_its_values(tmp_path):
    mesh = targets.h100(1, 1).make_mesh((1,), ("fsdp",))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    lowered = jax.jit(lambda x: x + 1).trace(x).lower(lowering_platforms=("cuda",))
    base = compile_options("cuda") | kernel_options("cuda", tmp_path / "kernels")
    for option in OPTIONS.values():
        for value in possible(option) if option.takes is not str else ():
            assert lowered.compile(compiler_options={**base, option.name: value}).as_text()
