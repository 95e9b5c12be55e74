"""The ways a step may be decorated, called and looked at."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_deepcompile as deepcompile
from jax_deepcompile.ir.program import Role
from tests.api.steps import arguments_of, assert_equal, batch, create, step

pytestmark = pytest.mark.cpu_mesh


@pytest.fixture(scope="module")
def expected():
    return jax.jit(step)(create(), batch())


class Cluster:
    """As a target, of devices that are here."""

    size = 8

    def make_mesh(self, shape, names):
        return jax.make_mesh(shape, names)


@pytest.mark.parametrize(
    "decorate",
    [
        deepcompile.shard,
        deepcompile.shard(),
        deepcompile.shard({"fsdp": 8}),
        deepcompile.shard({"data": 2, "fsdp": 4}),
        deepcompile.shard({"anything": 8}),
        deepcompile.shard({"replica": 2, "shards": 4}, fsdp_axes="shards", data_axes="replica"),
        deepcompile.shard({"a": 2, "b": 4}, fsdp_axes=("a", "b")),
        deepcompile.shard(Cluster()),
        lambda fun: deepcompile.shard(fun, Cluster(), fsdp_axes="shards"),
        lambda fun: deepcompile.shard(jax.make_mesh((8,), ("fsdp",)))(fun),
        lambda fun: deepcompile.shard(fun, Mesh(np.array(jax.devices()), ("fsdp",))),
        lambda fun: deepcompile.shard(fun, mesh=Mesh(np.array(jax.devices()[:2]), ("fsdp",))),
        lambda fun: deepcompile.shard(jax.jit(fun)),
        deepcompile.shard(donate=False),
    ],
)
def test_every_way_to_decorate(decorate, expected):
    sharded = decorate(step)
    assert sharded.__name__ == "step"
    assert_equal(sharded(create(), batch()), expected)


def test_state_comes_back_sharded_and_metrics_replicated():
    sharded = deepcompile.shard(step)
    state, loss = sharded(sharded.init(create), batch())
    assert state["w"].sharding.spec == PartitionSpec("fsdp")
    assert state["w"].addressable_shards[0].data.shape == (2, 8)
    assert loss.sharding.is_fully_replicated


def test_state_is_donated_unless_asked_not_to():
    for donate in (True, False):
        sharded = deepcompile.shard(step, donate=donate)
        state = sharded.init(create)
        sharded(state, batch())
        assert state["w"].is_deleted() == donate


def test_no_device_ever_holds_the_state_whole():
    """What ``init`` compiles needs less than half of the state on each device."""
    big = (1 << 10, 1 << 10)

    def create_big(key):
        keys = jax.random.split(key, 4)
        return {"w": [jax.random.normal(key, big) for key in keys], "m": [jnp.zeros(big) for _ in keys]}

    sharded = deepcompile.shard(lambda state, x: (jax.tree.map(lambda leaf: leaf + x.sum(), state), 0.0))
    state = sharded.init(create_big, jax.random.key(3))
    np.testing.assert_array_equal(state["w"][0], jax.random.normal(jax.random.split(jax.random.key(3), 4)[0], big))
    from jax_deepcompile.frontend.trace import trace_init
    from jax_deepcompile.lowering.emit import emit
    from jax_deepcompile.partition.partition import partition_init

    use = sharded._context.use
    traced = trace_init(create_big, (jax.random.key(3),), {}, use.axes)
    program = partition_init(traced.program, use.mesh, use.state).program
    memory = jax.jit(emit(program, use.mesh)).lower(jax.random.key(3)).compile().memory_analysis()
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 8 * 4 * big[0] * big[1] / 2


def other_mesh() -> Mesh:
    return jax.make_mesh((8,), ("other",))


@pytest.mark.parametrize(
    "place",
    [
        lambda x: x,
        jnp.asarray,
        lambda x: jax.device_put(x, jax.devices()[3]),
        lambda x: jax.device_put(x, NamedSharding(other_mesh(), PartitionSpec(*(None, "other")[2 - np.ndim(x) :]))),
    ],
    ids=["numpy", "uncommitted", "one device", "another sharding"],
)
def test_batches_and_states_from_anywhere(place, expected):
    sharded = deepcompile.shard(step)
    state = jax.tree.map(place, create())
    for _ in range(2):
        found = sharded(jax.tree.map(place, create()), jax.tree.map(place, batch()))
        assert_equal(found, expected)
    assert_equal(sharded(state, batch()), expected)


def test_numpys_wide_defaults_are_what_jax_makes_of_them(expected):
    """float64 and int64, numpy's own choice, in the batch and in the state."""
    wide_state = {"w": np.arange(128.0).reshape(16, 8) / 100, "count": np.int64(0)}
    wide_batch = {"x": batch()["x"].astype(np.float64), "ids": np.arange(16)}
    assert wide_batch["ids"].dtype == np.int64
    found = deepcompile.shard(step)(wide_state, wide_batch)
    assert_equal(found, expected)


