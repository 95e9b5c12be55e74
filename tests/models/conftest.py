import pytest


@pytest.fixture(autouse=True)
def _quick(quick_compilation):
    """Half of the time of these tests."""
