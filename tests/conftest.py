"""Eight virtual CPU devices for every test, and quick compilation: set before JAX starts."""

import gc
import os
from importlib.metadata import version

import pytest
from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAGS = {
    "--xla_force_host_platform_device_count": 8,
    "--xla_backend_optimization_level": 0,
    "--xla_cpu_parallel_codegen_split_count": 1,
}
if version("jaxlib").startswith("0.10."):  # later ones have no other emitters, and know no such flag
    _FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
for _flag, _value in _FLAGS.items():
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}={_value}".strip()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also what is marked slow")


def pytest_configure(config: pytest.Config) -> None:
    """Of properties the same examples every time, half as many but for what says how many itself."""
    if not config.getoption("--all"):
        settings.register_profile("quick", max_examples=settings.default.max_examples // 2, derandomize=True)
        settings.load_profile("quick")


def pytest_collection_finish() -> None:
    """Collects rarely, and not what is there for good: of a test's time a tenth is spent in looking for cycles."""
    gc.set_threshold(20_000)
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one file run in one process, which so makes and compiles once what they share; of the house first.

    Among those is what takes longest in one piece, the types of all that there is: last, it would run alone.
    """
    items.sort(key=lambda item: len(item.path.parts))
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.location[0]))
    if config.getoption("--all"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


@pytest.fixture
def quick_compilation():
    """For tests that compile much and compute little: XLA's optimisations cost them more than they save."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