def test_numpys_arrays_are_taken_where_jit_is_disabled(expected):
    with jax.disable_jit():
        found = deepcompile.shard(step)(create(), batch())
    assert_equal(found, expected)


def test_a_state_that_holds_one_array_twice():
    def averaging(state, batch):
        new, loss = step(state["now"], batch)
        return {"now": new, "average": jax.tree.map(lambda a, b: (a + b) // 2, state["average"], new)}, loss

    sharded = deepcompile.shard(averaging)
    once = sharded.init(lambda: {"now": create(), "average": create()})["now"]
    found = sharded({"now": once, "average": once}, batch())
    assert_equal(found, jax.jit(averaging)({"now": create(), "average": create()}, batch()))


def test_a_state_that_is_nowhere_yet_and_holds_one_replicated_array_twice():
    """What is put on more devices has the memory of the original on its own."""

    def averaging(state, other, batch):
        new = jax.tree.map(lambda leaf: leaf - batch["x"].mean() - other["scale"], state["now"])
        return {"now": new, "average": jax.tree.map(jnp.add, state["average"], new)}, other["scale"] + 1

    once = {"scale": jnp.ones(()), "w": jnp.ones((16, 8))}
    expected = jax.jit(averaging)({"now": once, "average": once}, once, batch())
    assert_equal(deepcompile.shard(averaging)({"now": once, "average": once}, once, batch()), expected)
    np.testing.assert_array_equal(once["scale"], 1.0)


def test_everything_in_the_states_form_keeps_its_sharding():
    def with_gradients(state, batch):
        grads = jax.tree.map(lambda leaf: leaf * 0 + batch["x"].sum().astype(leaf.dtype), state)
        return grads, jax.tree.map(lambda w, g: w - g, state, grads)

    grads, state = deepcompile.shard(with_gradients)(create(), batch())
    assert grads["w"].sharding.spec == state["w"].sharding.spec == PartitionSpec("fsdp")


def test_other_batch_sizes_and_keywords(expected):
    sharded = deepcompile.shard(step)
    assert_equal(sharded(state=create(), batch=batch()), expected)
    assert_equal(sharded(create(), batch(8)), jax.jit(step)(create(), batch(8)))
    assert_equal(sharded(create(), batch=batch()), expected)


def test_a_later_batch_the_mesh_does_not_divide():
    sharded = deepcompile.shard(step)
    state, _ = sharded(create(), batch())
    for _ in range(2):
        with pytest.raises(deepcompile.errors.BatchNotDivisibleError, match="leading dimension 12"):
            sharded(state, batch(12))
    sharded(state, batch(24))


def test_a_step_that_makes_its_own_batch():
    def made(state, seed):
        return step(state, {"x": jax.random.normal(jax.random.key(seed), (8, 16))})

    assert_equal(deepcompile.shard(made)(create(), 5), jax.jit(made)(create(), 5))


def test_a_model_in_nnx_with_an_optax_state():
    optimizer = optax.adam(1e-2)

    def trained(model, moments, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        updates, moments = optimizer.update(grads, moments)
        nnx.update(model, optax.apply_updates(nnx.state(model, nnx.Param), updates))
        return moments, loss

    def given():
        model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        return model, optimizer.init(nnx.state(model, nnx.Param)), batch()["x"]

    sharded, (model, *rest), (plain, *others) = deepcompile.shard(trained), given(), given()
    assert_equal(sharded(model, *rest), nnx.jit(trained)(plain, *others))
    assert_equal(nnx.state(model), nnx.state(plain))
    assert arguments_of(sharded) == "state: model, moments; batch: x"


def test_other_lengths_in_later_calls():
    def scaled(state, batch, by):
        return step(state, {"x": batch["x"] * by.mean()})

    sharded = deepcompile.shard(scaled)
    for rows, count in ((16, 16), (16, 12), (16, 16), (8, 3)):
        by = np.arange(1.0, 1 + count, dtype=np.float32)
        assert_equal(sharded(create(), batch(rows), by), jax.jit(scaled)(create(), batch(rows), by))


class State(NamedTuple):
    key: jax.Array
    raw_key: jax.Array
    steps: int
    done: jax.Array
    nothing: None
    w: jax.Array


def test_keys_numbers_flags_and_nothing_in_the_state():
    def noisy(state: State, x):
        key, now = jax.random.split(state.key)
        raw_key, raw_now = jax.random.split(state.raw_key)
        keep = jax.random.bernoulli(now, 0.5, (x.shape[0], 16)) & (jax.random.uniform(raw_now, (x.shape[0], 1)) < 0.9)
        w = state.w + (x * keep).sum(0)[:, None]
        return State(key, raw_key, state.steps + 1, ~state.done, None, w), keep

    def fresh():
        key = jax.random.key(1)
        return State(key, jax.random.PRNGKey(2), 0, jnp.array(False), None, jnp.zeros((16, 8)))

    sharded, plain = deepcompile.shard(noisy, {"data": 2, "fsdp": 4}), jax.jit(noisy)
    mine, theirs = fresh(), fresh()
    for _ in range(3):
        mine, kept = sharded(mine, batch()["x"])
        theirs, wanted = plain(theirs, batch()["x"])
        np.testing.assert_array_equal(kept, wanted)
    assert jax.random.key_data(mine.key).tolist() == jax.random.key_data(theirs.key).tolist()
    assert_equal(mine, theirs)


def test_large_random_arrays_count_beyond_32_bits():
    """Element ``2**32 + i`` of a stream uses the high word of its counter."""
    shape = (1 << 17, 1 << 16)

    def corner(state, x):
        return state, jax.random.bits(state, shape)[:, :1].sum(dtype=jnp.uint32)

    traced = deepcompile.shard(corner).trace(jax.random.key(0), np.zeros((8, 1), np.float32))
    assert "1073741824" not in traced.explain()


def test_printing_happens_once_a_step(capfd):
    def printing(state, batch):
        jax.debug.print("mean {}", batch["x"].mean())
        return step(state, batch)

    sharded = deepcompile.shard(printing)
    jax.block_until_ready(sharded(create(), batch()))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("mean") == 1


def test_arguments_with_as_many_examples_as_the_batch_are_divided(expected):
    """Images, labels and whatever else there is of every example; not what is as long by chance in some leaves only."""

    def labelled(state, images, labels, table, *, weights):
        return step(state, {"x": images + 0 * labels[:, None] * weights["per example"][:, None] + 0 * table["row"]})

    sharded = deepcompile.shard(labelled)
    x = batch()["x"]
    weights = {"per example": x[:, 1]}
    args = (create(), x, x[:, 0], {"row": x[0], "other": np.ones(3, np.float32)})
    assert_equal(sharded(*args, weights=weights), expected)
    roles = {port.path: port.role for port in sharded.trace(*args, weights=weights).planned.inputs}
    assert [roles[path] for path in ("images", "labels", "weights['per example']")] == [Role.BATCH] * 3
    assert roles["table['row']"] is Role.OTHER


def test_a_batch_passed_by_keyword_alone_is_divided(expected):
    def keyword(state, *, batch):
        return step(state, batch)

    sharded = deepcompile.shard(keyword)
    assert_equal(sharded(create(), batch=batch()), expected)
    assert "shaped like a batch" not in sharded.explain()


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_random_keys_are_neither_state_nor_batch(key, expected):
    def key_first(key, state, batch):
        return jax.random.split(key)[0], *step(state, batch)

    def key_between(state, key, batch):
        return step(state, batch)

    new_key, *others = deepcompile.shard(key_first)(key, create(), batch())
    assert new_key.dtype == key.dtype
    assert_equal(tuple(others), expected)
    between = deepcompile.shard(key_between)
    assert_equal(between(create(), key, batch()), expected)
    assert Role.BATCH in {port.role for port in between._last.program.inputs}


def test_tensor_parallelism_by_the_users_own_constraints(expected):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def constrained(state, batch):
        def loss_of(w):
            w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec(None, "tensor")))
            y = jax.lax.with_sharding_constraint(batch["x"] @ w, NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))
            return jnp.mean(y**2)

        loss, grad = jax.value_and_grad(loss_of)(state["w"])
        return {"w": state["w"] - 0.1 * grad, "count": state["count"] + 1}, loss

    sharded = deepcompile.shard(constrained, mesh)
    assert_equal(sharded(create(), batch()), expected)
    assert "annotations" not in sharded.explain()
    text = sharded.lower(create(), batch()).compile().as_text()
    assert "f32[4,4]" in text, "the product of 4 rows a device is divided in two along the features"


