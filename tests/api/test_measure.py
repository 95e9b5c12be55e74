"""``measure=True``: the plans that simulate fastest are run on a copy of the state, and the fastest is taken."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from jax_deepcompile.profilers import rivals
from jax_deepcompile.profilers.hosts import HostProfileWarning, host_profile
from jax_deepcompile.runtime.memory import available_bytes

pytestmark = [pytest.mark.cpu_mesh, pytest.mark.usefixtures("quick_compilation")]

OPTIMIZER = optax.adam(1e-2)
BATCH = jnp.ones((16, 16))


def create():
    params = {
        f"{kind}{layer}": jnp.full((16,) * (1 + (kind == "w")), 0.1, jnp.float32) for layer in range(4) for kind in "wb"
    }
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


def step(state, x):
    def loss(params):
        h = x
        for layer in range(4):
            h = jnp.tanh(h @ params[f"w{layer}"] + params[f"b{layer}"])
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A step that was called once, the loss, and its cache."""
    folder = tmp_path_factory.mktemp("cache")
    sharded = deepcompile.shard(step, {"fsdp": 8}, measure=True, cache_dir=folder)
    state = sharded.init(create)
    state, loss = sharded(state, BATCH)
    return sharded, state, loss, folder


def test_the_state_goes_on_by_one_step(measured):
    _, state, loss, _ = measured
    expected, expected_loss = jax.jit(step)(create(), BATCH)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5), state, expected)


def test_what_ran_is_said(measured):
    sharded = measured[0]
    text = sharded.explain()
    assert "that were run" in text
    assert "measure [accepted]: number" in text
    assert "measured step: " in text
    ran = [record for record in sharded.plan(create(), BATCH).records if record.strategy == "measure"]
    assert 2 <= len(ran) <= 3
    assert sum(record.accepted for record in ran) == 1
    fastest = min(ran, key=lambda record: record.wall_s)
    assert fastest.accepted
    assert fastest.reason == f"measured {fastest.wall_s:.4g} s"


def test_simulated_figures_stay_those_that_it_was_planned_by(measured):
    """The fastest may be the step as it was before planning, which is no times as fast as itself."""
    headline = measured[0].explain().headline
    assert "kernels" not in headline.costs
    assert re.fullmatch(
        r"[\d.]+ \w+, measured; simulated [\d.]+ \w+(, [\d.]+x as fast as before planning as simulated)?",
        headline.step_text(),
    )


def test_before_the_first_call_nothing_is_measured_which_is_said(measured):
    state = measured[1]
    text = measured[0].reshard(cache_dir=None).trace(state, BATCH).explain()
    assert "the first call of the step runs it and the next best, and takes the fastest" in text


def test_the_profile_has_it_and_nothing_runs_again(measured):
    sharded, state, _, _ = measured
    taken = sharded.profile(state, BATCH)
    assert taken.args[0] is state
    assert taken.profile.step is not None
    again = sharded.reshard(profile=taken.profile, measure=False, cache_dir=None)
    assert "planned by a profile of a step" in again.trace(state, BATCH).explain()


def test_a_second_run_takes_the_plan_that_was_fastest(measured):
    sharded, state, _, _ = measured
    again = sharded.reshard()
    plan = again.plan(state, BATCH)
    assert plan == sharded.plan(state, BATCH)
    assert "kept from an earlier run" in again.explain()


def test_what_is_only_traced_is_planned_by_the_simulation():
    sharded = deepcompile.shard(step, {"fsdp": 8}, measure=True)
    state = jax.eval_shape(create)
    assert not [record for record in sharded.plan(state, BATCH).records if record.strategy == "measure"]


def test_no_devices():
    mesh = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))
    with pytest.raises(errors.NothingToMeasureOnError, match=r"these 8 \(NVIDIA H100 .*\) are not attached"):
        deepcompile.shard(step, mesh, measure=True)
    abstract = jax.sharding.AbstractMesh((8,), ("fsdp",))
    with pytest.raises(errors.NothingToMeasureOnError, match=r"these 8 \(abstract mesh\) are not attached"):
        deepcompile.shard(step, abstract, measure=True)


def test_no_room(monkeypatch):
    monkeypatch.setattr(rivals, "free_bytes", lambda mesh: 100)
    sharded = deepcompile.shard(step, {"fsdp": 8}, measure=True)
    state = sharded.init(create)
    with pytest.raises(errors.NoRoomToMeasureError) as caught:
        sharded(state, BATCH)
    said = str(caught.value)
    assert "no room: it takes" in said
    assert "and 100 bytes are free" in said
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("value", [1, "yes", None])
def test_neither_true_nor_false(value):
    with pytest.raises(errors.OptionTypeError, match="measure"):
        deepcompile.shard(step, {"fsdp": 8}, measure=value)


def test_a_host_is_measured_once(measured):
    sharded, _, _, folder = measured
    (path,) = (folder / "hosts").iterdir()
    before = path.read_text()
    assert host_profile(sharded.mesh, folder / "hosts").to_json() == before


@pytest.mark.parametrize("spoiled", ["{", "[]", "another machine"])
def test_what_was_kept_of_another_host_is_measured_anew(measured, tmp_path, spoiled):
    sharded, _, _, folder = measured
    (path,) = (folder / "hosts").iterdir()
    document = json.loads(path.read_text())
    document["profile"]["machine"]["device_kind"] = "another"
    here = tmp_path / path.name
    here.write_text(json.dumps(document) if spoiled == "another machine" else spoiled)
    with pytest.warns(HostProfileWarning, match=f"{path.name} is measured anew: "):
        found = host_profile(sharded.mesh, tmp_path)
    assert here.read_text() == found.to_json()


def test_a_profile_of_another_host_is_refused(measured):
    sharded, state, _, _ = measured
    profile = sharded.profile(state, BATCH).profile
    smaller = deepcompile.shard(step, {"fsdp": 4}, profile=profile)
    with pytest.raises(errors.ProfileMismatchError, match="another mesh"):
        smaller.plan(jax.eval_shape(create), BATCH)


def test_a_host_that_does_not_say_what_is_free(tmp_path):
    assert available_bytes(tmp_path / "none") is None
    (tmp_path / "empty").write_text("MemTotal: 5 kB\n")
    assert available_bytes(tmp_path / "empty") is None
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\nMemAvailable:  3 kB\n")
    assert available_bytes(tmp_path / "meminfo") == 3072
