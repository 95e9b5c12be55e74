"""A changed planner makes other plans; a changed report does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jax_deepcompile.planner.version import ROOMS, planner_digest
from tests.test_architecture import MAY_IMPORT, PACKAGE

pytestmark = pytest.mark.pure

DECIDES_NOTHING = {"runtime"}


def test_the_planner_is_all_that_it_imports():
    rooms = {"planner"}
    for _ in MAY_IMPORT:
        rooms |= {each for room in rooms for each in MAY_IMPORT[room] - DECIDES_NOTHING}
    assert {room.removesuffix(".py") for room in ROOMS} == rooms | {"_jax_compat"}
    assert all((PACKAGE / room).exists() for room in ROOMS)


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ("transforms/prefetch.py", True),
        ("planner/search.py", True),
        ("lowering/gpus/h100_sxm.txtpb", True),
        ("costs/published/new.csv", True),
        ("_jax_compat.py", True),
        ("report/words.py", False),
        ("cli/main.py", False),
        ("errors.py", False),
        ("planner/__pycache__/plan.cpython-311.pyc", False),
    ],
)
def test_what_counts(tmp_path: Path, changed: str, counts: bool):
    package = tmp_path / "package"
    shutil.copytree(PACKAGE, package)
    other = tmp_path / "other"
    shutil.copytree(PACKAGE, other)
    assert planner_digest(other) == planner_digest(package) == planner_digest()
    planner_digest.cache_clear()
    (other / changed).parent.mkdir(parents=True, exist_ok=True)
    with open(other / changed, "a") as file:
        file.write("\n")
    assert (planner_digest(other) != planner_digest(package)) == counts
