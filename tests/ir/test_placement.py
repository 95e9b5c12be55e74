"""The arithmetic of placements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jax_deepcompile.ir.placement import PARTIAL, REPLICATE, MeshAxes, Placement

pytestmark = pytest.mark.pure

R, P = REPLICATE, PARTIAL
MESH = MeshAxes(("data", "fsdp", "model"), (2, 4, 3))

states = st.tuples(*[st.integers(PARTIAL, 3)] * 3).map(Placement)


def test_sizes():
    assert MESH.size == 24
    assert MESH.size_of(("data", "model")) == 6
    assert MESH.size_of(()) == 1
    assert MeshAxes((), ()).size == 1


def test_a_virtual_axis_divides_what_is_worked_on_not_what_is_held():
    loop = MeshAxes(("data", "fsdp"), (2, 4)).with_loop("microbatch", 3)
    batch = loop.place({0: ("data", "fsdp", "microbatch")})
    assert loop.devices == MeshAxes(("data", "fsdp"), (2, 4))
    assert [loop.is_virtual(axis) for axis in range(3)] == [False, False, True]
    assert batch.fits((24, 5), loop)
    assert not batch.fits((8, 5), loop)
    assert batch.local_shape((24, 5), loop) == (3, 5)
    assert batch.spec(loop) == PartitionSpec(("data", "fsdp"))
    assert batch.on_devices(loop) == Placement((0, 0))
    assert loop.keep([1, 2]) == MeshAxes(("fsdp", "microbatch"), (4, 3), ("microbatch",))


def test_deferring_leaves_sums_for_later():
    assert Placement((R, 0, R)).deferring(Placement((P, P, R))) == Placement((P, 0, R))
    assert Placement((P, 1, R)).deferring(Placement((R, R, R))) == Placement((P, 1, R))


def test_place_names_what_is_split_and_what_is_partial():
    of_one = MeshAxes(("data", "fsdp"), (1, 4))
    assert of_one.place({0: ("data", "fsdp")}) == Placement((R, 0))
    assert MESH.place({}) == MESH.replicated() == Placement((R, R, R))
    assert MESH.place({0: ("data", "fsdp")}) == Placement((0, 0, R))
    assert MESH.place({1: ("model",), 0: ("data",)}, partial=("fsdp",)) == Placement((0, P, 1))


def test_an_axis_the_mesh_lacks_cannot_be_placed():
    with pytest.raises((KeyError, ValueError)):
        MESH.place({0: ("fdsp",)})


@pytest.mark.parametrize(
    ("axes", "replicated", "partial", "split"),
    [
        ((R, R, R), True, False, False),
        ((R, P, R), False, True, False),
        ((R, 0, R), False, False, True),
        ((P, 0, R), False, True, True),
        ((), True, False, False),
    ],
)
def test_kinds(axes, replicated, partial, split):
    placement = Placement(axes)
    assert (placement.is_replicated, placement.is_partial, placement.is_split) == (replicated, partial, split)


def test_axes_of_a_dimension_are_major_first():
    assert Placement((0, R, 0)).axes_of(0) == (0, 2)
    assert Placement((0, R, 0)).axes_of(1) == ()
    assert Placement((P, 1, P)).axes_of(PARTIAL) == (0, 2)


def test_replace_changes_one_axis():
    placement = Placement((0, R, P))
    assert placement.replace(0, 1) == Placement((1, R, P))
    assert placement.replace(2, R) == Placement((0, R, R))
    assert placement == Placement((0, R, P))


def test_shifted_moves_dimensions_and_nothing_else():
    assert Placement((0, R, P)).shifted(1) == Placement((1, R, P))
    assert Placement((2, 1, R)).shifted(-1) == Placement((1, 0, R))


@given(states, st.integers(0, 3))
def test_shifting_there_and_back(placement, by):
    assert placement.shifted(by).shifted(-by) == placement


@given(states)
def test_equal_placements_hash_equally(placement):
    again = Placement(tuple(placement.axes))
    assert placement == again
    assert hash(placement) == hash(again)
    assert len({placement, again}) == 1


@given(states)
def test_without_partial_touches_only_partial_axes(placement):
    whole = placement.without_partial()
    assert not whole.is_partial
    for before, after in zip(placement.axes, whole.axes, strict=True):
        assert after == (R if before == P else before)


@pytest.mark.parametrize(
    ("axes", "shape", "fits"),
    [
        ((R, R, R), (), True),
        ((P, P, P), (), True),
        ((0, 0, 0), (24,), True),
        ((0, 0, 0), (12,), False),
        ((0, 0, R), (8, 5), True),
        ((0, 0, R), (4, 8), False),
        ((0, 1, R), (2, 4), True),
        ((1, 0, R), (2, 4), False),
        ((R, R, 1), (6,), False),
        ((R, R, 1), (1, 0), True),
    ],
)
def test_fits_when_every_split_dimension_exists_and_divides(axes, shape, fits):
    assert Placement(axes).fits(shape, MESH) is fits


def test_local_shape_divides_once_for_each_axis():
    assert Placement((0, 0, 1)).local_shape((16, 6, 5), MESH) == (2, 2, 5)
    assert Placement((P, R, R)).local_shape((16, 6), MESH) == (16, 6)
    assert MESH.replicated().local_shape((), MESH) == ()


@given(states, st.tuples(*[st.sampled_from((2, 3, 4, 6, 8, 12, 24))] * 4))
def test_local_blocks_make_up_the_whole(placement, shape):
    if not placement.fits(shape, MESH):
        return
    for dim, (whole, part) in enumerate(zip(shape, placement.local_shape(shape, MESH), strict=True)):
        assert part * MESH.size_of(MESH.names[axis] for axis in placement.axes_of(dim)) == whole


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ((R, R, R), PartitionSpec()),
        ((R, 0, R), PartitionSpec("fsdp")),
        ((R, 1, R), PartitionSpec(None, "fsdp")),
        ((0, 0, 2), PartitionSpec(("data", "fsdp"), None, "model")),
        ((1, 0, 1), PartitionSpec("fsdp", ("data", "model"))),
    ],
)
def test_spec(axes, spec):
    assert Placement(axes).spec(MESH) == spec


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ((R, R, R), "replicate"),
        ((R, 0, R), "shard(0: fsdp)"),
        ((0, 0, P), "shard(0: data, fsdp) partial(model)"),
        ((1, 0, 1), "shard(0: fsdp) shard(1: data, model)"),
        ((P, R, P), "partial(data, model)"),
    ],
)
def test_describe(axes, text):
    assert Placement(axes).describe(MESH) == text
