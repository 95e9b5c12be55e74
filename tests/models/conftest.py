"""These tests compile much and compute little, so XLA's optimisations cost more than they save: half of the time."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
