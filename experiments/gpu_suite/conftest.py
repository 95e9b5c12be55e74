"""What pytest knows of the cases: their sizes, and the moment when the time of each is over."""

from __future__ import annotations

import faulthandler
import importlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from experiments.gpu_suite.sizes import SIZES, Sizes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sizes", choices=SIZES, default="full")
    parser.addoption("--begun-s", type=float, default=time.monotonic(), help="on the monotonic clock, of the suite")


@pytest.fixture(scope="session")
def sizes(pytestconfig: pytest.Config) -> Sizes:
    return SIZES[pytestconfig.option.sizes]()


@pytest.fixture
def left_s(section: str, sizes: Sizes, pytestconfig: pytest.Config) -> Iterator[float]:
    """Seconds for the case; some grace after them the process is ended, for nothing else stops a kernel that hangs."""
    left_s = pytestconfig.option.begun_s + sizes.budgets.until_s(section) - time.monotonic()
    if left_s <= 0:
        pytest.skip("out of time")
    faulthandler.dump_traceback_later(left_s + sizes.budgets.grace_s, exit=True, file=2)
    yield left_s
    faulthandler.cancel_dump_traceback_later()


def section_module(name: str) -> Any:
    """The module of a section: ``cases(sizes)``, and the ``rows(case, sizes, seconds)`` of each."""
    return importlib.import_module(f"experiments.gpu_suite.{name}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sizes = SIZES[metafunc.config.option.sizes]()
    cases = [(name, case) for name, _ in sizes.budgets.sections_s for case in section_module(name).cases(sizes)]
    ids = [f"{name}: {' '.join(map(str, case.values()))}" for name, case in cases]
    metafunc.parametrize(("section", "case"), cases, ids=ids)
