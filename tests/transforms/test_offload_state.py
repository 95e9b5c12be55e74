"""State that is on the host between steps passes through the device, a few leaves at a time: the same bits."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import needed_for
from jax_deepcompile.ir.memory import HOST_KIND, is_fetch, is_offload, is_on_host
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.transforms import carry_out, offload_state, stack_updates
from jax_deepcompile.transforms.offload_state import OffloadedState, movable
from tests.partition.steps import lines, trace
from tests.transforms.programs import MATRICES, STACK, assert_same_values, matrices_loss, sharded, stack_loss

W = (16, 16)


def descended(s, x):
    """The gradient of the loss, and the loss."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(s["p"])
    return gradient, loss


def momentum(s, x):
    g, loss = descended(s, x)
    m = 0.9 * s["m"] + g
    return {"p": s["p"] - 0.1 * m, "m": m}, loss


def normed(s, x):
    """Each moment is divided by the norm of both."""
    g, loss = descended(s, x)
    m, v = 0.9 * s["m"] + g, 0.99 * s["v"] + g**2
    norm = jnp.sqrt(jnp.sum(m**2) + jnp.sum(v**2))
    return {"p": s["p"] - 0.1 * m / norm, "m": m, "v": v}, loss


def succeeded_by_the_gradient(s, x):
    """The last gradient, which no leaf of the state is part of."""
    g, loss = descended(s, x)
    return {"p": s["p"] - 0.1 * (g + s["m"]), "m": g}, loss


def unread(s, x):
    g, loss = descended(s, x)
    return {"p": s["p"] - 0.1 * g, "m": s["m"]}, loss


def read_and_kept(s, x):
    g, loss = descended(s, x)
    return {"p": s["p"] - 0.1 * g * s["m"], "m": s["m"]}, (loss, s["m"])


def swapped(s, x):
    g, loss = descended(s, x)
    return {"p": s["p"] - 0.1 * g, "m": s["v"], "v": s["m"]}, loss


def read_twice(s, x):
    g, loss = descended(s, x)
    m = s["m"] + g * jnp.sum(s["m"])
    return {"p": s["p"] - 0.1 * jnp.sin(s["m"]) * m, "m": m}, loss


def returned_twice(s, x):
    g, loss = descended(s, x)
    m = 0.9 * s["m"] + g
    return {"p": s["p"] - 0.1 * m, "m": m}, (loss, m)


def crossed(s, x):
    """Each leaf is made of the other."""
    g, loss = descended(s, x)
    return {"p": s["p"] - 0.1 * g, "m": s["v"] + g, "v": 0.9 * s["m"]}, loss


def read_in_a_loop(s, x):
    g, loss = descended(s, x)
    total, m = lax.scan(lambda total, m: (total + m, 0.9 * m), jnp.zeros(16), s["m"])
    return {"p": s["p"] - 0.1 * g * total, "m": m + g}, loss


STEPS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "momentum": (momentum, ("m",)),
    "parameters": (momentum, ("m", "p")),
    "norm": (normed, ("m", "v")),
    "one of a group": (normed, ("m",)),
    "gradient": (succeeded_by_the_gradient, ("m",)),
    "unread": (unread, ("m",)),
    "read and kept": (read_and_kept, ("m",)),
    "swapped": (swapped, ("m", "v")),
    "crossed": (crossed, ("m", "v")),
    "returned twice": (returned_twice, ("m",)),
    "read twice": (read_twice, ("m",)),
    "read in a loop": (read_in_a_loop, ("m",)),
}


def stepped(step: Callable, **more):
    """The fully sharded program of a step with three leaves of state, and its mesh."""
    state = dict.fromkeys("mpv", W) if step in (normed, swapped, crossed) else dict.fromkeys("mp", W)
    traced = trace(step, state | more, W, state_argnums=0)
    return traced.sharded, traced.compilation.context.use.mesh


def of_adam(loss=stack_loss, params=STACK):
    """A step with global clipping, its mesh, and the names of its moments."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2, eps=1e-3))
    program, mesh = sharded(loss, params, optimizer=optimizer)
    return program, mesh, [name for name in movable(program).values() if {"mu", "nu"} & set(name.split("/"))]


def away(program: Program, mesh, names, by_layer: bool = False) -> Program:
    return carry_out(program, mesh, [OffloadedState(tuple(names), by_layer)])


def loops(program: Program) -> int:
    """How many loops of the program itself run a stack's update."""
    return sum(
        eqn.primitive.name == "scan" and any(map(is_on_host, eqn.invars)) for eqn in open_jaxpr(program.jaxpr).eqns
    )


