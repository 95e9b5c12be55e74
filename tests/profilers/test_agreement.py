"""A sharded step beside the step as written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jax_deepcompile as deepcompile
from jax_deepcompile.profilers.agreement import agreement, made_up


def step(state, batch):
    def loss(w):
        return jnp.mean((batch @ w["w"] + w["bias"] - jax.lax.stop_gradient(w["bias"])) ** 2)

    value, grads = jax.value_and_grad(loss)(state["w"])
    return {"w": optax.apply_updates(state["w"], jax.tree.map(lambda g: -0.1 * g, grads)), "n": state["n"] + 1}, value


STATE = {"w": {"w": jnp.eye(8), "bias": jnp.ones(8)}, "n": jnp.int32(3)}
BATCH = jnp.arange(64.0).reshape(8, 8) / 64


def compared(change, step=step, args=(STATE, BATCH)) -> tuple[str, ...]:
    """Leaves that are told to differ where ``change`` is what sharding does to the results, as (w, n, value)."""
    program = deepcompile.shard(step).trace(*args).program
    leaves, tree = jax.tree.flatten(args)

    def written(*values):
        return jax.tree.leaves(step(*jax.tree.unflatten(tree, values)))

    found = agreement(written, lambda *values: change(written(*values)), leaves, program, 0.01)
    return tuple(each.path for each in found.differing)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("place", "changed", "differing"),
    [
        (0, lambda n: n + 1, "state['n']"),
        (1, lambda bias: bias + 1e-3, "state['w']['bias']"),
        (2, lambda w: w + 1e-3, "state['w']['w']"),
        (3, lambda value: jnp.full_like(value, jnp.nan), "out[1]"),
        (3, lambda value: 1.02 * value, "out[1]"),
        (3, lambda value: 1.005 * value, None),
    ],
)
def test_what_differs_is_told_by_leaf(place, changed, differing):
    def change(results):
        return [changed(each) if at == place else each for at, each in enumerate(results)]

    assert compared(change) == (() if differing is None else (differing,))


@pytest.mark.pure
def test_numbers_that_are_not_finite_tell_nothing():
    """A count agrees, and so does an infinite mask that stays; a NaN in one run only is a difference."""

    def masked(state, batch):
        results, value = step(state["of"], batch)
        return {"of": results, "mask": state["mask"]}, value

    args = {"of": STATE, "mask": jnp.full(3, -jnp.inf)}, BATCH * jnp.nan
    found = deepcompile.shard(masked).validate(*args)
    assert not found.differing
    assert not found.agrees
    assert len(found.unknown) == 3
    assert "nothing is known of 3 of 5 leaves, without a finite number, the rest agrees" in str(found)
    assert "NaN in both" in str(found)
    assert compared(lambda results: [each + jnp.nan if each.ndim == 1 else each for each in results]) == (
        "state['w']['bias']",
    )


@pytest.mark.cpu_mesh
def test_rounding_where_the_true_gradient_is_zero_is_no_difference():
    """That of attention's key bias; what Adam makes of it are whole steps, this way or that."""

    def attend(state, batch):
        def loss(w):
            key, query = batch @ w["key"] + w["bias"], batch @ w["query"]
            return jnp.mean(jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", query, key)) @ batch)

        return jax.tree.map(lambda w, grad: w - jnp.sign(grad), state, jax.grad(loss)(state))

    matrices = {"key": (8, 8), "query": (8, 8), "bias": (8,)}
    state = {name: jax.random.normal(jax.random.key(len(name)), shape) for name, shape in matrices.items()}
    found = deepcompile.shard(attend).validate(state, jax.random.normal(jax.random.key(9), (32, 16, 8)))
    (bias,) = (each for each in found.leaves if "bias" in each.path)
    assert bias.difference > 0.1
    assert not found.differing


@pytest.mark.pure
@pytest.mark.parametrize(("dtype", "differing"), [(jnp.float32, ("out[1]",)), (jnp.bfloat16, ())])
def test_products_are_rounded_as_their_type_is(dtype, differing):
    """Parameters in single precision differ in their last bit, and by nothing once they are cast."""

    def half(state, batch):
        def loss(w):
            return jnp.mean((batch.astype(dtype) @ w.astype(dtype)).astype(jnp.float32) ** 2)

        grad = jax.grad(loss)(state)
        return state - 1e-3 * grad, jnp.sum(grad * jnp.cos(jnp.arange(64).reshape(8, 8)))

    def change(results):
        return [results[0], 1.015 * results[1]]

    assert compared(change, half, (jnp.eye(8) + BATCH, BATCH)) == differing


@pytest.mark.pure
def test_that_products_are_rounded_hides_no_wrong_update():
    def half(state, batch):
        return state - 1e-4 * jax.grad(lambda w: jnp.mean((batch @ w.astype(jnp.bfloat16)) ** 2))(state), 0

    args = (jnp.eye(8) + BATCH, BATCH.astype(jnp.bfloat16))
    assert compared(lambda results: [args[0] + 1.5 * (results[0] - args[0]), results[1]], half, args) == ("state",)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("how", ["constraint", "jit", "shard_map"])
def test_a_step_with_shardings_of_its_own_runs_on_the_devices_that_they_name(how):
    mesh = jax.sharding.Mesh(jax.devices(), "own")
    rows = jax.sharding.PartitionSpec("own")
    sharding = jax.sharding.NamedSharding(mesh, rows)

    def doubled(batch):
        if how == "constraint":
            return 2 * jax.lax.with_sharding_constraint(batch, sharding)
        if how == "jit":
            return jax.jit(lambda rows: 2 * rows, in_shardings=sharding)(batch)
        return jax.shard_map(lambda rows: 2 * rows, mesh=mesh, in_specs=rows, out_specs=rows)(batch)

    def own(state, batch):
        return state - jax.grad(lambda w: jnp.mean((doubled(batch) @ w) ** 2))(state)

    assert not deepcompile.shard(own).validate(jnp.eye(8), BATCH).differing


@pytest.mark.cpu_mesh
def test_objects_and_donated_state_stay_as_they_are():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    before = jnp.copy(model.kernel[...])

    @deepcompile.shard
    def train(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(batch) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    assert "all " in str(train.validate(model, optimizer, BATCH))
    assert (model.kernel[...] == before).all()
    train(model, optimizer, BATCH)


@pytest.mark.pure
def test_values_are_made_up_for_shapes_alone():
    shapes = (jax.ShapeDtypeStruct((3,), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int32), 5)
    floats, count, five = map(made_up, shapes)
    assert (floats.dtype, floats.shape, int(count), five) == (jnp.bfloat16, (3,), 0, 5)
    assert (floats >= 0).all()
    key = made_up(jax.eval_shape(lambda: jax.random.key(1)))
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


@pytest.mark.pure
@pytest.mark.parametrize("tolerance", [-0.1, 1.0, True, "1%"])
def test_a_tolerance_is_a_share(tolerance):
    with pytest.raises(deepcompile.errors.ArgumentError, match="a share, from 0 to 1"):
        deepcompile.shard(step).validate(STATE, BATCH, tolerance=tolerance)


@pytest.mark.cpu_mesh
def test_sums_that_a_cpu_rounds_at_every_step_are_no_difference():
    """The gradient of a bias in half precision: eight devices lose less of it than one."""

    def step(state, batch):
        grads = jax.grad(lambda w: jnp.mean(jnp.square(batch + w["bias"]).astype(jnp.float32)))(state)
        return jax.tree.map(lambda w, grad: w - grad, state, grads)

    batch = jax.random.uniform(jax.random.key(0), (64, 512, 16)).astype(jnp.bfloat16)
    found = deepcompile.shard(step).validate({"bias": jnp.zeros(16, jnp.bfloat16)}, batch)
    assert found.leaves[0].difference > 0.1
    assert not found.differing
