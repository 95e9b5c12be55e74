"""The folders of the package know only what the design lets them know."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jax_deepcompile"

BASE = {"errors", "_jax_compat", "summary"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "_jax_compat": set(),
    "summary": set(),
    "ir": set(),
    "hlo": set(),
    "runtime": {"ir"},
    "frontend": {"ir"},
    "partition": {"ir"},
    "analysis": {"ir"},
    "transforms": {"ir", "analysis", "costs"},
    "costs": {"ir", "analysis", "hlo"},
    "lowering": {"ir", "hlo"},
    "planner": {"ir", "analysis", "transforms", "costs", "lowering", "hlo", "runtime"},
    "profilers": {"ir", "hlo", "costs", "lowering", "runtime"},
    "report": {"ir", "analysis", "transforms", "partition", "costs", "planner"},
    "options": {"costs", "frontend", "planner"},
    "jitted": {"ir", "frontend", "planner", "lowering"},
    "compiler": {"ir", "analysis", "frontend", "partition", "transforms", "costs", "planner", "lowering", "runtime"}
    | {"hlo", "options", "profilers", "report", "jitted"},
    "first_run": {"costs", "planner", "profilers", "runtime", "jitted", "compiler"},
    "microbatch_counts": {"ir", "frontend", "runtime", "compiler"},
    "stages": {"ir", "frontend", "costs", "partition", "planner", "lowering", "report", "compiler"},
    "step": {"ir", "frontend", "costs", "planner", "lowering", "profilers", "report", "runtime"}
    | {"compiler", "first_run", "jitted", "options", "microbatch_counts", "stages"},
    "api": {"frontend", "costs", "planner", "options", "step"},
    "__init__": {"public"},
    "public": {"api", "step", "costs", "ir", "lowering", "partition", "planner", "report", "transforms"},
    "cli": {"api", "options", "step", "stages", "costs", "lowering", "planner", "report", "runtime", "training"},
    "training": {"api", "runtime"},
    "__main__": {"cli"},
}
"""What each folder or file of the package may import from the package, besides what all may."""

TARGETS = {f"jax_deepcompile.costs.{name}" for name in ("hardware", "network", "overlap")}
"""What ``lowering.targets``, which describes clusters, may import beyond its room."""

MEASURES = {"call_overhead": {"frontend"}, "gpu_suite": {"analysis", "costs", "hlo", "lowering", "profilers"},
            "validation": {"costs", "hlo"}, "host_memory": {"costs", "lowering"}, "copies": {"costs"}}  # fmt: skip
"""What an experiment that measures for the cost model may import besides what is public."""

PUBLIC = {
    "BucketCollectives",
    "Candidate",
    "Decision",
    "DeepenLoops",
    "DelayReductions",
    "Environment",
    "KeepActivations",
    "OpRule",
    "OverlapMicrobatches",
    "PipelineLoops",
    "Plan",
    "PrefetchGathers",
    "Profile",
    "Program",
    "Proposal",
    "ReduceInOrder",
    "RuleBuilder",
    "ShardedStep",
    "Stage",
    "Strategy",
    "Unshard",
    "UnshardMicrobatches",
    "UnshardUnrolled",
    "errors",
    "register_rule",
    "shard",
    "simulate",
    "targets",
}


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def room(path: Path) -> str:
    """The folder or file of the package that ``path`` belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", python_files(PACKAGE), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_room_may_know(path: Path):
    allowed = MAY_IMPORT[room(path)] | BASE | {room(path)}
    rooms = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    for module in imported_modules(path):
        parts = module.split(".")
        if path == PACKAGE / "lowering" / "targets.py" and module.startswith(tuple(TARGETS)):
            continue
        if parts[0] == "jax_deepcompile" and len(parts) > 1 and parts[1] in rooms:
            assert parts[1] in allowed, f"{path.name} imports {module}"


