"""Eight virtual CPU devices for every test, set before JAX starts."""

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_COUNT = "--xla_force_host_platform_device_count"
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=8".strip()


@pytest.fixture
def quick_compilation():
    """For tests that compile much and compute little: XLA's optimisations cost them more than they save."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
