import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import vit
from tests.models.checks import assert_a_gradient_step_lowers

TINY = vit.VIT_TINY
IMAGES_BxHxWx3 = np.random.default_rng(7).normal(size=(4, TINY.image_size, TINY.image_size, 3)).astype(np.float32)
LABELS_B = np.arange(4)


@pytest.mark.pure
def test_b16_has_the_published_number_of_parameters():
    model = nnx.eval_shape(lambda: vit.ViT(vit.VIT_B16, rngs=nnx.Rngs(0)))
    assert sum(math.prod(p.shape) for p in jax.tree.leaves(nnx.state(model, nnx.Param))) == 86_567_656


@pytest.mark.pure
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_are_float32_whatever_the_compute_dtype(dtype):
    model = nnx.eval_shape(lambda: vit.ViT(replace(TINY, dtype=dtype), rngs=nnx.Rngs(0)))
    logits = nnx.eval_shape(lambda model: model(IMAGES_BxHxWx3), model)
    assert logits.shape == (4, TINY.n_classes)
    assert logits.dtype == jnp.float32
    assert {p.dtype for p in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype(jnp.float32)}


@pytest.fixture(scope="module")
def model():
    return nnx.jit(lambda: vit.ViT(replace(TINY, dropout_rate=0.1), rngs=nnx.Rngs(0)))()


@pytest.mark.slow
@pytest.mark.cpu_mesh
def test_a_gradient_step_lowers_the_loss(model):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        copied = nnx.merge(graphdef, params, rest, copy=True)
        return vit.classification_loss(copied(IMAGES_BxHxWx3, train=True), LABELS_B)

    assert_a_gradient_step_lowers(loss, params, rate=0.02)


@pytest.mark.cpu_mesh
def test_dropout_draws_anew_in_training_only(model):
    @nnx.jit
    def twice(model):
        return [[model(IMAGES_BxHxWx3, train=train) for _ in range(2)] for train in (True, False)]

    (first, second), (third, fourth) = twice(model)
    assert jnp.abs(first - second).max() > 1e-2
    np.testing.assert_array_equal(third, fourth)


@pytest.mark.cpu_mesh
def test_every_patch_and_its_place_matter(model):
    apply = nnx.jit(lambda model, images: model(images))
    logits = apply(model, IMAGES_BxHxWx3)
    brighter_corner = IMAGES_BxHxWx3.copy()
    brighter_corner[:, -1, -1, :] += 1
    assert jnp.abs(logits - apply(model, brighter_corner)).max() > 1e-4
    swapped = np.roll(IMAGES_BxHxWx3, TINY.patch_size, axis=2)
    assert jnp.abs(logits - apply(model, swapped)).max() > 1e-4
