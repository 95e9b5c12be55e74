"""What planning makes of known steps, written down so that two versions of it can be compared.

``python -m experiments.planned_programs --out FILE`` plans every row of the headline benchmark for H100s that are not
here, and every workload of ``cpu_side_by_side`` for 8 virtual CPU devices. Of each planned program it keeps a digest
that knows its operations, their types and how loops nest, but neither their order nor the names of variables; and in
plain words its operations, collectives and loops, XLA's options, the simulated step and the peak. ``--compare FILE``
reads an earlier file, prints what differs and exits with 1 if anything does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax

import jax_deepcompile as deepcompile
from experiments.bench.configs import BENCHMARKS
from experiments.bench.steps import MODELS, training_step
from experiments.bench.systems import MEMORY_LIMIT, tokens_of
from experiments.cpu_side_by_side import WORKLOADS

COLLECTIVES = ("all_gather", "all_to_all", "pmax", "pmin", "ppermute", "psum", "reduce_scatter")
STEP_TOLERANCE = 0.005
"""The share by which a simulated step may differ: XLA's own threads take turns in another order each time."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def digest(jaxpr: Any) -> str:
    """Equal for jaxprs of the same operations on the same types in the same loops, whatever their order."""
    lines = sorted(_line(eqn) for eqn in _equations(jaxpr))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _equations(jaxpr: Any) -> list:
    return getattr(jaxpr, "jaxpr", jaxpr).eqns


def _line(eqn: Any) -> str:
    params = {name: _value(value) for name, value in sorted(eqn.params.items())}
    types = [[str(atom.aval) for atom in atoms] for atoms in (eqn.invars, eqn.outvars)]
    return f"{eqn.primitive.name} {types} {params}"


def _value(value: Any) -> Any:
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return digest(value)
    if isinstance(value, tuple):
        return tuple(map(_value, value))
    return _ADDRESS.sub("0x", str(value))


def _nested(jaxpr: Any) -> Iterator[Any]:
    for eqn in _equations(jaxpr):
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from _nested(inner)


def described(traced: Any) -> dict[str, Any]:
    """What is compared of a planned step."""
    eqns, plan = list(_nested(traced.planned.jaxpr)), traced.plan()
    names = Counter(eqn.primitive.name for eqn in eqns)
    expected = plan.prediction
    return {
        "digest": digest(traced.planned.jaxpr),
        "operations": sum(names.values()),
        "collectives": {name: names[name] for name in COLLECTIVES if names[name]},
        "loops": sorted(
            str(eqn.params.get("length", "while")) for eqn in eqns if eqn.primitive.name in ("scan", "while")
        ),
        "options": {name: str(value) for name, value in plan.options},
        "step_s": None if expected is None else expected.step_s,
        "peak_bytes": None if expected is None else expected.peak_bytes,
    }


def planned(headline: bool = True, cpu: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row's name and description."""
    for workload in BENCHMARKS["headline"].workloads if headline else ():
        mesh = workload.cluster.make_mesh()
        gradients, state = MODELS[workload.model](False)
        step = deepcompile.shard(
            training_step(gradients), mesh, microbatches=workload.microbatches, memory_limit=MEMORY_LIMIT
        )
        yield str(workload), described(step.trace(state, tokens_of(workload, mesh)))
    for name, make in WORKLOADS.items() if cpu else ():
        made = make()
        step = deepcompile.shard(made.step, {"fsdp": 8}, microbatches=made.microbatches)
        batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), made.batch)
        yield f"CPU: {name}", described(step.trace(jax.eval_shape(made.create), batch))


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Of one row, in words."""
    found = []
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if key == "step_s" and old is not None and new is not None and abs(new - old) <= STEP_TOLERANCE * old:
            continue
        if key == "peak_bytes" and before["digest"] == after["digest"]:
            continue
        if old != new:
            found.append(f"{key}: {old} -> {new}")
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the descriptions as JSON")
    parser.add_argument("--compare", type=Path, help="an earlier such file")
    parser.add_argument("--only", choices=("headline", "cpu"), help="some of the rows")
    arguments = parser.parse_args()
    rows = json.loads(arguments.compare.read_text())["rows"] if arguments.compare else {}
    found: dict[str, Any] = {}
    differ = False
    for name, row in planned(arguments.only != "cpu", arguments.only != "headline"):
        found[name] = row
        changes = differences(rows[name], row) if name in rows else []
        differ |= bool(changes)
        verdict = ["as before"] if name in rows and not changes else changes
        print("\n  ".join([f"{name}: {row['digest']}, {row['step_s']}", *verdict]), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps({"jax": jax.__version__, "rows": found}, indent=1) + "\n")
    sys.exit(int(differ))


if __name__ == "__main__":
    main()
