"""A reshape of blocks is the block of the reshape, for every way to split it; and no way is missed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_deepcompile.ir.placement import MeshAxes, Placement
from jax_deepcompile.partition.rules.base import Kind, OpRule, RuleBuilder
from jax_deepcompile.partition.rules.shape import common_factors
from tests.cases import examples
from tests.partition.rules.harness import legal_ways

pytestmark = pytest.mark.pure

MESHES = (MeshAxes(("x",), (2,)), MeshAxes(("x",), (4,)), MeshAxes(("x", "y"), (2, 4)), MeshAxes(("x", "y"), (3, 2)))


def rule_of(source: Sequence[int], target: Sequence[int]) -> OpRule:
    builder = RuleBuilder()
    operand, result = common_factors(builder, source, target)
    return builder.build([operand], [result])


def block(value: np.ndarray, placement: Placement, mesh: MeshAxes, device: Sequence[int]) -> np.ndarray:
    for dim in range(value.ndim):
        for axis in placement.axes_of(dim):
            value = np.split(value, mesh.sizes[axis], dim)[device[axis]]
    return value


def agrees(source, target, mesh: MeshAxes, operand: Placement, result: Placement) -> bool:
    """Whether every device's block of the result is its block of the operand, reshaped."""
    value = np.arange(math.prod(source)).reshape(source)
    for device in itertools.product(*map(range, mesh.sizes)):
        there = block(value.reshape(target), result, mesh, device)
        here = block(value, operand, mesh, device)
        if here.size != there.size or not np.array_equal(here.reshape(there.shape), there):
            return False
    return True


@st.composite
def regroupings(draw):
    """Two shapes of one size: small factors, mostly in the same order, grouped twice."""
    factors = draw(st.lists(st.sampled_from((1, 2, 2, 3, 4, 5)), min_size=1, max_size=5))
    other = draw(st.permutations(factors)) if draw(st.integers(0, 2)) == 0 else factors

    def grouped(numbers):
        cuts = [0, *sorted(draw(st.sets(st.integers(0, len(numbers)), max_size=3))), len(numbers)]
        return tuple(math.prod(numbers[low:high]) for low, high in itertools.pairwise(cuts))

    return grouped(factors), grouped(other)


@examples(150)
@given(regroupings())
def test_factors_make_up_both_shapes(shapes):
    rule = rule_of(*shapes)
    for shape, dims in zip(shapes, (rule.operands[0], rule.results[0]), strict=True):
        assert shape == tuple(math.prod(rule.factors[factor].size for factor in factors) for factors in dims)


@examples(100)
@given(regroupings(), st.sampled_from(MESHES))
def test_every_split_of_the_rule_is_right(shapes, mesh):
    for way in legal_ways(rule_of(*shapes), mesh):
        assert agrees(*shapes, mesh, way.operands[0], way.results[0]), way


@examples(100)
@given(regroupings(), st.sampled_from((2, 3, 4)))
def test_every_right_split_is_in_the_rule(shapes, size):
    source, target = shapes
    mesh = MeshAxes(("x",), (size,))
    found = {(way.operands[0], way.results[0]) for way in legal_ways(rule_of(source, target), mesh)}
    for before, after in itertools.product(range(len(source)), range(len(target))):
        operand, result = Placement((before,)), Placement((after,))
        if operand.fits(source, mesh) and result.fits(target, mesh) and agrees(source, target, mesh, operand, result):
            assert (operand, result) in found, (source, target, before, after)


@pytest.mark.parametrize(
    ("source", "target", "operand", "result"),
    [
        ((8,), (8,), ((8,),), ((8,),)),
        ((8, 16), (128,), ((8,), (16,)), ((8, 16),)),
        ((128,), (8, 16), ((8, 16),), ((8,), (16,))),
        ((4, 6), (8, 3), ((4,), (2, 3)), ((4, 2), (3,))),
        ((2, 3, 4), (6, 4), ((2,), (3,), (4,)), ((2, 3), (4,))),
        ((1, 8, 1), (8,), ((), (8,), ()), ((8,),)),
        ((), (1, 1), (), ((), ())),
    ],
)
def test_shared_factors(source, target, operand, result):
    rule = rule_of(source, target)

    def sizes(dims):
        return tuple(tuple(rule.factors[factor].size for factor in factors) for factors in dims)

    assert (sizes(rule.operands[0]), sizes(rule.results[0])) == (operand, result)
    assert all(factor.kind is Kind.MAP for factor in rule.factors)


def test_what_interleaves_stays_whole_and_what_follows_does_not():
    rule = rule_of((6, 4, 8), (8, 3, 8))
    mesh = MeshAxes(("x",), (4,))
    assert {(way.operands[0].axes[0], way.results[0].axes[0]) for way in legal_ways(rule, mesh)} == {(-1, -1), (2, 2)}


@pytest.mark.parametrize(("source", "target"), [((0, 8), (8, 0)), ((4, 0, 2), (0,))])
def test_empty_arrays_stay_whole(source, target):
    rule = rule_of(source, target)
    assert {factor.kind for factor in rule.factors} == {Kind.WHOLE}