@pytest.fixture
def small_layers(monkeypatch):
    """Layers are as small as tests want them, and worth a turn of a loop all the same."""
    monkeypatch.setattr("jax_deepcompile.transforms.stack_updates._LAYER_BYTES", 1)


def copies(program: Program) -> tuple[int, int]:
    """How many values come from the host, and how many go there."""
    eqns = open_jaxpr(program.jaxpr).eqns
    return sum(map(is_fetch, eqns)), sum(map(is_offload, eqns))


@pytest.mark.pure
def test_before_and_after():
    program, mesh = stepped(momentum)
    update = ["mul f32[] f32[2,16] -> f32[2,16]", "add f32[2,16] f32[2,16] -> f32[2,16]"]
    descent = ["mul f32[] f32[2,16] -> f32[2,16]", "sub f32[2,16] f32[2,16] -> f32[2,16]"]
    assert lines(program)[-4:] == update + descent
    after = lines(away(program, mesh, ["m"]))
    assert after[:-7] == lines(program)[:-4]
    assert after[-7:] == [
        "optimization_barrier f32<host>[2,16] f32[2,16] -> f32<host>[2,16] f32[2,16]",
        "device_put f32<host>[2,16] -> f32[2,16]",
        *update,
        *descent,
        "device_put f32[2,16] -> f32<host>[2,16]",
    ]


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize("name", STEPS)
def test_values_stay_the_same(name, by_layer, monkeypatch):
    monkeypatch.setattr(stack_updates, "_LAYER_BYTES", 1)
    step, leaves = STEPS[name]
    program, mesh = stepped(step)
    assert_same_values(away(program, mesh, leaves, by_layer), program, mesh)


@pytest.mark.cpu_mesh
def test_stacks_are_updated_a_layer_at_a_time(small_layers):
    program, mesh, moments = of_adam()
    there = away(program, mesh, moments, by_layer=True)
    assert loops(there) == 1, "all have as many layers"
    verify(there)


@pytest.mark.cpu_mesh
def test_what_such_an_update_reads_of_the_device_it_updates_in_place(small_layers):
    """Updated elsewhere, while the loop reads what it was, it would be copied."""

    def step(s, x):
        g = jax.grad(lambda p: jnp.mean((x @ p.sum(0)) ** 2))(s["p"])
        m, v = 0.9 * s["m"] + g, 0.9 * s["v"] + g * g
        return {"m": m, "p": s["p"] - 0.1 * m / (1 + v * v), "v": v}

    traced = trace(step, dict.fromkeys("mpv", (4, 16, 16)), W, state_argnums=0)
    program, mesh = traced.sharded, traced.compilation.context.use.mesh
    there = away(program, mesh, ["v"], by_layer=True)
    jaxpr = open_jaxpr(there.jaxpr)
    (loop,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan" and any(map(is_on_host, eqn.invars)))
    assert all(jaxpr.outvars[result] in loop.outvars for _, result in there.state_outputs)
    assert_same_values(there, program, mesh)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(("rows", "in_pieces"), [(8 * 12, True), (8 * 11, False), (4, False)])
def test_what_is_larger_than_a_layer_is_updated_in_as_many_pieces(rows, in_pieces, monkeypatch):
    """If its rows can be divided by that; what is smaller is updated as a whole, as all is without stacks."""
    monkeypatch.setattr(stack_updates, "_LAYER_BYTES", 100)

    def step(s, x):
        g = jax.grad(lambda p: jnp.mean((x @ p["stack"].sum(0)) ** 2) + jnp.mean(p["table"] ** 2))(s["p"])
        m = jax.tree.map(lambda m, g: 0.9 * m + g, s["m"], g)
        return {"p": jax.tree.map(lambda p, m: p - 0.1 * m, s["p"], m), "m": m}

    shapes = {"stack": (4, 16, 16), "table": (rows, 16)}
    traced = trace(step, {"p": shapes, "m": shapes}, W, state_argnums=0)
    program, mesh = traced.sharded, traced.compilation.context.use.mesh
    there = away(program, mesh, ["m/stack", "m/table"], by_layer=True)
    assert loops(there) == 1
    assert copies(there)[1] == (0 if in_pieces else 1)
    assert_same_values(there, program, mesh)
    assert not loops(away(program, mesh, ["m/table"], by_layer=True))


@pytest.mark.cpu_mesh
def test_stacks_of_another_number_of_layers_have_their_own_loop(small_layers):
    def step(s, x):
        g = jax.grad(lambda p: jnp.mean((x @ p["a"].sum(0)) ** 2) + jnp.mean(p["b"] ** 2))(s["p"])
        m = jax.tree.map(lambda m, g: 0.9 * m + g, s["m"], g)
        return {"p": jax.tree.map(lambda p, m: p - 0.1 * m, s["p"], m), "m": m}

    shapes = {"a": (4, 16, 16), "b": (3, 8, 16), "c": (4, 16)}
    traced = trace(step, {"p": shapes, "m": shapes}, W, state_argnums=0)
    program, mesh = traced.sharded, traced.compilation.context.use.mesh
    there = away(program, mesh, ["m/a", "m/b", "m/c"], by_layer=True)
    assert loops(there) == 2
    assert_same_values(there, program, mesh)


@pytest.mark.pure
@pytest.mark.parametrize("step", [normed, read_twice, unread])
def test_what_is_not_elementwise_or_not_read_is_updated_at_once(step, small_layers):
    program, mesh = stepped(step)
    assert not loops(away(program, mesh, STEPS["norm" if step is normed else "unread"][1], by_layer=True))


def clipped():
    optimizer = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.1, momentum=0.9))
    program, mesh = sharded(stack_loss, STACK, optimizer=optimizer)
    names = [name for name in movable(program).values() if "trace" in name]
    assert len(names) == 3
    return program, mesh, names


