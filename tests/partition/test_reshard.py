"""Moving a value from every placement to every other, on every device, and no more moves than it takes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from jax_deepcompile.ir.placement import PARTIAL, REPLICATE, MeshAxes, Placement
from jax_deepcompile.partition.reshard import (
    Move,
    MoveKind,
    apply_move,
    axis_bytes,
    axis_cost,
    collectives,
    full_bytes,
    plan_moves,
    size_of,
)
from tests.cases import examples
from tests.partition.rules.harness import FAST_COMPILE

R, P = REPLICATE, PARTIAL
FLAT = MeshAxes(("x",), (8,))
GRID = MeshAxes(("x", "y"), (2, 4))
CUBE = MeshAxes(("x", "y", "z"), (2, 2, 2))

Pair = tuple[Placement, Placement]


def placements(mesh: MeshAxes, shape: Sequence[int]) -> list[Placement]:
    states = itertools.product(range(PARTIAL, len(shape)), repeat=len(mesh.names))
    return [placement for placement in map(Placement, states) if placement.fits(shape, mesh)]


def block_of(value: np.ndarray, placement: Placement, mesh: MeshAxes, device: tuple[int, ...]) -> np.ndarray:
    """What ``device`` holds of ``value``, from the definition: split major first, in the order of the mesh."""
    for dim in range(value.ndim):
        for axis in placement.axes_of(dim):
            value = np.split(value, mesh.sizes[axis], axis=dim)[device[axis]]
    return value


def parts_of(value: np.ndarray, placement: Placement, mesh: MeshAxes) -> dict[tuple[int, ...], np.ndarray]:
    """For each device the whole value, or its random part of it where ``placement`` is partial."""
    summed = placement.axes_of(PARTIAL)
    draw = np.random.default_rng(7)
    parts: dict[tuple[int, ...], np.ndarray] = {}
    for place in itertools.product(*(range(mesh.sizes[axis]) for axis in summed)):
        parts[place] = draw.integers(-9, 9, value.shape).astype(value.dtype)
    parts[place] = value - sum(part for other, part in parts.items() if other != place)
    devices = itertools.product(*map(range, mesh.sizes))
    return {device: parts[tuple(device[axis] for axis in summed)] for device in devices}


def check_pairs(shape: Sequence[int], mesh: MeshAxes, pairs: Sequence[Pair]) -> None:
    """Carries out the moves of all ``pairs`` in one program and compares every device's block."""
    value = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    devices = list(itertools.product(*map(range, mesh.sizes)))
    sources = []
    for source, _ in pairs:
        parts = parts_of(value, source, mesh)
        sources.append(np.stack([block_of(parts[device], source, mesh, device) for device in devices]))

    def move(blocks):
        moved = []
        for block, (source, target) in zip(blocks, pairs, strict=True):
            block = block[0]
            for step in plan_moves(source, target, mesh):
                block = apply_move(block, step, mesh)
            moved.append(block[None])
        return moved

    run = jax.shard_map(
        move,
        mesh=jax.make_mesh(mesh.sizes, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names)),
        in_specs=PartitionSpec(mesh.names),
        out_specs=PartitionSpec(mesh.names),
        check_vma=False,
    )
    for (source, target), result in zip(pairs, jax.jit(run, compiler_options=FAST_COMPILE)(sources), strict=True):
        blocks = np.asarray(result).reshape(*mesh.sizes, *target.local_shape(shape, mesh))
        found = blocks.sum(axis=target.axes_of(PARTIAL), keepdims=True)
        for device in devices:
            own = tuple(0 if axis in target.axes_of(PARTIAL) else index for axis, index in enumerate(device))
            expected = block_of(value, target, mesh, device)
            message = f"{source.describe(mesh)} -> {target.describe(mesh)} on {device}"
            np.testing.assert_array_equal(found[own], expected, err_msg=message)


@pytest.mark.cpu_mesh
def test_every_pair_over_one_axis():
    every = placements(FLAT, (8, 16))
    check_pairs((8, 16), FLAT, list(itertools.product(every, every)))


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("part", range(4))
def test_every_pair_over_two_axes(part):
    every = placements(GRID, (8, 8))
    assert len(every) == 16
    check_pairs((8, 8), GRID, list(itertools.product(every[part::4], every)))


@pytest.mark.cpu_mesh
@examples(5)
@given(st.sampled_from([(8, 8), (8, 4, 2), (2, 8, 8)]), st.data())
def test_pairs_over_three_axes(shape, data):
    every = placements(CUBE, shape)
    pair = st.tuples(st.sampled_from(every), st.sampled_from(every))
    check_pairs(shape, CUBE, data.draw(st.lists(pair, min_size=40, max_size=40)))