@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"fsdp": 1}, {"data": 2, "fsdp": 4}])
def test_values_that_the_user_reshards_between_explicit_axes(shape, expected):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))

    def explicit(state, batch):
        def loss_of(w):
            y = jax.sharding.reshard(batch["x"] @ w, NamedSharding(mesh, PartitionSpec("fsdp", None)))
            return jnp.mean(jax.sharding.reshard(y, NamedSharding(mesh, PartitionSpec())) ** 2)

        loss, grad = jax.value_and_grad(loss_of)(state["w"])
        return {"w": state["w"] - 0.1 * grad, "count": state["count"] + 1}, loss

    sharded = deepcompile.shard(explicit, shape)
    assert_equal(sharded(create(), batch()), expected)
    text = sharded.explain()
    assert "computed whole on every device: nothing" in text
    assert ("divisions are derived here:\n  P(None, None) at " in text) == (shape["fsdp"] > 1)
    assert "P('fsdp', None)" not in text


def test_what_a_step_takes_by_name_is_validated_and_profiled_by_name():
    def named(state, *, batch):
        return step(state, batch)

    sharded = deepcompile.shard(named)
    assert sharded.validate(create(), batch=batch()).agrees
    (state,) = sharded.profile(create(), batch=batch(), runs=1).args
    assert not sharded(state, batch=batch())[0]["w"].is_deleted()


