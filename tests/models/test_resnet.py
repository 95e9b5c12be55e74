import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import resnet
from tests.models.checks import assert_a_gradient_step_lowers

TINY = resnet.RESNET_TINY
MODEL = resnet.ResNet(TINY)
IMAGES_BxHxWx3 = np.random.default_rng(7).normal(3, 2, size=(4, 32, 32, 3)).astype(np.float32)
LABELS_B = np.arange(4)


@pytest.fixture(scope="module")
def variables():
    return jax.jit(MODEL.init)(jax.random.key(0), IMAGES_BxHxWx3)


@pytest.mark.pure
def test_resnet50_has_the_published_number_of_parameters():
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    variables = jax.eval_shape(resnet.ResNet(resnet.RESNET50).init, jax.random.key(0), images)
    assert sum(math.prod(p.shape) for p in jax.tree.leaves(variables["params"])) == 25_557_032
    assert sum(math.prod(p.shape) for p in jax.tree.leaves(variables["batch_stats"])) == 53_120


@pytest.mark.pure
def test_resnet50_halves_the_image_five_times():
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    model = resnet.ResNet(resnet.RESNET50)
    _, state = jax.eval_shape(
        lambda images: model.init_with_output(jax.random.key(0), images, capture_intermediates=True), images
    )
    outputs = state["intermediates"]
    assert outputs["stem"]["__call__"][0].shape == (1, 112, 112, 64)
    assert outputs["stage_0_block_2"]["__call__"][0].shape == (1, 56, 56, 256)
    assert outputs["stage_3_block_2"]["__call__"][0].shape == (1, 7, 7, 2048)


@pytest.mark.pure
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_are_float32_whatever_the_compute_dtype(dtype):
    model = resnet.ResNet(replace(TINY, dtype=dtype))
    logits, variables = jax.eval_shape(model.init_with_output, jax.random.key(0), IMAGES_BxHxWx3)
    assert logits.shape == (4, TINY.n_classes)
    assert logits.dtype == jnp.float32
    assert {v.dtype for v in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}


@pytest.mark.cpu_mesh
def test_a_gradient_step_lowers_the_loss(variables):
    def loss(params):
        logits, _ = MODEL.apply({**variables, "params": params}, IMAGES_BxHxWx3, train=True, mutable=["batch_stats"])
        return resnet.classification_loss(logits, LABELS_B)

    assert_a_gradient_step_lowers(loss, variables["params"])


@pytest.mark.cpu_mesh
def test_training_normalises_by_the_batch_and_moves_the_running_averages(variables):
    apply = jax.jit(lambda images: MODEL.apply(variables, images, train=True, mutable=["batch_stats"]))
    logits, updates = apply(IMAGES_BxHxWx3)
    scaled, _ = apply(5 * IMAGES_BxHxWx3)
    np.testing.assert_allclose(logits, scaled, rtol=1e-3, atol=1e-3)
    was, now = variables["batch_stats"]["stem_norm"], updates["batch_stats"]["stem_norm"]
    np.testing.assert_array_equal(was["mean"], 0.0)
    assert jnp.abs(now["mean"]).min() > 0
    assert jnp.abs(now["var"] - was["var"]).min() > 0


@pytest.mark.cpu_mesh
def test_evaluation_treats_each_image_alone(variables):
    apply = jax.jit(MODEL.apply)
    np.testing.assert_allclose(
        apply(variables, IMAGES_BxHxWx3)[:1], apply(variables, IMAGES_BxHxWx3[:1]), rtol=1e-4, atol=1e-5
    )
