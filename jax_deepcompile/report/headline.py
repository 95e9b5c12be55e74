"""What one quotes of a step: how large the model is, on what it runs, and how fast."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from jax.sharding import Mesh

from jax_deepcompile.costs.devices import hardware_of, is_described, network_of
from jax_deepcompile.costs.hardware import CPU_HOST, known_hardware
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.costs.rates import NO_RATES, published_rates
from jax_deepcompile.costs.utilisation import CONVENTION, Utilisation
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Port, Program, Role
from jax_deepcompile.planner.session import Planned
from jax_deepcompile.report.words import bytes_text, count_text, percent_text, seconds_text

_SIMULATED = "simulated of XLA's schedule"

_MEASURABLE = (
    "; explain(assume=True) compiles and simulates it by assumed figures of a CPU; with cache_dir=, or "
    "measure=True, it is planned by what these CPU devices are measured to take"
)

_WHOLE = 1000
"""From here on rates have no decimals."""


@dataclass(frozen=True)
class Headline:
    """What one quotes. None is what is not known.

    Attributes:
      step: the user's function.
      mesh: its axes.
      parameters: how many numbers they are.
      examples, tokens: of a step; tokens where integer arrays of the batch have a second dimension.
      tokens_shape: examples and tokens of each.
      cluster: the devices and what connects them.
      costs: which tables or measurements simulated seconds come from.
      step_s: seconds a step; measured if it was.
      basis: what ``step_s`` is: measured, simulated, or why it is unknown.
      simulated_s: of the same step.
      before_s: simulated of the step as divided, before any decision.
      examples_per_s, tokens_per_s: of each device.
      mfu: model FLOP utilisation, by ``convention``.
      peak_bytes, limit_bytes: device memory that the step takes and may take.
      against_jit: what is known of ``jax.jit``.
    """

    step: str
    mesh: str
    parameters: int
    examples: int
    tokens: int | None
    tokens_shape: tuple[int, int] | None
    cluster: str
    device: str
    costs: str
    step_s: float | None
    basis: str
    simulated_s: float | None
    before_s: float | None
    examples_per_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    convention: str
    peak_bytes: int | None
    limit_bytes: int | None
    against_jit: str = "not compiled for this; deepcompile compare simulates both"

    def lines(self) -> list[str]:
        rows = [
            ("model", f"{count_text(self.parameters)} parameters"),
            ("batch", self._batch()),
            ("cluster", self.cluster),
            ("costs", self.costs),
            ("step", self.step_text()),
            ("throughput", self._throughput()),
            ("MFU", "" if self.mfu is None else f"{percent_text(self.mfu)} of the bf16 peak ({self.convention})"),
            ("memory", self._memory()),
            ("jax.jit", self.against_jit),
        ]
        return [f"{self.step} on {self.mesh}", *(f"  {label:<12}{said}" for label, said in rows if said)]

    def _batch(self) -> str:
        if self.tokens_shape is not None:
            examples, tokens = self.tokens_shape
            return f"{examples:,} x {tokens:,} tokens, {examples * tokens:,} a step"
        return f"{self.examples:,} examples" if self.examples else "no argument is a batch"

    def step_text(self) -> str:
        """Seconds, and how they are known."""
        if self.step_s is None:
            return self.basis
        said, gained = f"{seconds_text(self.step_s)}, {self.basis}", ""
        if self.before_s and self.simulated_s and self.before_s != self.simulated_s:
            gained = f"{self.before_s / self.simulated_s:.2f}x as fast as before planning"
        if self.simulated_s is None or self.simulated_s == self.step_s:
            return f"{said}; {gained}" if gained else said
        return f"{said}; simulated {seconds_text(self.simulated_s)}" + f", {gained} as simulated" * bool(gained)

    def _throughput(self) -> str:
        each = ((self.tokens_per_s, "tokens"), (self.examples_per_s, "examples"))
        said = ((f"{rate:,.0f}" if rate >= _WHOLE else f"{rate:.4g}", what) for rate, what in each if rate is not None)
        return ", ".join(f"{rate} {what}/s/{self.device}" for rate, what in said)

    def _memory(self) -> str:
        if self.peak_bytes is None:
            return ""
        return f"{bytes_text(self.peak_bytes)} a device" + (
            "" if self.limit_bytes is None else f" of {bytes_text(self.limit_bytes)}"
        )


def headline_of(program: Program, mesh: AnyMesh, planned: Planned | None, achieves: Utilisation | None) -> Headline:
    """Of ``program``, in the global view."""
    expected, records = (None, ()) if planned is None else (planned.plan.prediction, planned.plan.records)
    measured = None if planned is None else planned.measured
    simulated_s = None if expected is None else expected.step_s
    step_s = simulated_s if measured is None else measured.seconds
    basis = "unknown: not planned yet"
    if planned is not None:
        basis = f"unknown: nothing was compiled to plan it{_MEASURABLE * _shares_its_host(mesh)}"
    if step_s is not None:
        basis = _SIMULATED if measured is None else "measured"
    shapes = [port.shape for port in program.inputs if port.role is Role.BATCH and port.shape]
    tokens_shape = max(
        (
            (port.shape[0], port.shape[1])
            for port in program.inputs
            if port.role is Role.BATCH and len(port.shape) == 2 and "int" in port.dtype
        ),
        key=math.prod,
        default=None,
    )
    examples = max((shape[0] for shape in shapes), default=0)
    tokens = tokens_shape and math.prod(tokens_shape)
    own_s = step_s and step_s * mesh.size
    return Headline(
        step=program.name,
        mesh=program.mesh_text,
        parameters=sum(math.prod(port.shape) for port in program.inputs if _is_parameter(port)),
        examples=examples,
        tokens=tokens,
        tokens_shape=tokens_shape,
        cluster=_cluster(mesh),
        device=device_word(mesh),
        costs=_costs(mesh, planned and planned.profile),
        step_s=step_s,
        basis=basis,
        simulated_s=simulated_s,
        before_s=records[0].before.step_s if records else planned and planned.before_s,
        examples_per_s=examples / own_s if own_s and examples else None,
        tokens_per_s=tokens / own_s if own_s and tokens else None,
        mfu=achieves.mfu(step_s) if achieves is not None and step_s else None,
        convention=CONVENTION,
        peak_bytes=None if expected is None else expected.peak_bytes,
        limit_bytes=None if planned is None else planned.limit_bytes,
    )


def simulated_text(mesh: AnyMesh, profile: Profile | None) -> str:
    """What seconds are of which nothing was measured, for tables of them."""
    return f"all seconds are {_SIMULATED}, for {_cluster(mesh)}; costs: {_costs(mesh, profile)}"


def device_word(mesh: AnyMesh) -> str:
    """What one of its devices is called."""
    return "GPU" if isinstance(mesh, Mesh) and mesh.devices.flat[0].platform != "cpu" else "device"


def _is_parameter(port: Port) -> bool:
    """Counters of steps, which go with parameters, are none."""
    return port.role is Role.PARAM and (bool(port.shape) or "int" not in port.dtype)


def _shares_its_host(mesh: AnyMesh) -> bool:
    """Whether it is CPU devices of one host, which are measured before they are planned for."""
    return isinstance(mesh, Mesh) and mesh.size > 1 and known_hardware(mesh.devices.flat[0].device_kind) is CPU_HOST


def _cluster(mesh: AnyMesh) -> str:
    if not isinstance(mesh, Mesh):
        return f"{mesh.size} devices of an abstract mesh"
    kind, network = mesh.devices.flat[0].device_kind, network_of(mesh.devices.flat)
    hardware = known_hardware(kind)
    if hardware is CPU_HOST:
        return f"{mesh.size} CPU devices that share their host" if mesh.size > 1 else "1 CPU device"
    nodes = -(-mesh.size // network.gpus_per_node)
    each = f"{nodes} nodes of {network.gpus_per_node}" if nodes > 1 else f"{mesh.size}"
    cards = f", {network.cards}" if nodes > 1 else ""
    return f"{each} {hardware.name if hardware else kind}{cards}" + ", described, not attached" * is_described(mesh)


def _costs(mesh: AnyMesh, taken: Profile | None) -> str:
    if not isinstance(mesh, Mesh):
        return "none"
    kind = mesh.devices.flat[0].device_kind
    name = hardware_of(kind).name
    said = f"{'published tables' if published_rates(name) != NO_RATES else 'data sheet'} of {name}"
    said += f" (none are known of {kind})" if known_hardware(kind) is None else ""
    said = "assumed figures of a CPU host" if known_hardware(kind) is CPU_HOST else said
    if taken is None:
        return said
    counts = Counter(kernels=len(taken.ops), collectives=len(taken.collectives), copies=len(taken.copies))
    return f"measured here: {', '.join(f'{count} {what}' for what, count in counts.items() if count)}; else {said}"
