"""What fits: sizes of the batch are tried until the largest is known, and limits until a quarter of what is needed."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from jax_deepcompile.cli import main as cli
from jax_deepcompile.cli.fit import Fit, _takes, what_fits
from jax_deepcompile.cli.sizes import Shaped, Size, largest
from jax_deepcompile.planner.plan import Prediction
from jax_deepcompile.report.memory_curve import LimitedStep, monotone
from tests.transforms.programs import h100s


def step(state, tokens):
    def loss_of(w):
        x = w["embed"][tokens]
        x = jax.lax.scan(jax.checkpoint(lambda x, layer: (x + jnp.tanh(x @ layer), None)), x, w["layers"])[0]
        return jnp.mean(x**2)

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss


STATE = {
    "embed": jax.ShapeDtypeStruct((1024, 512), jnp.float32),
    "layers": jax.ShapeDtypeStruct((4, 512, 512), jnp.float32),
}


def size(count: int, most: int, state_bytes: int = 50) -> Size:
    """Of a step that takes a byte more for each example, and as much as it may where it fits."""
    limit, needed = state_bytes + most, state_bytes + count
    fits = Prediction(1.0, 1.0, 0.0, 0.0, limit) if count <= most else None
    return Size(count, 0, state_bytes, LimitedStep(limit, fits, limit if fits else needed))


@pytest.mark.pure
@pytest.mark.parametrize("start", [8, 64, 512])
@pytest.mark.parametrize("most", [8, 40, 100, 1000])
def test_the_largest_that_fits_is_found_by_few_plans(start, most):
    seen = []

    def tried(count: int) -> Size:
        seen.append(count)
        return size(count, most)

    good, bad = largest(size(start, most), start, 8, tried)
    assert good.examples <= most < bad.examples
    assert bad.examples <= 1.125 * good.examples + 8
    assert len(seen) == len(set(seen)) <= 6
    assert all(count % 8 == 0 for count in seen)


@pytest.mark.pure
def test_what_grows_faster_than_the_count_is_found_as_soon():
    seen = []

    def tried(count: int) -> Size:
        seen.append(count)
        fits = Prediction(1.0, 1.0, 0.0, 0.0, count**2) if count**2 <= 1_000_000 else None
        return Size(1, count, 50, LimitedStep(1_000_050, fits, 50 + count**2))

    good, bad = largest(tried(64), 64, 8, tried)
    assert 1000 / 1.125 <= good.length <= 1000 < bad.length <= 1.125 * good.length
    assert len(seen) <= 4


@pytest.mark.pure
def test_nothing_fits():
    (bad,) = largest(size(64, 0), 64, 8, lambda count: size(count, 0))
    assert bad.examples == 8


@pytest.mark.pure
def test_what_is_needed_is_told_apart_from_the_limit():
    assert _takes(LimitedStep(222 << 20, None, (222 << 20) + (300 << 10))) == (
        "does not fit, takes 222.29 MiB, 307,200 bytes more"
    )


@pytest.mark.pure
def test_less_memory_never_is_faster_and_what_fits_it_is_not_planned_again():
    def point(limit_bytes: int, step_s: float | None, needed_bytes: int) -> LimitedStep:
        fits = None if step_s is None else Prediction(step_s, 1.0, 0.0, 0.0, needed_bytes)
        return LimitedStep(limit_bytes, fits, needed_bytes)

    points = [point(90, 1.5, 80), point(70, 1.0, 60), point(50, 2.0, 50), point(20, None, 30)]
    assert [each.fits and each.fits.step_s for each in monotone(points)] == [1.0, 1.0, 2.0, None]
    assert [each.needed_bytes for each in monotone(points)] == [60, 60, 50, 30]
    assert points[1].under(65) == replace(points[1], limit_bytes=65)
    assert points[1].under(55) is points[1].under(80) is None
    assert points[3].under(10) == point(10, None, 30)


@pytest.mark.pure
def test_sequences_may_have_a_token_more_than_is_learned_from():
    shaped = Shaped(({}, jax.ShapeDtypeStruct((16, 2049), jnp.int32)), (1,))
    assert (shaped.examples, shaped.length) == (16, 2048)
    assert shaped.of(8, 4096)[1].shape == (8, 4097)


@pytest.mark.pure
def test_what_has_no_sequences_has_no_length():
    shaped = Shaped(({}, {"x": jnp.ones((16, 8)), "y": jnp.ones(16, jnp.int32), "scale": jnp.float32(1)}), (1,))
    assert shaped.length == 0
    given = shaped.of(32, 0)[1]
    assert (given["x"].shape, given["y"].shape, given["scale"].shape) == ((32, 8), (32,), ())


@pytest.mark.cpu_mesh
def test_where_nothing_is_simulated_that_is_said(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text("from tests.cli.test_fit import STATE, step\nimport jax, jax.numpy as jnp\n\n\ndef make():\n"
                    "    return step, STATE, jax.ShapeDtypeStruct((16, 64), jnp.int32)\n")  # fmt: skip
    assert cli.main(["fit", f"{file}:make"]) == 2
    said = capsys.readouterr().err
    assert f"{file}:make: nothing is simulated for its 8 devices (cpu), and so nothing says what fits." in said
    assert said.endswith(" Name GPUs, which need not be here: --gpu h100.\n")


@pytest.mark.cpu_mesh
def test_what_has_no_batch_is_refused():
    sharded = deepcompile.shard(lambda w: jax.tree.map(jnp.sin, w), h100s(), state_argnums=0)
    with pytest.raises(errors.StepSpecError, match="it has no batch to try sizes of"):
        what_fits(sharded, (STATE,), "it")


@pytest.mark.h100_aot
@pytest.mark.slow
def test_a_step_on_gpus_that_are_not_here():
    sharded = deepcompile.shard(step, h100s(), memory_limit="64MiB")
    found = what_fits(sharded, (STATE, jax.ShapeDtypeStruct((64, 256), jnp.int32)), "it")
    assert isinstance(found, Fit)
    for good, bad in (found.batch, found.length):
        assert good.takes.fits is not None
        assert good.takes.fits.peak_bytes <= 64 << 20 < bad.takes.needed_bytes
    seconds = [point.fits.step_s for point in found.curve if point.fits is not None]
    assert seconds == sorted(seconds)
    assert len(seconds) >= 2
    assert "largest sequence, 64 examples of" in str(found)
