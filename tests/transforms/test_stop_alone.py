"""Loops over examples do not wait for those of other devices, and no other loop stops waiting."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.ir.traversal import equations
from jax_deepcompile.transforms.stop_alone import stop_alone
from tests.schedules import instructions
from tests.transforms.programs import compiled_for_h100s, h100s

MESH = deepcompile.shard(lambda state: state, {"fsdp": 8}).mesh
BATCH, WIDTH = 32, 8
X = np.random.default_rng(0).uniform(0.1, 5.0, (BATCH, WIDTH)).astype(np.float32)


def training(solve):
    def step(w, x):
        def loss(w):
            made = x @ w
            return jnp.mean((made - lax.stop_gradient(solve(made))) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    return step


def newton(x):
    """The square root of every element, to a precision of its own for each example."""

    def going(carry):
        turn, guess = carry
        return (turn < 50) & (jnp.abs(guess * guess - x).max() > 1e-3)

    return lax.while_loop(going, lambda carry: (carry[0] + 1, 0.5 * (carry[1] + x / carry[1])), (0, x))[1]


def each_example(made):
    return jax.vmap(newton)(jnp.abs(made) + 0.5)


def inside_a_loop(made):
    return lax.scan(lambda x, _: (each_example(x), None), made, None, length=2)[0]


def by_hand(made):
    """What ``vmap`` makes of such a loop, written out."""

    def body(x):
        return jnp.where((x.sum(1) > 1.0)[:, None], x * 0.5, x)

    return lax.while_loop(lambda x: (x.sum(1) > 1.0).any(), body, jnp.abs(made))


def until_all_are_done(made):
    """Examples that are done go on with the others."""
    return lax.while_loop(lambda x: (x.sum(1) > 1.0).any(), lambda x: x * 0.5, jnp.abs(made))


def counted(made):
    """How often the loop ran depends on all examples."""

    def body(carry):
        turn, x = carry
        return turn + 1, jnp.where((x.sum(1) > 1.0)[:, None], x * 0.5, x)

    turns, x = lax.while_loop(lambda carry: (carry[1].sum(1) > 1.0).any(), body, (0, jnp.abs(made)))
    return x * turns


def guarded_otherwise(made):
    """Another threshold: an example may change after it is done."""

    def body(x):
        return jnp.where((x.sum(1) > 0.5)[:, None], x * 0.5, x)

    return lax.while_loop(lambda x: (x.sum(1) > 1.0).any(), body, jnp.abs(made))


def guarded_the_wrong_way(made):
    def body(x):
        return jnp.where((x.sum(1) > 1.0)[:, None], x, x + 0.5)

    return lax.while_loop(lambda x: (x.sum(1) < 1.0).any(), lambda x: body(x) + 1.0, jnp.abs(made))


def with_a_mean(made):
    """The body reads other examples."""

    def body(x):
        return jnp.where((x.sum(1) > 1.0)[:, None], x * 0.5 - 1e-3 * x.mean(), x)

    return lax.while_loop(lambda x: (x.sum(1) > 1.0).any(), body, jnp.abs(made))


ALONE = [each_example, inside_a_loop, by_hand]
TOGETHER = [until_all_are_done, counted, guarded_otherwise, guarded_the_wrong_way, with_a_mean]


def program_of(solve, mesh=MESH):
    w, x = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct(X.shape, jnp.float32)
    return deepcompile.shard(training(solve), mesh).trace(w, x).sharded


@pytest.fixture
def before(monkeypatch):
    """Steps are partitioned without the pass."""
    monkeypatch.setattr("jax_deepcompile.compiler.stop_alone", lambda program, mesh: program)


def asked(program) -> int:
    """How many equations ask other devices for a maximum."""
    return sum(eqn.primitive.name == "pmax" for eqn in equations(program.jaxpr))


@pytest.mark.pure
@pytest.mark.parametrize("solve", ALONE)
def test_no_device_asks_the_others(solve):
    program = program_of(solve)
    assert asked(program) == 0
    assert stop_alone(program, MESH) is program


@pytest.mark.pure
@pytest.mark.usefixtures("before")
def test_the_condition_before_and_after():
    program = program_of(by_hand)

    def condition(program) -> list[str]:
        (loop,) = (eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "while")
        return [eqn.primitive.name for eqn in equations(loop.params["cond_jaxpr"])]

    assert condition(program) == ["reduce_sum", "gt", "reduce_or", "pmax"]
    assert condition(stop_alone(program, MESH)) == ["reduce_sum", "gt", "reduce_or"]


@pytest.mark.pure
@pytest.mark.parametrize("solve", TOGETHER)
@pytest.mark.usefixtures("before")
def test_others_go_on_together(solve):
    program = program_of(solve)
    assert asked(program) == 1
    assert stop_alone(program, MESH) is program


@pytest.mark.pure
@pytest.mark.usefixtures("before")
def test_where_xla_communicates_on_its_own_they_go_on_together():
    mesh = deepcompile.shard(training(by_hand), {"fsdp": 4, "tensor": 2}).mesh
    program = program_of(by_hand, mesh)
    assert asked(program) == 1
    assert stop_alone(program, mesh) is program


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(
    ("solve", "microbatches"), [(solve, 1) for solve in (*ALONE, *TOGETHER)] + [(solve, 2) for solve in ALONE]
)
def test_the_numbers_stay_the_same(solve, microbatches):
    w = jnp.eye(WIDTH) * jnp.linspace(0.2, 3.0, WIDTH)
    expected = jax.jit(training(solve))(w, X)
    found = deepcompile.shard(training(solve), {"fsdp": 8}, microbatches=microbatches)(jnp.copy(w), X)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6), found, expected)


@pytest.mark.h100_aot
@pytest.mark.usefixtures("before")
def test_no_collective_is_left_in_the_loop():
    mesh = h100s()

    def in_loops(program) -> int:
        module = read(compiled_for_h100s(program, mesh).as_text())
        reductions = [each for each in instructions(module) if each.opcode in ("all-reduce", "all-reduce-start")]
        return sum("/while/" in each.op_name for each in reductions)

    program = program_of(each_example, mesh)
    assert [in_loops(each) for each in (program, stop_alone(program, mesh))] == [1, 0]