def test_arrays_divided_along_the_explicit_axes_of_another_mesh(expected):
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    sharded = deepcompile.shard(step)
    state, given = jax.device_put(create(), {"w": rows, "count": None}), jax.device_put(batch(), rows)
    assert sharded.validate(state, given).agrees
    assert_equal(sharded(state, given), expected)


@pytest.mark.parametrize("around", [lambda step: step, jax.jit], ids=["called", "in jit"])
def test_arrays_along_explicit_axes_after_others(around, expected):
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharded = around(deepcompile.shard(step))
    state, _ = sharded(create(), batch())
    given = jax.device_put(batch(), NamedSharding(mesh, PartitionSpec("rows")))
    assert_equal(sharded(create(), given), expected)
    assert_equal(sharded(state, given), jax.jit(step)(expected[0], batch()))


def test_gradients_of_whole_numbers_are_returned_as_jit_does():
    def indexed(state, batch):
        def loss_of(state):
            return jnp.mean((batch["x"][:, state["columns"]] @ state["w"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of, allow_int=True)(state)
        return {"w": state["w"] - 0.1 * grads["w"], "columns": state["columns"]}, {"loss": loss, "grads": grads}

    def state():
        return {"w": create()["w"], "columns": jnp.arange(16)[::-1]}

    expected, found = jax.jit(indexed)(state(), batch()), deepcompile.shard(indexed)(state(), batch())
    assert found[1]["grads"].pop("columns").dtype == expected[1]["grads"].pop("columns").dtype == jax.dtypes.float0
    assert_equal(found, expected)


def manual_step(mesh, spec, body):
    """The square of each element, times one, by a ``shard_map`` as its users write it."""

    return trained_by(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))


def trained_by(region):
    """A step whose loss is the mean of what ``region`` makes of its products."""

    def manual(state, batch):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(region(batch["x"] @ w)))(state["w"])
        return {"w": state["w"] - 0.1 * grad, "count": state["count"] + 1}, loss

    return manual