def test_no_files_import_one_another_in_a_circle():
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in python_files(PACKAGE)}
    modules = {name.removesuffix(".__init__"): path for name, path in files.items()}
    imports = {
        name: imported_modules(path) & modules.keys() - {name, "jax_deepcompile"} for name, path in modules.items()
    }
    list(graphlib.TopologicalSorter(imports).static_order())  # raises CycleError


@pytest.mark.parametrize("path", python_files(ROOT / "models"), ids=lambda path: path.name)
def test_models_are_plain_flax(path: Path):
    own = {"jax_deepcompile", "experiments", "tests"}
    assert not {module.split(".")[0] for module in imported_modules(path)} & own


@pytest.mark.parametrize("path", python_files(ROOT / "experiments"), ids=lambda path: path.name)
def test_experiments_use_the_public_api_and_the_models(path: Path):
    allowed = (
        PUBLIC | {"runtime", "cli", "training"} | MEASURES.get(path.parent.name, set()) | MEASURES.get(path.stem, set())
    )
    for module in imported_modules(path):
        if module.startswith("jax_deepcompile."):
            assert module.split(".")[1] in allowed, module


@pytest.mark.parametrize(
    "path",
    [path for folder in ("jax_deepcompile", "models", "experiments") for path in python_files(ROOT / folder)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_only_one_door_to_private_jax(path: Path):
    private = {module for module in imported_modules(path) if module.startswith("jax._src")}
    assert not private or path.name == "_jax_compat.py", private


def third_parties(folder: Path, but: Path | None = None) -> set[str]:
    """The distributions that the modules of ``folder`` import, those of ``but`` left out."""
    own = {"jax_deepcompile", "experiments", "models", *sys.stdlib_module_names}
    paths = set(python_files(folder)) - set(python_files(but) if but is not None else ())
    imported = {module.partition(".")[0] for path in paths for module in imported_modules(path)}
    return {{"orbax": "orbax-checkpoint"}.get(module, module) for module in imported - own}


def distributions(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", each)[0] for each in requirements}  # pyright: ignore[reportOptionalSubscript]


def test_what_is_installed_is_what_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    core = distributions(project["project"]["dependencies"])
    extras = {name: distributions(each) for name, each in project["project"]["optional-dependencies"].items()}
    training = third_parties(PACKAGE / "training")
    assert third_parties(PACKAGE, but=PACKAGE / "training") | {"jaxlib"} == core
    assert third_parties(ROOT / "experiments") | third_parties(ROOT / "models") <= core | extras["train"] | {"pytest"}
    assert training <= core | extras["train"] <= training | third_parties(ROOT / "experiments") | core
    assert not {name for name in extras["h100"] if name.startswith("jax")}, "it would move the jax that is installed"
    assert project["tool"]["setuptools"]["packages"]["find"]["include"] == ["jax_deepcompile*"]


def test_public_names():
    import jax_deepcompile
    from jax_deepcompile import public

    assert set(jax_deepcompile.__all__) == PUBLIC
    assert all(hasattr(public, name) for name in PUBLIC - {"errors"})
    assert all(hasattr(jax_deepcompile, name) for name in jax_deepcompile.__all__)
    assert set(dir(jax_deepcompile)) >= PUBLIC
    assert not hasattr(jax_deepcompile, "no_such_name")
    types = next(each for each in ast.parse((PACKAGE / "__init__.py").read_text()).body if isinstance(each, ast.If))
    assert {alias.name for each in types.body for alias in each.names} == PUBLIC - {"errors"}  # pyright: ignore


def test_the_command_loads_nothing_that_takes_a_while_before_it_watches_for_signals():
    loaded = "import sys, jax_deepcompile.cli.main, jax_deepcompile.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()}.isdisjoint(
        {"jax", "jaxlib", "numpy", "tyro", "flax"}
    )


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["pyright", "--pythonpath", sys.executable]],
    ids=["lint", "format", "types"],
)
def test_style(command: list[str]):
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