@pytest.mark.cpu_mesh
def test_with_clipping_by_the_global_norm_values_stay_the_same():
    program, mesh, names = clipped()
    assert_same_values(away(program, mesh, names), program, mesh)


@pytest.mark.pure
def test_the_first_leaves_come_while_the_norm_of_all_gradients_is_computed():
    eqns = open_jaxpr(away(*clipped()).jaxpr).eqns
    assert "sqrt" in {eqn.primitive.name for eqn in eqns}
    first, second, third = (eqn for eqn in eqns if is_barrier_of_host(eqn))
    for eqn in (first, second):
        assert "sqrt" not in {each.primitive.name for each in needed_for(eqns, eqn.invars)}
    assert "sqrt" in {each.primitive.name for each in needed_for(eqns, third.invars)}


@pytest.mark.parametrize(
    ("done", "room_bytes", "behind"),
    [
        ([], 4, None),
        ([(4, ["a"])], 4, None),
        ([(4, ["a"]), (4, ["b"])], 4, ["a"]),
        ([(4, ["a"]), (1, ["b"]), (2, ["c"])], 4, ["a"]),
        ([(4, ["a"]), (1, ["b"]), (2, ["c"])], 7, None),
        ([(4, ["a"])], 0, ["a"]),
    ],
)
@pytest.mark.pure
def test_as_much_is_on_its_way_as_there_is_room_for(done, room_bytes, behind):
    assert offload_state._behind(done, room_bytes) == behind


@pytest.mark.pure
def test_ports_and_values_are_where_the_decision_says():
    program, mesh, names = of_adam()
    after = away(program, mesh, names[:3])
    expected = {place for place, name in movable(program).items() if name in names[:3]}
    jaxpr, successors = open_jaxpr(after.jaxpr), dict(program.state_outputs)
    for ports, atoms, there in (
        (after.inputs, jaxpr.invars, expected),
        (after.outputs, jaxpr.outvars, {successors[place] for place in expected}),
    ):
        assert {place for place, port in enumerate(ports) if port.memory_kind == HOST_KIND} == there
        assert {place for place, atom in enumerate(atoms) if is_on_host(atom)} == there


@pytest.mark.pure
@pytest.mark.parametrize(("step", "counts"), [(momentum, (1, 1)), (unread, (0, 0)), (read_and_kept, (1, 0))])
def test_each_leaf_is_copied_once_and_what_stays_the_same_is_not_copied_back(step, counts):
    assert copies(away(*stepped(step), ["m"])) == counts