def rolled(axis):
    """With a nested ``jit``, a scan, an index and collectives of values that vary or do not."""

    def body(y):
        def add(total, part):
            return total + jnp.roll(part, 1).sum(), part

        total, _ = jax.lax.scan(add, jax.lax.pcast(jnp.zeros(()), axis, to="varying"), y)
        mean = jax.lax.pmean(total + jax.lax.axis_index(axis), axis) / 8.0
        return y**2 * (1 + jnp.tanh(mean - jax.lax.psum(total, axis))) + jnp.roll(y, 1, axis=0)

    return body


@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"data": 2, "fsdp": 4}, {"data": 8, "fsdp": 1}])
@pytest.mark.parametrize("axis", ["fsdp", "replica"])
def test_a_checked_manual_region_over_an_axis_of_any_name(axis, shape):
    mesh = jax.make_mesh((8,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))
    manual = manual_step(mesh, PartitionSpec(axis), rolled(axis))
    assert_equal(deepcompile.shard(manual, shape)(create(), batch()), jax.jit(manual)(create(), batch()))


def every_collective(over, one):
    """Of those ``over`` two axes and of those over the ``one`` that has one device."""

    def body(y):
        gathered = jax.lax.all_gather(y, one, axis=1, tiled=True) + jax.lax.all_to_all(y, one, 1, 1, tiled=True)
        scattered = jax.lax.psum_scatter(y[None], one) + jax.lax.ppermute(y, one, [(0, 0)])
        share = jax.lax.axis_index(over) * jax.lax.axis_size(one) / 8.0
        return (gathered * scattered + jax.lax.psum(y, one)) * (share + jax.lax.pmean(jnp.mean(y), over))

    return body


