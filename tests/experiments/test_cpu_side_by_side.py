"""What one device sends in a sharded step is never more than in the same step under ``jax.jit`` with FSDP shardings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import jax
import pytest

from experiments import cpu_side_by_side as side
from experiments import trainings
from experiments.bench.command import BENCHMARKS
from experiments.bench.rows import Results
from experiments.bench.side_by_side import SideBySide
from experiments.command import bench
from experiments.small_models import SmallResNet, SmallTransformer
from models import gpt2, llama, mixtral, resnet, vit

pytestmark = pytest.mark.cpu_mesh

SAVED = dataclasses.replace(llama.LLAMA_TINY, remat_policy=None)

SMALL: dict[str, Callable[[], trainings.Training]] = {
    "mlp": lambda: trainings.mlp_training(width=64, layers=3, examples=128),
    "mlp, few examples": lambda: trainings.mlp_training(width=128, layers=3, examples=16),
    "llama": lambda: trainings.llama_training(llama.LLAMA_TINY, 16, 16),
    "unrolled llama": lambda: trainings.llama_training(dataclasses.replace(SAVED, scan_layers=False), 16, 16),
    "mixtral": lambda: trainings.mixtral_training(mixtral.MIXTRAL_TINY, 16, 16),
    "vit": lambda: trainings.vit_training(vit.VIT_TINY, 16),
    "resnet": lambda: trainings.resnet_training(resnet.RESNET_TINY, 32, 16),
    "small resnet": lambda: trainings.image_training(SmallResNet(blocks=1), 10, 16, 16),
    "small transformer": lambda: trainings.next_token_training(SmallTransformer(64, 16, 32, 2, 2), 64, 16, 16),
    "gpt2 in microbatches": lambda: trainings.gpt2_training(gpt2.GPT2_TINY, 64, 32, microbatches=4),
}


def test_the_benchmark_runs_them_in_turn(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(side.WORKLOADS, "mlp", SMALL["mlp"])
    monkeypatch.setattr(side, "ROUNDS", 3)
    benchmark = SideBySide(workloads=("mlp",))
    monkeypatch.setitem(BENCHMARKS, "cpu", benchmark)
    out = tmp_path / "cpu.json"
    assert bench(["cpu", "--out", str(out)]) == 0
    page = capsys.readouterr().out
    assert out.with_suffix(".md").read_text() == page
    assert re.search(r"\| mlp \| jit \| [\d.]+ \| 1.000 \| 1.000 to 1.000 \| \d+ \| [\d.]+ \| 1.000 \|", page)
    results = Results.from_json(out.read_text(), benchmark.read)
    assert [each.system for each in results.results] == ["jit", "jit, small leaves whole", "fully sharded", "planned"]
    assert all(len(each.figures.all_step_s) == 3 for each in results.results)
    assert bench(["cpu", "--out", str(out), "--resume"]) == 0
    assert "mlp" not in capsys.readouterr().err, "nothing is measured again"


SLOW = ("gpt2 in microbatches", "llama", "mixtral", "resnet", "small resnet", "small transformer", "vit")


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in SMALL])
def test_no_more_is_sent_than_under_jit(name: str):
    made = SMALL[name]()
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    state, batch = side.placed(mesh, made)
    runs = side.systems(made, mesh, state, batch)
    jit, *ours = (side.compiled_system(runs[name], mesh, state, batch) for name in ("jit", "fully sharded", "planned"))
    for each in ours:
        assert 0 < each.simulation.sent_bytes <= jit.simulation.sent_bytes, (each.collectives(), jit.collectives())
