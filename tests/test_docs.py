"""What the documentation says works: examples run, and the exercise of ``docs/adding_a_pass.md`` step by step."""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile.cli.main import _commands
from jax_deepcompile.planner.strategies import ON_A_HOST, ONE_DEVICE, STRATEGIES
from jax_deepcompile.runtime.interrupts import Watch
from jax_deepcompile.transforms import TRANSFORMS

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
TYPED = """import jax
import jax_deepcompile as deepcompile


@deepcompile.shard
def step(state: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    return state, batch


loss: jax.Array = step({}, jax.numpy.ones(3))[1]
step({}, "text")


@deepcompile.shard({"fsdp": 8}, microbatches=2)
def other(state: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return batch

number: int = other({}, jax.numpy.ones(3))
"""
EXAMPLES = ("shard", "Plan", "simulate")
EXERCISE = """
import jax, jax.numpy as jnp, numpy as np
import jax_deepcompile as deepcompile
from jax_deepcompile.planner.strategies import STRATEGIES
from jax_deepcompile.planner.strategies.metrics_last import ComputeMetricsLast
from jax_deepcompile.transforms import TRANSFORMS
from jax_deepcompile.transforms.metrics_last import MetricsLast

assert MetricsLast in TRANSFORMS
assert ComputeMetricsLast() in STRATEGIES


def step(w, x):
    y = jnp.tanh(x @ w)
    accuracy = jnp.mean(jnp.sort(y) > 0.1)
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), accuracy


shapes = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
own = deepcompile.shard(step, {"fsdp": 8}, state_argnums=0, passes=(ComputeMetricsLast(),))
tried = own.plan(*shapes)
assert [record.strategy for record in tried.records] == ["metrics_last"], tried.records

plan = deepcompile.Plan("", (MetricsLast(),))
assert deepcompile.Plan.from_json(plan.to_json()) == plan
assert str(plan) == "what is only returned is computed last"
given = deepcompile.shard(step, {"fsdp": 8}, state_argnums=0, plan=plan)
names = [eqn.primitive.name for eqn in given.trace(*shapes).planned.jaxpr.eqns]
assert names.index("sort") > names.index("reduce_scatter"), names
w, x = (jax.random.normal(jax.random.key(seed), (16, 16)) for seed in (0, 1))
for got, expected in zip(given(w + 0, x), deepcompile.shard(step, {"fsdp": 8}, state_argnums=0)(w + 0, x), strict=True):
    np.testing.assert_array_equal(got, expected)
"""


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_examples_in_pages(page: Path):
    failed, _ = doctest.testfile(str(page), module_relative=False)
    assert not failed


@pytest.mark.cpu_mesh
def test_examples_of_public_names():
    """Each module that a public name is of has at least one."""
    modules = {sys.modules[getattr(deepcompile, name).__module__] for name in EXAMPLES}
    for module in modules:
        failed, tried = doctest.testmod(module)
        assert tried, f"{module.__name__} has no example"
        assert not failed


def anchors(page: Path) -> set[str]:
    """Of the headings of ``page``, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


def dead_links(page: Path) -> list[str]:
    dead = []
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.read_text()):
        path = page.parent / target if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            dead.append(f"{target}#{anchor}")
    return dead


@pytest.mark.pure
@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *PAGES], ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path):
    assert dead_links(page) == []


@pytest.mark.pure
def test_links_that_lead_nowhere_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c\n[1](#a-b-c) [2](page.md#a-b-c) [3](https://x.org#y) [4](#a-b) [5](none.md) [6](page.md#d)"
    )
    assert dead_links(page) == ["#a-b", "none.md#", "page.md#d"]


@pytest.mark.pure
def test_every_decision_and_strategy_is_explained():
    page = (ROOT / "docs" / "decisions.md").read_text()
    kinds = re.findall(r"^### `(\w+)`$", page, re.MULTILINE)
    assert sorted(kinds) == sorted(each.kind for each in TRANSFORMS)
    classes = {each.__name__ for each in TRANSFORMS} | {
        type(each).__name__ for each in (*STRATEGIES, *ONE_DEVICE, *ON_A_HOST)
    }
    assert set(re.findall(r"autoclass:: [\w.]+\.(\w+)$", page, re.MULTILINE)) == classes


@pytest.mark.pure
def test_every_public_name_and_command_is_in_the_reference():
    page = (ROOT / "docs" / "reference.md").read_text() + (ROOT / "docs" / "decisions.md").read_text()
    shown = {name.rpartition(".")[2] for name in re.findall(r"auto\w+:: ([\w.]+)(?:\(\))?$", page, re.MULTILINE)}
    assert set(deepcompile.__all__) <= shown
    commands = re.findall(r"^## `deepcompile (.*)`$", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
    assert set(commands) == set(_commands([], Watch()))


@pytest.mark.pure
def test_a_sharded_step_keeps_the_types_of_the_step(tmp_path: Path):
    source = tmp_path / "typed.py"
    source.write_text(TYPED)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(source)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert re.findall(r"typed.py:(\d+):\d+ - error", done.stdout) == ["11", "18"], done.stdout


@pytest.mark.cpu_mesh
def test_adding_a_pass(tmp_path: Path):
    text = (ROOT / "docs" / "adding_a_pass.md").read_text()
    package = tmp_path / "jax_deepcompile"
    shutil.copytree(ROOT / "jax_deepcompile", package, ignore=shutil.ignore_patterns("__pycache__"))
    sources = re.findall(r"^## [^\n]*`(jax_deepcompile/[^\n]*)`\n\n```python\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    assert len(sources) == 2
    for name, source in sources:
        (tmp_path / name).write_text(source)
    lists = re.findall(r"^In `(jax_deepcompile/[^`]*)`[^\n]*\n\n```diff\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    imports = {
        "transforms": "from jax_deepcompile.transforms.metrics_last import MetricsLast",
        "strategies": "from jax_deepcompile.planner.strategies.metrics_last import ComputeMetricsLast",
    }
    for name, change in lists:
        path = tmp_path / name
        before, after = (
            "".join(f"{line[1:]}\n" for line in change.splitlines() if line[0] in kept) for kept in (" ", " +")
        )
        lines = path.read_text()
        assert lines.count(before) == 1, before
        first = "from jax_deepcompile."
        lines = lines.replace(before, after).replace(first, f"{imports[path.parent.name]}\n{first}", 1)
        path.write_text(lines)
    done = subprocess.run(
        [sys.executable, "-c", EXERCISE],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
