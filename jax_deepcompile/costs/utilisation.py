"""What a step achieves beside what its devices could: examples a second, and model FLOP utilisation (MFU)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.work import work_of
from jax_deepcompile.costs.devices import hardware_of
from jax_deepcompile.costs.streams import AGAIN
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import PRODUCTS, Scan
from jax_deepcompile.ir.program import Program, Role
from jax_deepcompile.ir.traversal import bodies
from jax_deepcompile.ir.trip_counts import known_counts, trips_of

CONVENTION = "products as written, recomputation left out, attention by a kernel as its mask shows"


@dataclass(frozen=True)
class Utilisation:
    """What a step asks of one device.

    Attributes:
      model_flops: of matrix products as the user wrote them, in a step; what ``jax.checkpoint`` repeats is left out,
        and of attention by a kernel what its mask hides.
      examples: of the batch, in a step; 0 where there is no batch.
      peak_flops_per_s: of bfloat16 products, by the data sheet.
    """

    model_flops: float
    examples: float
    peak_flops_per_s: float

    def mfu(self, step_s: float) -> float:
        """Model FLOPs over those of the peak in ``step_s``; 0 for a step that takes no time."""
        return self.model_flops / (step_s * self.peak_flops_per_s) if step_s else 0.0


def utilisation_of(program: Program, mesh: AnyMesh) -> Utilisation | None:
    """Of a program in the global view; None where there are no devices, or no products."""
    flops = model_flops(program.jaxpr)
    if not isinstance(mesh, Mesh) or not flops:
        return None
    batches = [port.shape[0] for port in program.inputs if port.role is Role.BATCH and port.shape]
    peak = hardware_of(mesh.devices.flat[0].device_kind).matmul_flops_per_s["bf16"]
    return Utilisation(flops / mesh.size, max(batches, default=0) / mesh.size, peak)


def model_flops(jaxpr: Any) -> float:
    """FLOPs of all products in one run, recomputation left out; of branches the one that has most."""
    flat, total = open_jaxpr(jaxpr), 0.0
    for eqn in flat.eqns:
        name = eqn.primitive.name
        if AGAIN in str(eqn.source_info.name_stack):
            continue
        if name in PRODUCTS:
            total += work_of(eqn).written_flops
            continue
        inner = [model_flops(body) for body in bodies(eqn)]
        match name:
            case "cond":
                total += max(inner)
            case "scan":
                total += Scan(eqn).length * sum(inner)
            case "while":
                total += (trips_of(eqn, known_counts(jaxpr)) or 1) * sum(inner)
            case _:
                total += sum(inner)
    return total