def test_a_manual_region_along_an_axis_of_one_device():
    mesh = jax.make_mesh((8, 1), ("x", "one"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    manual = manual_step(mesh, PartitionSpec("x", "one"), every_collective(("x", "one"), "one"))
    found = deepcompile.shard(manual, {"fsdp": 8})(create(), batch())
    assert_equal(found, jax.jit(manual)(create(), batch()))


def test_a_manual_region_over_our_axis_and_one_left_to_xla():
    """It has two results, and constraints of its own inside."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    spec = PartitionSpec("data", "tensor")

    def body(y):
        y = jax.lax.with_sharding_constraint(y, PartitionSpec(None, "fsdp"))
        return y * jax.lax.pmean(y.sum(), ("data", "tensor")), y**2

    def region(y):
        mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=(spec, spec), axis_names={"data", "tensor"})
        return sum(mapped(y))

    manual = trained_by(region)
    assert_equal(deepcompile.shard(manual, mesh)(create(), batch()), jax.jit(manual)(create(), batch()))


def test_a_manual_region_in_another_over_an_axis_of_ours():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def inner(y):
        spec = PartitionSpec(None, "fsdp")
        return jax.shard_map(jnp.square, in_specs=spec, out_specs=spec, axis_names={"fsdp"})(y)

    spec = PartitionSpec("data")
    manual = trained_by(jax.shard_map(inner, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"}))
    with pytest.raises(deepcompile.errors.NestedManualError, match=r"test_calls.py:\d+ .* divides along 'fsdp'"):
        deepcompile.shard(manual, mesh)(create(), batch())


@pytest.mark.parametrize("names", [("fsdp",), ("data", "model")])
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_mesh_that_the_user_has_set(kind, names, expected):
    shape = (8,) if len(names) == 1 else (2, 4)
    sharded = deepcompile.shard(step)
    with jax.set_mesh(jax.make_mesh(shape, names, axis_types=(kind,) * len(names))):
        assert_equal(sharded(sharded.init(create), batch()), expected)


def test_a_manual_region_over_explicit_axes():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))
    step = deepcompile.shard(manual_step(mesh, PartitionSpec("fsdp"), jnp.square))
    with pytest.raises(
        deepcompile.errors.ExplicitAxesError, match=r"manual .*AxisType.Auto.* JAX said: in_specs passed"
    ):
        step(create(), batch())


def test_a_manual_region_over_fewer_blocks_than_there_are_devices():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    manual = manual_step(mesh, PartitionSpec("x"), rolled("x"))
    found = deepcompile.shard(manual, {"data": 2, "fsdp": 4})(create(), batch())
    assert_equal(found, jax.jit(manual)(create(), batch()))


@pytest.mark.parametrize("shape", [{"fsdp": 1}, {"fsdp": 2}])
def test_a_manual_region_that_no_axes_of_the_mesh_stand_for(shape):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    step = deepcompile.shard(manual_step(mesh, PartitionSpec("x"), rolled("x")), shape)
    with pytest.raises(
        deepcompile.errors.ManualAxisError, match=r"shard_map at .*test_calls.py:\d+ .* 8 blocks along its axis 'x'"
    ):
        step(create(), batch())


def test_a_manual_region_that_divides_in_another_order():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    step = deepcompile.shard(manual_step(mesh, PartitionSpec(("fsdp", "data")), jnp.square), {"data": 2, "fsdp": 4})
    with pytest.raises(deepcompile.errors.ManualAxesOrderError, match="axes in the order data, fsdp"):
        step(create(), batch())


def jit_takes(y, sharding):
    return jax.jit(lambda y: y * 1, in_shardings=sharding)(y)


def jit_returns(y, sharding):
    return jax.jit(lambda y: y * 1, out_shardings=sharding)(y)


@pytest.mark.parametrize("annotate", [jax.lax.with_sharding_constraint, jax.device_put, jit_takes, jit_returns])
@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"fsdp": 1}])
def test_constraints_by_axes_that_the_mesh_lacks_are_left_out(shape, annotate, expected):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    sharded = deepcompile.shard(trained_by(lambda y: annotate(y, split) ** 2), shape)
    assert_equal(sharded(create(), batch()), expected)
    assert ("P('fsdp', 'tensor') at " in sharded.explain()) == (shape["fsdp"] > 1)


def test_a_manual_region_of_the_users_own(expected):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

    def manual_mean(y):
        split, whole = PartitionSpec("fsdp"), PartitionSpec()
        mean = jax.shard_map(
            lambda y: jax.lax.pmean(jnp.mean(y**2), "fsdp"), mesh=mesh, in_specs=split, out_specs=whole, check_vma=False
        )
        return mean(y)

    def with_region(state, batch):
        loss, grad = jax.value_and_grad(lambda w: manual_mean(batch["x"] @ w))(state["w"])
        return {"w": state["w"] - 0.1 * grad, "count": state["count"] + 1}, loss

    assert_equal(deepcompile.shard(with_region, mesh)(create(), batch()), expected)


def test_what_is_compiled_ahead_of_time_is_what_runs():
    sharded = deepcompile.shard(step)
    state = sharded.init(create)
    compiled = sharded.lower(state, batch()).compile()
    assert "all-gather" in compiled.as_text()
    assert "reduce-scatter" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes == 16 * 8 * 4 // 8 + 4 + 2 * 16 * 4
    assert "1 of 2 leaves sharded" in sharded.explain()


def test_a_call_finds_what_was_compiled_from_shapes(caplog):
    sharded = deepcompile.shard(step)
    state = sharded.init(create)
    shapes = jax.eval_shape(create), jax.eval_shape(batch)
    sharded.lower(*shapes).compile()
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        sharded(state, jax.tree.map(np.asarray, batch()))
    assert not [record for record in caplog.messages if "XLA compilation" in record and "step" in record]


@pytest.mark.parametrize("options", [{}, {"memory_limit": "1GiB"}, {"mesh": {"fsdp": 1}}])
def test_state_from_anywhere_is_compiled_for_once(caplog, options):
    sharded, state = deepcompile.shard(step, **options), create()
    sharded.plan(state, batch())
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        for _ in range(2):  # another run of the same step begins with a state that is on one device
            state = create()
            for _ in range(3):
                state, _ = sharded(state, batch())
    assert len([record for record in caplog.messages if "Finished XLA compilation of jit(step)" in record]) == 1


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey])
def test_numbers_numpy_and_keys_that_come_back_are_compiled_for_once(caplog, key):
    """Python's count of steps comes back as a weakly typed array, also out of a loop, what was NumPy's sharded."""

    def counted(state, key, batch):
        key, noise = jax.random.split(key)
        x = batch["x"] + jax.random.normal(noise, batch["x"].shape)
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        count, _ = jax.lax.scan(lambda count, _: (count + 1, None), state["count"], None, length=2)
        return {"w": state["w"] - 0.1 * grads, "count": count}, key, jnp.mean(x)

    sharded, plain = deepcompile.shard(counted), jax.jit(counted)
    state, found = ({"w": np.ones((16, 8), np.float32), "count": 0}, key(0)), None
    expected = state
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        for _ in range(3):
            *state, found = sharded(*state, batch())
    for _ in range(3):
        *expected, loss = plain(*expected, batch())
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    assert int(state[0]["count"]) == 6
    assert state[0]["count"].weak_type == expected[0]["count"].weak_type
    assert len([record for record in caplog.messages if "Finished XLA compilation of jit(counted)" in record]) == 1


def test_what_comes_back_in_place_of_an_argument_is_compiled_for_once(caplog):
    """A hidden state, and a vector that is replaced rather than carried on, which look like no state."""

    def recurrent(weights, hidden, vector, x):
        hidden = jnp.tanh(hidden @ weights + x)
        product = x.T @ (x @ vector)
        return weights - 0.1 * jax.grad(lambda w: jnp.sum((hidden @ w) ** 2))(weights), hidden, product / product.max()

    sharded, plain = deepcompile.shard(recurrent, state_argnums=0), jax.jit(recurrent)
    x, args = 0.1 * jnp.ones((16, 24)), (0.1 * jnp.eye(24), jnp.zeros((16, 24)), jnp.ones((24, 8)))
    expected = args
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        for _ in range(3):
            args = sharded(*args, x)
    for _ in range(3):
        expected = plain(*expected, x)
    assert_equal(args, expected)
    assert len([each for each in caplog.messages if "Finished XLA compilation of jit(recurrent)" in each]) == 1


def test_batches_of_numpy_and_on_devices_are_compiled_for_once(caplog):
    sharded, plain = deepcompile.shard(step), jax.jit(step)
    rows = jax.NamedSharding(sharded.mesh, jax.P("fsdp"))
    forms = [np.asarray, lambda x: jax.device_put(x, rows), jnp.asarray, np.asarray, lambda x: jax.device_put(x, rows)]
    state = expected = create()
    state = jax.tree.map(jnp.copy, state)
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        for form in forms:
            state, found = sharded(state, jax.tree.map(form, batch()))
    assert len([each for each in caplog.messages if "Finished XLA compilation of jit(step)" in each]) == 1
    for _ in forms:
        expected, metrics = plain(expected, batch())
    assert_equal((state, found), (expected, metrics))


def test_a_primitive_without_a_rule_is_computed_whole_and_named():
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    double = Primitive("double_it")
    double.def_abstract_eval(lambda x: x)
    mlir.register_lowering(double, mlir.lower_fun(lambda x: x * 2, multiple_results=False))

    def unusual(state, batch):
        return step(state, {"x": double.bind(batch["x"]) / 2})

    sharded = deepcompile.shard(unusual)
    assert_equal(sharded(create(), batch()), jax.jit(step)(create(), batch()))
    explained = sharded.explain()
    assert "double_it at" in explained
    assert "test_calls.py" in explained
    assert "no rule for primitive 'double_it'" in explained


def test_a_sharded_step_may_be_traced_by_jax(expected):
    sharded = deepcompile.shard(step)
    shapes = jax.eval_shape(sharded, create(), batch())
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), expected
    )
    assert_equal(jax.jit(sharded)(create(), batch()), expected)
    assert_equal(sharded(create(), batch()), expected)


def test_a_loop_of_sharded_steps():
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, 2 * leaf]), batch())
    looped, _ = jax.jit(lambda state, batches: jax.lax.scan(deepcompile.shard(step), state, batches))(create(), stacked)
    state = create()
    for index in range(2):
        state, _ = jax.jit(step)(state, jax.tree.map(lambda leaf, index=index: leaf[index], stacked))
    assert_equal(looped, state)
