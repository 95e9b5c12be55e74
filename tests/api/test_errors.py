"""Bad input is answered with a sentence that says what, where, the values and the remedy."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, AxisType

import jax_deepcompile as deepcompile
from jax_deepcompile import errors

pytestmark = pytest.mark.pure

STATE = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32), "count": jax.ShapeDtypeStruct((), jnp.int32)}
BATCH = {"x": jax.ShapeDtypeStruct((16, 16), jnp.float32)}


def step(state, batch):
    return {"w": state["w"] - batch["x"].sum(), "count": state["count"] + 1}, batch["x"].mean()


def trace(fun, state=STATE, batch=BATCH, mesh=None, **options):
    return deepcompile.shard(fun, mesh, **options).trace(state, batch)


def test_a_batch_the_mesh_does_not_divide():
    with pytest.raises(errors.BatchNotDivisibleError) as caught:
        trace(step, batch={"x": jax.ShapeDtypeStruct((12, 16), jnp.float32)})
    assert str(caught.value) == (
        "batch leaf batch['x'] has shape (12, 16): its leading dimension 12 must be a multiple of 8, the number of "
        "devices along the mesh axes fsdp. Use a batch of 8 or 16 examples, or drop the last, shorter batch of an "
        "epoch. Examples lead: where time or microbatches do, transpose or reshape it before the step. If it holds no "
        "examples, make it an argument of its own, which is replicated, or name the arguments "
        "that do: shard(..., batch_argnums=...), () for none. If it is state, "
        "name what is: shard(..., state_argnums=...)."
    )


def test_one_argument_named_as_both():
    with pytest.raises(errors.StateAndBatchError, match="both name position 1: an argument is one or the other"):
        deepcompile.shard(step, state_argnums=(0, 1), batch_argnums=1)


@pytest.mark.parametrize("argnums", [{"state_argnums": (0, -1)}, {"batch_argnums": -1}])
def test_positions_below_the_first(argnums):
    with pytest.raises(errors.ArgnumsError, match="positions count the parameters of the step from the first"):
        deepcompile.shard(step, **argnums)


def test_a_position_behind_the_last():
    with pytest.raises(
        errors.ArgnumsError, match=r"batch_argnums is \(2,\): .* the first, which is 0. Its last is 1\.$"
    ):
        deepcompile.shard(step, batch_argnums=2).trace(STATE, BATCH)


def test_no_mesh_axis_of_that_name():
    with pytest.raises(errors.MeshAxisError) as caught:
        deepcompile.shard(step, {"data": 4, "model": 2})
    assert str(caught.value) == (
        "the mesh has no axis 'fsdp' to shard over: its axes are data=4, model=2. Name the right one, "
        "shard(mesh, fsdp_axes=\"data\"), or give the mesh an axis called 'fsdp'."
    )
    with pytest.raises(errors.MeshAxisError, match="no axis 'replica'"):
        deepcompile.shard(step, {"fsdp": 8}, data_axes="replica")


def test_a_mesh_larger_than_the_devices():
    with pytest.raises(errors.MeshTooLargeError, match=r"fsdp=16 needs 16 devices and there are 8 \(cpu\)"):
        deepcompile.shard(step, {"fsdp": 16})


def test_a_step_that_does_not_return_its_state():
    with pytest.raises(errors.StateNotReturnedError) as caught:
        trace(lambda state, batch: batch["x"].mean())
    assert "nothing it returns has the structure of argument state. It returned float32[]" in str(caught.value)
    assert "shard(..., state_argnums=...)" in str(caught.value)


def test_a_state_returned_with_a_leaf_missing():
    with pytest.raises(errors.StateChangedError, match=r"state\['count'\] is missing"):
        trace(lambda state, batch: ({"w": state["w"]}, batch["x"].mean()))


def test_a_state_returned_with_another_dtype():
    with pytest.raises(errors.StateChangedError) as caught:
        trace(lambda state, batch: ({"w": state["w"], "count": state["count"] + 1.0}, 0.0))
    assert "state['count'] was int32[] and is float32[]" in str(caught.value)
    assert ".astype(old.dtype)" in str(caught.value)


def test_a_state_returned_with_another_shape():
    with pytest.raises(errors.StateChangedError, match=r"state\['w'\] was float32\[16,8\] and is float32\[8,16\]"):
        trace(lambda state, batch: ({"w": state["w"].T, "count": state["count"]}, 0.0))


def test_a_train_state_whose_static_fields_change():
    def create():
        return TrainState(step=0, apply_fn=None, params={"w": jnp.zeros(8)}, tx=None, opt_state=())

    with pytest.raises(errors.StateChangedError, match=r"static fields of state \(TrainState\) differ"):
        trace(lambda state, batch: (state.replace(apply_fn=step), 0.0), state=create())

    def nested(state, batch):
        return {**state, "train": state["train"].replace(apply_fn=step)}, 0.0

    with pytest.raises(errors.StateChangedError, match=r"static fields of state\['train'\] \(TrainState\) differ"):
        trace(nested, state={"train": create(), "w": jnp.zeros(8)})
    with pytest.raises(errors.StateChangedError, match=r"state\['layers'\] was a list and is a tuple"):
        trace(lambda state, batch: ({"layers": tuple(state["layers"])}, 0.0), state={"layers": [jnp.zeros(8)] * 2})


def test_a_leaf_that_is_neither_array_nor_number():
    with pytest.raises(errors.LeafTypeError) as caught:
        trace(step, state={"w": "sixteen by eight", "count": 0})
    assert "argument leaf state['w'] is a builtins.str, neither an array nor a number: 'sixteen by eight'" in str(
        caught.value
    )
    with pytest.raises(errors.LeafTypeError, match=r"numpy.ndarray of <U5, neither numbers nor random keys: array"):
        trace(step, batch={"x": BATCH["x"], "names": np.array(["one", "three"])})
    with pytest.raises(errors.LeafTypeError, match=r"one at a step: for batch in batch: ..."):
        trace(step, batch=iter([BATCH]))


@pytest.mark.parametrize("kind", ["tensor", "masked", "other bytes"])
def test_an_array_that_jax_does_not_take_is_named(kind):
    tensor = SimpleNamespace(shape=(16,), ndim=1, dtype=SimpleNamespace(name="torch.float32"))
    masked = np.ma.MaskedArray(np.ones(16), [True] + [False] * 15)
    given = {"tensor": tensor, "masked": masked, "other bytes": np.ones(16, ">f4")}[kind]
    with pytest.raises(errors.LeafTypeError, match=r"leaf batch\['z'\] is a .*, which JAX does not take .* Pass"):
        trace(step, batch={"x": BATCH["x"], "z": given})


def test_a_value_that_is_needed_while_tracing_is_called_as_the_user_does():
    def descend(state, *others):
        new, loss = step(state, others[0])
        return (new, loss) if others[0]["x"].sum() > 0 else (state, loss)

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        trace(descend)
    assert "while tracing the function" in str(caught.value)
    assert "descend. This" in str(caught.value)
    assert "depends on the value of the argument args[1]['x']" in str(caught.value)


def test_a_flag_that_is_needed_while_tracing():
    def flagged(state, batch, train):
        return step(state, batch) if train else (state, 0.0)

    for args, kwargs in (((True,), {}), ((), {"train": True})):
        with pytest.raises(errors.PythonValueNeededError) as caught:
            deepcompile.shard(flagged).trace(STATE, BATCH, *args, **kwargs)
        assert "flagged needs the value of train while it is traced, for an if, a loop or a shape" in str(caught.value)
        assert "with functools.partial(flagged, train=...) in the place of flagged" in str(caught.value)
    fixed = deepcompile.shard(functools.partial(flagged, train=True))
    assert fixed.trace(STATE, BATCH).program.name.endswith("flagged")


def test_numbers_that_are_needed_while_tracing():
    def sized(state, batch, *, options):
        return step(state, {"x": batch["x"] + jnp.ones(options["length"]).sum()})

    with pytest.raises(errors.PythonValueNeededError, match=r"needs the value of options\['length'\] .*options=\.\.\."):
        deepcompile.shard(sized).trace(STATE, BATCH, options={"length": 3})

    def create(width):
        return jnp.zeros(width)

    with pytest.raises(errors.PythonValueNeededError, match=r"create needs the value of width"):
        deepcompile.shard(step).init(create, 8)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Model:
    """As Equinox has them: every field is a leaf."""

    w: jax.Array | jax.ShapeDtypeStruct
    use_bias: bool


@pytest.mark.parametrize("flag", [True, np.True_])
def test_a_flag_in_the_state_that_is_needed_while_tracing(flag):
    def flagged(model, batch):
        loss = batch["x"].sum() if model.use_bias else 0.0
        return Model(model.w - loss, model.use_bias), loss

    with pytest.raises(errors.StateValueNeededError) as caught:
        trace(flagged, state=Model(STATE["w"], flag))
    assert "flagged needs the value of model.use_bias while it is traced" in str(caught.value)
    assert "params, static = eqx.partition(model, eqx.is_array) before the step" in str(caught.value)
    trace(lambda model, batch: (Model(model.w - batch["x"].sum(), model.use_bias), 0.0), state=Model(STATE["w"], flag))


@pytest.mark.parametrize("leaf", [np.dtype("float32"), np.float32, jnp.bfloat16, object()])
def test_leaves_that_look_like_numbers(leaf):
    with pytest.raises(
        errors.LeafTypeError, match=r"argument leaf state\['kind'\] is a .*, neither an array nor a number"
    ):
        trace(step, state={"w": STATE["w"], "kind": leaf})


def test_values_of_arrays_that_are_needed_are_left_to_jax():
    def comparing(state, batch, limit):
        return step(state, batch) if batch["x"].mean() < limit else (state, 0.0)

    with pytest.raises(jax.errors.TracerBoolConversionError):
        deepcompile.shard(comparing).trace(STATE, BATCH, 1.0)


def test_a_method_of_a_plain_object():
    class Trainer:
        @deepcompile.shard
        def step(self, state, batch):
            return step(state, batch)

    with pytest.raises(
        errors.PlainSelfError, match=r"Trainer\.step is a method of a .*Trainer, .*: self\.step = shard"
    ):
        Trainer().step(STATE, BATCH)
    with pytest.raises(errors.PlainSelfError):
        Trainer().step.trace(STATE, BATCH)


def test_host_callbacks_are_refused_with_the_line():
    def calling(state, batch):
        jax.experimental.io_callback(print, None, batch["x"])
        return step(state, batch)

    with pytest.raises(errors.HostCallbackError, match=r"io_callback at .*test_errors.py:\d+ \(.*calling\)"):
        trace(calling)


def test_a_pure_function_on_the_host_is_called_on_every_device_and_said_to_be():
    def pure(state, batch):
        x = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((16, 16), jnp.float32), batch["x"])
        return step(state, {"x": x})

    traced = deepcompile.shard(pure, {"fsdp": 8}).trace(STATE, BATCH)
    assert "a function on the host is of whole arrays" in str(traced.explain())


def test_a_function_on_the_host_of_more_than_devices_can_be_handed_at_once():
    def large(state, batch):
        x = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((1024, 32), jnp.float32), batch["x"])
        return step(state, {"x": x})

    with pytest.raises(errors.HostCallbackError, match=r"pure_callback at .*large\).*float32\[1024,32\].* 100 KiB"):
        trace(large, batch={"x": jax.ShapeDtypeStruct((1024, 32), jnp.float32)})


COUNTER = jax.new_ref(np.int32(0))


def closed_over(state, batch):
    COUNTER[...] += 1
    return step(state, batch)


def test_a_mutable_array_that_a_step_closes_over_is_refused():
    line = r"closed_over uses a mutable array \(jax.new_ref\) at .*test_errors.py:\d+"
    with pytest.raises(errors.MutableArrayError, match=line):
        trace(closed_over)


def test_a_mutable_array_as_argument_is_refused():
    with pytest.raises(errors.MutableArrayError, match=r"argument leaf batch\['count'\] is a mutable array"):
        trace(step, batch=BATCH | {"count": COUNTER})


def test_ordered_prints_are_refused():
    def printing(state, batch):
        jax.debug.print("{}", batch["x"].sum(), ordered=True)
        return step(state, batch)

    with pytest.raises(errors.OrderedEffectError, match="Drop ordered=True"):
        trace(printing)


def test_a_pmapped_step_is_refused():
    with pytest.raises(errors.PmappedStepError, match="Decorate the plain function instead"):
        deepcompile.shard(jax.pmap(step))


def test_names_that_are_missing_otherwise_are_left_to_python():
    with pytest.raises(NameError, match="'forgotten' is not defined"):
        trace(lambda state, batch: forgotten(state))  # noqa: F821


def test_a_static_argument_of_what_a_step_calls():
    flagged = jax.jit(lambda state, batch, train: step(state, batch), static_argnums=2)

    def outer(state, batch, train):
        return flagged(state, batch, train)

    with pytest.raises(errors.TracedStaticArgumentError, match=r"shard\(functools.partial\(outer, ...\)\)"):
        deepcompile.shard(outer).trace(STATE, BATCH, True)


def test_what_is_no_array_among_the_metrics():
    with pytest.raises(errors.ReturnedLeafError, match=r"returns 'epoch' at out\[1\]\['name'\], a builtins.str"):
        trace(lambda state, batch: (state, {"name": "epoch"}))
    with pytest.raises(errors.ReturnedLeafError, match=r"at out\[1\]\['x'\], a builtins.object"):
        trace(lambda state, batch: (state, {"x": object()}))


@pytest.mark.parametrize("calls", [1, 2])
def test_state_that_an_earlier_step_was_given(calls):
    """The first call takes another way than later ones."""
    sharded = deepcompile.shard(step)
    state, batch = {"w": np.ones((16, 8), np.float32), "count": 0}, {"x": np.ones((16, 16), np.float32)}
    for _ in range(calls):
        state, _ = sharded(state, batch)
    sharded(state, batch)
    with pytest.raises(errors.StateDonatedError, match=r"passed state\['count'\], a int32\[\] whose memory is gone"):
        sharded(state, batch)


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_one_leaf_of_the_state_that_an_earlier_step_was_given(calls):
    sharded = deepcompile.shard(step)
    state, batch = {"w": np.ones((16, 8), np.float32), "count": 0}, {"x": np.ones((16, 16), np.float32)}
    state, _ = sharded(state, batch)
    best = state["w"]
    state, _ = sharded(state, batch)
    for _ in range(calls):
        state, _ = sharded(state, batch)
    with pytest.raises(errors.StateDonatedError, match=r"state\['w'\], a float32\[16,8\] .* Go on with the state"):
        sharded({"w": best, "count": state["count"]}, batch)
    assert int(sharded(state, batch)[0]["count"]) == calls + 3


@pytest.mark.parametrize("where", ["batch['x']", "scale"])
def test_what_is_no_state_and_gone_is_not_called_state(where):
    def scaled(state, batch, scale):
        return step(state, {"x": batch["x"] * scale[0]})

    sharded = deepcompile.shard(scaled)
    state = {"w": np.ones((16, 8), np.float32), "count": 0}
    others = {"x": jnp.ones((16, 16))}, jnp.ones(3)
    for _ in range(2):
        state, _ = sharded(state, *others)
    (others[0]["x"] if where.startswith("batch") else others[1]).delete()
    with pytest.raises(errors.StateDonatedError) as caught:
        sharded(state, *others)
    assert f"passed {where}, a float32" in str(caught.value)
    assert "Pass an array that is still there" in str(caught.value)
    assert "the state that step returned" not in str(caught.value)


def test_devices_that_are_not_attached():
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    sharded = deepcompile.shard(step, mesh)
    assert "psum" in str(sharded.trace(STATE, BATCH).sharded)
    with pytest.raises(errors.DevicesNotAttachedError, match=r"sharded for 8 devices .* can be traced, lowered"):
        sharded({"w": np.zeros((16, 8), np.float32), "count": 0}, {"x": np.zeros((16, 16), np.float32)})


def test_explaining_what_was_never_traced():
    with pytest.raises(errors.NotTracedError, match="has not been traced yet"):
        deepcompile.shard(step).explain()


def test_every_error_is_a_deepcompile_error():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert all(issubclass(kind, (errors.DeepCompileError, Warning)) for kind in kinds)


@pytest.mark.parametrize(("name", "kind"), [("plan", "Plan"), ("profile", "Profile")])
def test_a_plan_or_profile_as_text(name, kind):
    with pytest.raises(errors.OptionTypeError, match=rf"shard\({name}=.*\(deepcompile\.{kind}\.from_json\(text\)"):
        deepcompile.shard(step, **{name: "{}"})
    assert getattr(deepcompile, kind).from_json


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mesh", "fsdp"),
        ("mesh", 8),
        ("state_argnums", "x"),
        ("state_argnums", True),
        ("batch_argnums", (1, "x")),
        ("fsdp_axes", ()),
        ("fsdp_axes", ("fsdp", "fsdp")),
        ("data_axes", 3),
        ("data_axes", ("data", "data")),
        ("passes", "prefetch"),
        ("passes", ("prefetch",)),
        ("passes", (deepcompile.PipelineLoops,)),
        ("cache_dir", 3),
        ("cache_dir", ""),
        ("cache_dir", "a\0b"),
        ("cache_dir", b"x"),
        ("cache_dir", "\ud800"),
        ("state_argnums", (0, 0)),
        ("donate", "no"),
    ],
)
def test_options_that_cannot_be_meant(name, value):
    with pytest.raises(errors.OptionTypeError, match=rf"^shard\({name}=.*\): expected .*, and this is a \w+\.$"):
        deepcompile.shard(step, **{name: value})
    with pytest.raises(errors.OptionTypeError):
        deepcompile.shard(step).reshard(**{name: value})


def test_an_axis_that_is_to_divide_and_to_replicate():
    sentence = r"shard\(fsdp_axes='fsdp', data_axes='fsdp'\): the mesh axis 'fsdp' is named twice.*Leave it out of data"
    with pytest.raises(errors.AxisUseError, match=sentence):
        deepcompile.shard(step, data_axes="fsdp")
    with pytest.raises(errors.AxisUseError, match="the mesh axis 'x' is named twice"):
        deepcompile.shard(step, {"x": 8}, data_axes=("x",))
    assert deepcompile.shard(step, {"data": 8}, fsdp_axes="data").mesh.axis_names == ("data",)


def test_unknown_passes_are_refused_at_once():
    with pytest.raises(errors.UnknownPassError, match="passes leaves out 'x', which is no strategy"):
        deepcompile.shard(step, passes="-x")
    with pytest.raises(errors.UnknownPassError):
        deepcompile.shard(passes="-unshard,-x")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: deepcompile.shard(step).profile(1, 2, runs=0),
            r"profile\(runs=0\): expected a whole number, at least 1",
        ),
        (lambda: deepcompile.shard(step).profile(1, 2, runs=-1), r"profile\(runs=-1\): expected a whole number"),
        (lambda: deepcompile.shard(step).profile(1, 2, runs="x"), r"profile\(runs='x'\): expected a whole number"),
        (
            lambda: deepcompile.shard(step).profile(1, 2, known="x"),
            r"profile\(known='x'\): expected a deepcompile.Profile",
        ),
        (lambda: deepcompile.shard(step).init(3), r"init\(create_state=3\): expected a function that makes the state"),
        (lambda: deepcompile.simulate(3, None), r"simulate\(mesh=None\): expected the jax.sharding.Mesh"),
        (
            lambda: deepcompile.simulate(3, deepcompile.shard(step).mesh),
            r"simulate\(step=3\): expected a traced or a compiled step: step.trace",
        ),
        (lambda: deepcompile.targets.h100(1).make_mesh(8, "fsdp"), r"make_mesh\(shape=8\): expected a tuple.* \(8,\)"),
        (
            lambda: deepcompile.targets.h100(1).make_mesh((-8, -1), "ab"),
            r"make_mesh\(shape=\(-8, -1\)\): expected a tuple",
        ),
        (
            lambda: deepcompile.targets.h100(1).make_mesh((8,), "fsdp"),
            r"make_mesh\(names='fsdp'\): expected a tuple of 1",
        ),
        (
            lambda: deepcompile.targets.h100(1).make_mesh((4, 2), ("a",)),
            r"make_mesh\(names=\('a',\)\): expected a tuple of 2",
        ),
    ],
)
def test_arguments_that_cannot_be_meant(call, sentence):
    with pytest.raises(errors.ArgumentError, match=sentence):
        call()


@pytest.mark.parametrize("given", [None, 3, b"\xff"])
def test_what_is_no_text_of_a_profile(given):
    with pytest.raises(errors.ProfileFormatError, match="is not a profile"):
        deepcompile.Profile.from_json(given)


def test_what_is_no_step():
    for given in (8, "fsdp"):
        with pytest.raises(errors.OptionTypeError, match=r"^shard\(fun=.*a function \(state, batch, ...\)"):
            deepcompile.shard(given)
    with pytest.raises(errors.OptionTypeError, match="the function first"):
        deepcompile.shard({"fsdp": 8}, {"fsdp": 4})


@pytest.mark.parametrize(
    "shape", [{"fsdp": -1}, {"fsdp": 0}, {"fsdp": 2.0}, {"fsdp": True}, {"fsdp": "8"}, {0: 8}, {"": 8}, {}]
)
def test_shapes_that_no_mesh_has(shape):
    with pytest.raises(errors.MeshShapeError, match=r"a whole number of devices, at least 1, .* there are 8 devices"):
        deepcompile.shard(step, shape)


@pytest.mark.parametrize(
    "limit", [float("nan"), float("inf"), [1], 1.5, 2.0, True, -1, "9" * 401, 2**63, "1.5", "nan", 1 + 1j]
)
@pytest.mark.parametrize(("option", "whose"), [("memory_limit", "device's"), ("host_memory_limit", "host's")])
def test_memory_limits_that_cannot_be_meant(option, whose, limit):
    with pytest.raises(
        errors.MemoryLimitError, match=rf"^{option}=.* is not understood. .* None for the {whose} memory"
    ):
        deepcompile.shard(step, **{option: limit})


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"data": 2, "fsdp": np.int64(4).item()}},
        {"state_argnums": [0]},
        {"fsdp_axes": ["fsdp"], "data_axes": ()},
        {"passes": [deepcompile.PipelineLoops(), deepcompile.KeepActivations()]},
        {"memory_limit": 72e9},
        {"memory_limit": np.int64(1 << 30)},
        {"memory_limit": np.float32(0.5)},
        {"host_memory_limit": "100GiB"},
    ],
)
def test_options_that_can_be_meant(options):
    assert deepcompile.shard(step, **options).mesh.size == 8
