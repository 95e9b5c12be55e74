"""What ``explain()`` returns, where nothing is compiled; of a planned Llama in ``tests/planner/test_planner.py``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import users_line
from jax_deepcompile.costs.memory import MemoryUse
from jax_deepcompile.costs.simulation import Simulation, Totals
from jax_deepcompile.costs.streams import Part, Queue
from jax_deepcompile.report.peak import vocabularies
from jax_deepcompile.report.seconds import Seconds, _ceilings
from jax_deepcompile.report.words import operation_text


@pytest.mark.pure
def test_where_nothing_is_compiled_nothing_is_made_up():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(nn.Dense(32, name="<b>")(x))

    def step(params, x):
        loss, grads = jax.value_and_grad(lambda params: jnp.mean(Net().apply(params, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    x = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    made = deepcompile.shard(step, {"fsdp": 8}).trace(jax.eval_shape(Net().init, jax.random.key(0), x), x)
    explained = made.explain()
    assert (explained.headline.step_s, explained.headline.mfu, explained.headline.tokens) == (None, None, None)
    assert explained.headline.parameters == 8 * 32 + 32 + 32 * 4 + 4
    assert "\n  step        unknown: nothing was compiled to plan it; explain(assume=True) compiles" in explained
    assert explained.seconds.lines() == ["where the time goes: unknown, nothing was compiled to plan the step"]
    assert explained.memory.peak_bytes is None
    assert json.loads(explained.to_json()) == json.loads(json.dumps(dataclasses.asdict(explained)))
    shown = explained._repr_html_()
    assert shown.count("<details") == shown.count("</details>") == 5
    assert "<b>" not in shown
    assert "&lt;b&gt;" in shown
    assert repr(explained) == str(explained)
    assert "no such words" not in explained
    assumed = made.explain(assume=True)
    assert assumed.headline.step_s == assumed.seconds.step_s == assumed.headline.simulated_s
    assert sum(each.bytes for each in assumed.memory.roles) == assumed.memory.peak_bytes == assumed.headline.peak_bytes


@pytest.mark.cpu_mesh
def test_of_loops_as_long_as_values_say_one_iteration_is_counted_and_that_is_said():
    def step(w, x):
        def goes_on(carry):
            return jnp.max(jnp.abs(carry[1])) > 1e-3

        z, _ = jax.lax.while_loop(goes_on, lambda carry: (jnp.tanh(carry[0] @ w + x), carry[0] - x), (x, x))
        return w - 0.1 * z.T @ z, jax.lax.fori_loop(0, 3, lambda _, z: jnp.tanh(z @ w), z).mean()

    shapes = [jax.ShapeDtypeStruct((rows, 16), jnp.float32) for rows in (16, 32)]
    explained = deepcompile.shard(step, {"fsdp": 8}).trace(*shapes).explain(assume=True)
    assert "unknown: how often loops run whose length depends on values: while; one iteration of each" in explained
    assert "  one iteration is counted of loops whose length depends on values: while at tests/report/" in explained


@pytest.mark.pure
def test_what_moves_in_a_loop_moves_in_each_of_its_iterations():
    def moved_bytes(loop):
        def step(w, x):
            return w, loop(lambda x: jnp.tanh(x @ w)[::-1][:, ::-1], x).mean()

        shapes = [jax.ShapeDtypeStruct((rows, 16), jnp.float32) for rows in (16, 32)]
        explained = deepcompile.shard(step, {"fsdp": 8}, state_argnums=0).trace(*shapes).explain()
        return sum(each.bytes for each in explained.division.moved)

    def counted(times, body, x):
        return jax.lax.while_loop(lambda carry: carry[0] < times, lambda carry: (carry[0] + 1, body(carry[1])), (0, x))[
            1
        ]

    once = moved_bytes(lambda body, x: counted(1, body, x))
    assert once > 0
    assert moved_bytes(lambda body, x: counted(5, body, x)) == 5 * once


@pytest.mark.pure
@pytest.mark.parametrize(("sent_s", "beaten"), [(1.0, False), (9.0, True)])
def test_the_first_ceiling_says_what_it_adds_up_to_and_whether_a_schedule_may_reach_it(sent_s, beaten):
    alone_s = {Queue.COMPUTE: 4.0, Queue.NETWORK: sent_s}
    totals = Totals(5.0, sent_s, kernels_s={Part.PRODUCTS: 5.0}, slowed_s=1.0, alone_s=alone_s, delayed_s=0.5)
    run: Any = Simulation(10.0, totals, (), (), MemoryUse(0, 0, 0, 0, (), (), ()))
    ceilings = _ceilings(run, None)
    (line,) = (line for line in Seconds(10.0, bound_s=run.bound_s, ceilings=ceilings).lines() if "ceiling" in line)
    assert "(kernels alone 4 s, and 500 ms that those beside them cost at least): 4.5 s" in line
    assert line.endswith("no schedule of the same operations is below the bound") == beaten


@pytest.mark.pure
@pytest.mark.parametrize("together", [True, False], ids=["a tuple", "two arguments"])
def test_moments_are_the_optimizers_whatever_they_are_called(together):
    optimizer, params = optax.adamw(1e-3), {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}

    def step(p, o, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(p)
        updates, o = optimizer.update(grads, o, p)
        return optax.apply_updates(p, updates), o, loss

    def both(state, x):
        p, o, loss = step(*state, x)
        return (p, o), loss

    moments, x = jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((16, 64), jnp.float32)
    args = ((params, moments), x) if together else (params, moments, x)
    explained = deepcompile.shard(both if together else step, {"fsdp": 8}).trace(*args).explain()
    assert explained.headline.parameters == 64 * 64
    assert {"parameters", "optimizer state"} <= {each.role for each in explained.memory.roles}


@pytest.mark.pure
def test_a_flat_dictionary_names_its_optimizer_in_part_of_its_keys():
    """As Ninjax does, and safetensors."""

    def step(state, x):
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["net/w"])
        momentum = 0.9 * state["opt/momentum/net/w"] + gradient
        return {"net/w": state["net/w"] - 0.1 * momentum, "opt/momentum/net/w": momentum}

    w, x = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((16, 64), jnp.float32)
    explained = deepcompile.shard(step, {"fsdp": 8}).trace({"net/w": w, "opt/momentum/net/w": w}, x).explain()
    assert explained.headline.parameters == 64 * 64


@pytest.mark.pure
def test_words_are_those_that_the_batch_looks_up():
    """Not positions, which a step knows by itself."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return nn.Embed(256, 8)(tokens) + nn.Embed(32, 8)(jnp.arange(tokens.shape[1]))

    tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    params = jax.eval_shape(Net().init, jax.random.key(0), tokens)

    def step(params, tokens):
        loss, grads = jax.value_and_grad(lambda params: jnp.mean(Net().apply(params, tokens) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    program = deepcompile.shard(step, {"fsdp": 8}).trace(params, tokens).program
    assert vocabularies(program) == {256}


@pytest.mark.pure
@pytest.mark.parametrize(
    ("op_name", "said"),
    [
        ("jit(f)/shard_map/jvp(Net)/Dense_0/dot_general", "Net/Dense_0 dot_general"),
        ("jit(f)/shard_map/transpose(jvp(Net))/Dense_0/dot_general", "Net/Dense_0 @backward dot_general"),
        ("jit(f)/shard_map/while/body/rematted_computation/mlp/add", "mlp @backward add"),
        ("jit(f)/shard_map/jvp(Net)/(a/all_gather:b/all_gather)", "Net/a and 1 more all_gather"),
        ("jit(f)/(all_gather:a/b/all_gather)", "a/b and 1 more all_gather"),
        ("jit(f)/(all_gather:all_gather)", "2 all_gather"),
        ("jit(f)/a/dot;jit(f)/b/add", "a dot"),
        ("", ""),
    ],
)
def test_operations_are_called_by_the_users_scopes(op_name: str, said: str):
    assert operation_text(op_name) == said


@pytest.mark.pure
def test_lines_of_this_package_are_nobodys():
    assert users_line(f"{deepcompile.__file__}:1") == ""
    assert users_line("/mine/jax_deepcompile/step.py:1") == "/mine/jax_deepcompile/step.py:1"


@pytest.mark.pure
def test_lines_of_yours_are_whole_paths_in_data_and_short_in_text(monkeypatch, tmp_path):
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.sort(x @ w, axis=0)[:3]))(w)
        return w - grad, loss

    shapes = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    division = deepcompile.shard(step, {"fsdp": 8}).trace(*shapes).division()
    noted = (*division.moved, *division.whole)
    assert noted
    assert {each.line.partition(":")[0] for each in noted} == {__file__}
    monkeypatch.chdir(Path(__file__).parent)
    assert [line for line in division.lines() if " at test_explanation.py:" in line]
    assert {each.times for each in division.moved} <= {None}