@pytest.mark.cpu_mesh
def test_random_keys_move_as_their_words():
    keys = jax.random.split(jax.random.key(0), 8)
    whole, split = FLAT.replicated(), FLAT.place({0: ("x",)})

    def there_and_back(block):
        (cut,) = plan_moves(whole, split, FLAT)
        (gather,) = plan_moves(split, whole, FLAT)
        own = apply_move(block, cut, FLAT)
        assert own.shape == (1,)
        return apply_move(own, gather, FLAT)

    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(there_and_back, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    assert (jax.random.key_data(jax.jit(run)(keys)) == jax.random.key_data(keys)).all()


@pytest.mark.pure
@pytest.mark.parametrize(
    ("source", "target", "moves"),
    [
        (R, R, []),
        (0, 0, []),
        (P, P, []),
        (P, 1, [Move(MoveKind.REDUCE_SCATTER, ("x",), 1)]),
        (P, R, [Move(MoveKind.ALL_REDUCE, ("x",))]),
        (0, R, [Move(MoveKind.ALL_GATHER, ("x",), 0)]),
        (0, 1, [Move(MoveKind.ALL_TO_ALL, ("x",), 1, 0)]),
        (R, 1, [Move(MoveKind.SLICE, ("x",), 1)]),
        (R, P, [Move(MoveKind.MASK, ("x",))]),
    ],
)
def test_one_axis_takes_one_move(source, target, moves):
    assert list(plan_moves(Placement((source,)), Placement((target,)), FLAT)) == moves


@pytest.mark.pure
@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        ((P, P), (R, 0), ["reduce_scatter y 0", "all_reduce x"]),
        ((P, P), (R, R), ["all_reduce x,y"]),
        ((P, P), (0, 0), ["reduce_scatter x,y 0"]),
        ((0, 0), (R, R), ["all_gather x,y 0"]),
        ((0, 0), (0, R), ["all_gather y 0"]),
        ((0, R), (0, 0), ["slice y 0"]),
        ((R, 0), (R, 1), ["all_to_all y 1"]),
        ((0, 0), (0, 1), ["all_to_all y 1"]),
        ((0, 1), (1, 1), ["all_gather x 0", "all_gather y 1", "slice x 1", "slice y 1"]),
        ((R, R), (P, P), ["mask x,y"]),
        ((R, R), (P, 0), ["slice y 0", "mask x"]),
        ((P, 0), (R, 0), ["all_reduce x"]),
        ((P, 0), (1, 0), ["reduce_scatter x 1"]),
    ],
)
def test_moves_over_two_axes(source, target, kinds):
    found = plan_moves(Placement(source), Placement(target), GRID)
    text = [f"{move.kind} {','.join(move.axes)}" + (f" {move.dim}" if move.dim >= 0 else "") for move in found]
    assert text == kinds


@pytest.mark.pure
def test_what_stays_is_never_moved():
    for mesh in (FLAT, GRID, CUBE):
        every = placements(mesh, (8, 8))
        for placement in every:
            assert plan_moves(placement, placement, mesh) == ()
        for placement in every:
            cut = plan_moves(mesh.replicated(), placement, mesh)
            assert not any(move.kind.communicates for move in cut)


@pytest.mark.pure
def test_no_resharding_takes_more_collectives_than_gathering_and_summing_axis_by_axis():
    for mesh in (GRID, CUBE):
        every = placements(mesh, (8, 8))
        for source, target in itertools.product(every, every):
            bound = sum(held != REPLICATE for held in source.axes)
            assert collectives(source, target, mesh) <= bound, (source, target)


@pytest.mark.pure
@pytest.mark.parametrize(
    "target",
    [
        pytest.param((R, R)),
        (R, 1),
        pytest.param((1, R)),
    ],
)
def test_a_partial_shard_is_summed_before_it_is_gathered(target):
    """Summing first moves the shard alone; gathering first sums what has grown by the size of the axis."""
    kinds = [move.kind for move in plan_moves(Placement((P, 0)), Placement(target), GRID)]
    summed = kinds.index(MoveKind.ALL_REDUCE) if target[0] == R else kinds.index(MoveKind.REDUCE_SCATTER)
    assert all(summed < at for at, kind in enumerate(kinds) if kind is MoveKind.ALL_GATHER)


@pytest.mark.pure
def test_a_loop_sums_late_and_wide_and_never_exchanges():
    mesh = MeshAxes(("fsdp",), (8,)).with_loop("microbatch", 4)
    half = size_of(jax.ShapeDtypeStruct((16, 8), np.float16))
    single = size_of(jax.ShapeDtypeStruct((16, 8), np.float32))
    summed, masked, exchanged = (
        axis_cost(*move, single, 1, mesh) for move in ((PARTIAL, REPLICATE), (REPLICATE, PARTIAL), (0, REPLICATE))
    )
    assert 0 < masked < summed < exchanged
    assert axis_cost(PARTIAL, REPLICATE, half, 1, mesh) > summed
    assert axis_cost(REPLICATE, 0, single, 1, mesh) == axis_cost(0, 0, single, 1, mesh) == 0
    assert axis_cost(PARTIAL, 0, single, 0, mesh) == axis_bytes(PARTIAL, 0, single.bytes, 8)
    moves = plan_moves(Placement((PARTIAL, PARTIAL)), Placement((0, REPLICATE)), mesh)
    assert [(move.kind, move.axes) for move in moves] == [
        (MoveKind.REDUCE_SCATTER, ("fsdp",)),
        (MoveKind.ALL_REDUCE, ("microbatch",)),
    ]


@pytest.mark.pure
def test_bytes_of_ring_algorithms():
    assert axis_bytes(0, REPLICATE, 64.0, 8) == 56.0
    assert axis_bytes(PARTIAL, 0, 64.0, 8) == 56.0
    assert axis_bytes(PARTIAL, REPLICATE, 64.0, 8) == 112.0
    assert axis_bytes(0, 1, 64.0, 8) == 7.0
    for free in ((REPLICATE, 0), (REPLICATE, PARTIAL), (0, 0), (PARTIAL, PARTIAL), (REPLICATE, REPLICATE)):
        assert axis_bytes(*free, 64.0, 8) == 0.0
    assert axis_bytes(PARTIAL, REPLICATE, 64.0, 1) == 0.0


@pytest.mark.pure
def test_bytes_of_whole_values():
    assert full_bytes(jax.ShapeDtypeStruct((3, 4), jax.numpy.bfloat16)) == 24.0
    assert full_bytes(jax.typeof(jax.random.key(0))) == 8.0
