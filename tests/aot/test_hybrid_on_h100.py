"""A mesh of nodes by GPUs: parameters are gathered, and gradients scattered, within the node."""

from __future__ import annotations

import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile.hlo import replica_groups
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.lowering.compile import compile_options
from jax_deepcompile.lowering.emit import lower
from tests.schedules import instructions
from tests.transforms.programs import sharded, stack_loss, stack_shapes

pytestmark = pytest.mark.h100_aot


def test_only_sums_of_shards_leave_the_node():
    mesh = deepcompile.targets.h100(nodes=2).make_mesh((2, 8), ("data", "fsdp"))
    program, _ = sharded(stack_loss, {"stack": stack_shapes()}, mesh=mesh)
    module = read(lower(program, mesh, "cuda").compile(compiler_options=compile_options("cuda")).as_text() or "")
    spans: dict[str, set[bool]] = {}
    for each in instructions(module):
        kind = each.opcode.removesuffix("-start")
        if kind in ("all-gather", "reduce-scatter", "all-reduce"):
            groups = replica_groups.of(module, each)
            spans.setdefault(kind, set()).add(groups.size > groups.ranks_per_node(8))
    assert spans == {"all-gather": {False}, "reduce-scatter": {False}, "all-reduce": {True}}
