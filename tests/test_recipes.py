"""README's recipes as they stand."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "README.md").read_text()

YOURS = """
import jax, optax, numpy as np
import jax_deepcompile as deepcompile
from flax import nnx
from flax.training.train_state import TrainState

x = np.random.default_rng(0).standard_normal((16, 64), np.float32)


def create_state(key):
    return TrainState.create(apply_fn=None, params={"w": jax.random.normal(key, (64, 64))}, tx=optax.adamw(1e-2))


def loss_of(model, x):
    return ((model(x) - 2 * x) ** 2).mean()


def train_step(state, x):
    loss, grads = jax.value_and_grad(lambda params: loss_of(lambda x: x @ params["w"], x))(state.params)
    return state.apply_gradients(grads=grads), loss


"""
"""What recipes leave to the reader."""

RECIPES = dict(re.findall(r"^### ([^\n]+)$[^#]*?^```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def run(title: str, **given: Any) -> dict[str, Any]:
    """What a recipe's names are at its end."""
    names = dict(given)
    exec(compile(YOURS + RECIPES[title], title, "exec"), names)
    return names


@pytest.mark.pure
def test_each_has_ten_lines():
    assert set(RECIPES) == {"From elsewhere", "NNX", "Checkpoints by Orbax", "LoRA", "Several processes"}
    assert {title: recipe.count("\n") for title, recipe in RECIPES.items() if recipe.count("\n") > 10} == {}


@pytest.mark.cpu_mesh
def test_nnx():
    names = run("NNX")
    assert names["losses"][-1] < 0.9 * names["losses"][0]
    assert len(names["model"].kernel[...].sharding.device_set) == 8


@pytest.mark.cpu_mesh
def test_orbax(tmp_path: Path):
    names = run("Checkpoints by Orbax", folder=tmp_path)
    assert names["again"] == names["loss"]
    kernel = names["state"].params["w"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 8


@pytest.mark.cpu_mesh
def test_lora():
    names = run("LoRA")
    assert names["losses"][-1] < 0.9 * names["losses"][0]
    base = names["model"].base_module.kernel[...]
    np.testing.assert_array_equal(base, nnx.Linear(64, 64, rngs=nnx.Rngs(0)).kernel[...])
    assert base.addressable_shards[0].data.size == base.size // 8
    moments = jax.tree.leaves(nnx.state(names["optimizer"], nnx.optimizer.OptState))
    assert {leaf.shape for leaf in moments if leaf.ndim} == {(64, 4), (4, 64)}


@pytest.mark.slow
def test_several_processes(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "two.py"
    script.write_text(YOURS + RECIPES["Several processes"].replace("9876", str(port)))
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    with (
        subprocess.Popen([*command, "0"], env=environment, stdout=subprocess.PIPE, text=True) as one,
        subprocess.Popen([*command, "1"], env=environment, stdout=subprocess.PIPE, text=True) as other,
    ):
        printed = [each.communicate(timeout=300)[0] for each in (one, other)]
    first, second = ([float(line) for line in re.findall(r"^[\d.]+$", text, re.MULTILINE)] for text in printed)
    assert first == second
    assert first[-1] < first[0]


@pytest.mark.slow
def test_from_elsewhere(tmp_path: Path):
    """The wheel, in a folder that has nothing of the checkout; what it depends on is here already."""
    install, *lines = RECIPES["From elsewhere"].splitlines()
    assert install.startswith("pip install ")
    build = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path / "site"),
        str(ROOT),
    ]
    subprocess.run(build, check=True)
    command = f'deepcompile() {{ {sys.executable} -m jax_deepcompile "$@"; }}\nset -e\n' + "\n".join(lines)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "XLA_FLAGS": ""}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "finished after 3 steps" in done.stdout
    assert "train_step on fsdp=8" in done.stdout