def is_barrier_of_host(eqn) -> bool:
    return eqn.primitive.name == "optimization_barrier" and is_on_host(eqn.invars[0])


def barriers(program: Program) -> list:
    """Those that copies from the host wait at: (leaves that come, values on the host that are waited for)."""
    found = []
    for eqn in open_jaxpr(program.jaxpr).eqns:
        if is_barrier_of_host(eqn):
            host = [atom for atom in eqn.invars if is_on_host(atom)]
            coming = [atom for atom in host if atom in open_jaxpr(program.jaxpr).invars]
            found.append((coming, [atom for atom in host if atom not in coming]))
    return found


@pytest.mark.pure
def test_the_moments_of_a_parameter_come_together_and_the_third_waits_until_the_first_is_back():
    program, mesh, names = of_adam()
    after = away(program, mesh, names)
    inputs, results = open_jaxpr(after.jaxpr).invars, open_jaxpr(after.jaxpr).outvars
    successors = {inputs[place]: results[successor] for place, successor in after.state_outputs}
    known = movable(program)
    first, second, third = barriers(after)
    for leaves, _ in (first, second, third):
        assert len({known[inputs.index(leaf)].rpartition("/")[2] for leaf in leaves}) == 1
        assert len(leaves) == 2
    assert first[1] == second[1] == []
    assert set(third[1]) == {successors[leaf] for leaf in first[0]}


@pytest.mark.pure
def test_what_is_divided_by_the_norm_of_all_comes_together():
    (group,) = barriers(away(*stepped(normed), ["m", "v"]))
    assert len(group[0]) == 2


@pytest.mark.pure
def test_gradients_are_waited_for_before_the_first_leaf_comes():
    """Forward and backward have the memory to themselves."""
    program, mesh, names = of_adam(matrices_loss, MATRICES)
    after = lines(away(program, mesh, names))
    first = next(place for place, line in enumerate(after) if line.startswith("device_put"))
    last = max(place for place, line in enumerate(after) if line.startswith(("scan", "psum")))
    assert last < first


@pytest.mark.pure
def test_nothing_chosen_changes_nothing():
    program, mesh = stepped(momentum)
    assert away(program, mesh, []) is program


def with_others(s, x):
    g, loss = descended(s, x)
    keys = jax.vmap(jax.random.fold_in, (0, None))(s["keys"], 1)
    return {
        "p": s["p"] - 0.1 * g,
        "m": 0.9 * s["m"],
        "keys": keys,
        "none": s["none"] * 2,
        "count": s["count"] + 1,
    }, loss


@pytest.mark.pure
def test_scalars_random_keys_and_what_has_no_elements_stay():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 16))
    program, _ = stepped(with_others, keys=keys, none=(0, 4), count=())
    assert set(movable(program).values()) == {"p", "m"}


@pytest.mark.pure
def test_state_whose_memory_no_successor_takes_stays():
    assert movable(trace(momentum, {"p": W, "m": W}, W, donate=False).sharded) == {}


@pytest.mark.pure
@pytest.mark.parametrize(
    ("decisions", "why"),
    [
        ([OffloadedState(("mm",))], "it has on the host 'mm', of which there is none there; the nearest names: 'm'"),
        ([OffloadedState(("x",))], "it has on the host 'x', of which there is none there"),
        ([OffloadedState(("m", "m"))], "'m' twice"),
        ([OffloadedState(("m",))] * 2, r"it says what becomes of 'm' twice \(offload_state\)"),
    ],
    ids=["unknown", "the batch", "twice", "twice decided"],
)
def test_what_the_program_does_not_have_is_an_error(decisions, why):
    program, mesh = stepped(momentum)
    with pytest.raises(errors.PlanError, match=why):
        carry_out(program, mesh, decisions)


@pytest.mark.pure
def test_a_program_whose_values_are_not_where_its_ports_say_is_refused():
    program, mesh = stepped(momentum)
    after = away(program, mesh, ["m"])
    with pytest.raises(errors.InvariantError, match=r"is in .*Host.*, its port says device"):
        verify(after.replace(inputs=program.inputs, outputs=program.outputs))
