"""Scheduled HLO for tests, short enough to check by hand."""

from __future__ import annotations

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.hardware import Hardware
from jax_deepcompile.costs.network import Network
from jax_deepcompile.hlo import reader as hlo

ROUND = Hardware(
    name="round numbers",
    matmul_flops_per_s={"bf16": 1e9, "f32": 1e8},
    vector_flops_per_s=1e12,
    matmul_fraction=1.0,
    memory_bytes=10**9,
    memory_bytes_per_s=1e6,
    memory_fraction=1.0,
    kernel_launch_s=0.0,
    shortest_kernel_s=0.0,
    to_host_bytes_per_s=1e5,
    from_host_bytes_per_s=5e4,
    nvlink_bytes_per_s=1e5,
)
"""One second is 1 MB of device memory, 100 kB to the host or 50 kB from it, 1 GFLOP of bf16."""

NETWORK = Network(
    gpus_per_node=4, nvlink_bytes_per_s=ROUND.nvlink_bytes_per_s, launch_s=0.0, nvlink_hop_s=0.0, nic_hop_s=0.0
)

COSTS = CostModel(ROUND, NETWORK)

ADDER = """%adder (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""

GROUPS = "replica_groups={{0,1,2,3}}"


def module(entry: str, *computations: str, header: str = "") -> hlo.Module:
    """A scheduled module for four devices: the instructions of its entry, and whole computations that they call."""
    lines = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    called = "\n".join(computations)
    text = f"HloModule test, is_scheduled=true{header}, num_partitions=4\n\n{called}\nENTRY %main () -> f32[] {{\n"
    return hlo.read(f"{text}{lines}\n}}\n")


# Gathers 100 kB, 0.75 s; copies 0.25 MB of device memory, 0.5 s.
GATHER = """
%w = f32[6250]{0} parameter(0)
%x = f32[62500]{0} parameter(1)
"""
START = f"%start = (f32[6250]{{0}}, f32[25000]{{0}}) all-gather-start(%w), {GROUPS}, dimensions={{0}}"
DONE = "%done = f32[25000]{0} all-gather-done(%start)"
WORK = "%copy = f32[62500]{0} copy(%x)"

BODY = f"""%body (s: (s32[], f32[6250], f32[62500])) -> (s32[], f32[6250], f32[62500]) {{
  %s = (s32[], f32[6250]{{0}}, f32[62500]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %w = f32[6250]{{0}} get-tuple-element(%s), index=1
  %x = f32[62500]{{0}} get-tuple-element(%s), index=2
  {START}
  {WORK}
  {DONE}
  ROOT %r = (s32[], f32[6250]{{0}}, f32[62500]{{0}}) tuple(%i, %w, %copy)
}}

%cond (c: (s32[], f32[6250], f32[62500])) -> pred[] {{
  %c = (s32[], f32[6250]{{0}}, f32[62500]{{0}}) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %bound = s32[] constant(10)
  ROOT %lt = pred[] compare(%j, %bound), direction=LT
}}
"""
WHILE = """
%init = (s32[], f32[6250]{0}, f32[62500]{0}) parameter(0)
ROOT %loop = (s32[], f32[6250]{0}, f32[62500]{0}) while(%init), condition=%cond, body=%body
"""


def leaving_a_gather_for_the_next_trip() -> hlo.Module:
    """Three trips: 0.5 s of work each beside a gather of 0.75 s begun one trip (or, the first, the loop) earlier."""
    handle = "(f32[6250]{0}, f32[25000]{0})"
    body = f"""%body (s: (f32[6250], f32[62500], {handle})) -> (f32[6250], f32[62500], {handle}) {{
  %s = (f32[6250]{{0}}, f32[62500]{{0}}, {handle}) parameter(0)
  %w = f32[6250]{{0}} get-tuple-element(%s), index=0
  %x = f32[62500]{{0}} get-tuple-element(%s), index=1
  %begun = {handle} get-tuple-element(%s), index=2
  {DONE.replace("%start", "%begun")}
  {START}
  {WORK}
  ROOT %r = (f32[6250]{{0}}, f32[62500]{{0}}, {handle}) tuple(%w, %copy, %start)
}}
"""
    condition = f"""%cond (c: (f32[6250], f32[62500], {handle})) -> pred[] {{
  %c = (f32[6250]{{0}}, f32[62500]{{0}}, {handle}) parameter(0)
  ROOT %true = pred[] constant(true)
}}
"""
    entry = f"""{GATHER}{START}
%init = (f32[6250]{{0}}, f32[62500]{{0}}, {handle}) tuple(%w, %x, %start)
%loop = (f32[6250]{{0}}, f32[62500]{{0}}, {handle}) while(%init), condition=%cond, body=%body, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
%last = {handle} get-tuple-element(%loop), index=2
{DONE.replace("%start", "%last")}
"""
    return module(entry, body, condition)
