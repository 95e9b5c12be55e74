"""HLO ops traced back to the equations and lines of the user's step."""

from __future__ import annotations

import inspect
import re

import jax
import pytest

from jax_deepcompile.hlo import reader as hlo
from jax_deepcompile.ir.traversal import equations
from jax_deepcompile.profilers import attribution
from jax_deepcompile.profilers.attribution import ExecutedOp, executed_ops
from tests.profilers import steps

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def traced():
    return steps.sharded().trace(jax.eval_shape(steps.create), steps.batch())


@pytest.fixture(scope="module")
def found(traced) -> dict[str, tuple[hlo.Instruction, ExecutedOp]]:
    module = hlo.read(traced.lower().compile().as_text())
    instructions = {name: one for part in module.computations.values() for name, one in part.by_name.items()}
    return {op.name: (instructions[op.name], op) for op in executed_ops(module, traced.sharded)}


def line_of(text: str) -> int:
    """Of the one line of the step that contains ``text``."""
    lines, first = inspect.getsourcelines(steps.train_step)
    [number] = [first + index for index, line in enumerate(lines) if text in line]
    return number


@pytest.mark.parametrize(("opcode", "primitive"), [("all-gather", "all_gather"), ("reduce-scatter", "reduce_scatter")])
def test_a_collective_stems_from_one_equation(traced, found, opcode: str, primitive: str):
    program = list(equations(traced.sharded.jaxpr))
    ops = [op for instruction, op in found.values() if instruction.opcode == opcode]
    assert ops
    for op in ops:
        [site] = op.sites
        assert program[site.position].primitive.name == primitive


def test_every_collective_equation_is_found(traced, found):
    wanted = {
        index
        for index, eqn in enumerate(equations(traced.sharded.jaxpr))
        if eqn.primitive.name in ("all_gather", "reduce_scatter")
    }
    assert wanted <= {site.position for _, op in found.values() for site in op.sites}


def test_lines_are_the_users(found):
    in_loop = [op for instruction, op in found.values() if op.executions == steps.LAYERS and "all_gather" in op.name]
    assert in_loop
    for op in in_loop:
        assert re.search(rf"steps\.py:{line_of('lax.scan')} \(.*<lambda>\)", op.where)


def test_loops_count(found):
    assert {op.executions for _, op in found.values()} == {1, steps.LAYERS}


def test_loops_and_names_of_values_are_no_ops(found):
    assert not {instruction.opcode for instruction, _ in found.values()} & {"while", "parameter", "tuple", "bitcast"}


@pytest.mark.parametrize(
    ("op_name", "paths"),
    [
        ("jit(step)/jvp(Net)/sin", ["jit(step)/jvp(Net)/sin"]),
        ("jit(step)/mul;add", ["jit(step)/mul", "add"]),
        ("jit(f)/(jvp(Net)/while/gather:norm/gather)", ["jit(f)/jvp(Net)/while/gather", "jit(f)/norm/gather"]),
        ("(a/gather:b/gather)", ["a/gather", "b/gather"]),
        ("", [""]),
    ],
)
def test_names_of_what_xla_has_joined(op_name: str, paths: list[str]):
    assert list(attribution._paths(op_name)) == paths


MODULE = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %next = s32[] negate(%i), metadata={op_name="jit(step)/somewhere/else"}
  %sine = f32[8]{0} sine(%x)
  ROOT %pair = (s32[], f32[8]{0}) tuple(%next, %sine)
}

%condition (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[], f32[8]{0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

%called (r: f32[8]) -> f32[8] {
  %r = f32[8]{0} parameter(0)
  ROOT %cosine = f32[8]{0} cosine(%r)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %first = f32[8]{0} call(%a), to_apply=%called
  %second = f32[8]{0} call(%first), to_apply=%called
  %zero = s32[] constant(0)
  %start = (f32[8]{0}, f32[64]{0}) all-gather-start(%a), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %done = f32[64]{0} all-gather-done(%start)
  %init = (s32[], f32[8]{0}) tuple(%zero, %a)
  %loop = (s32[], f32[8]{0}) while(%init), condition=%condition, body=%body
  ROOT %result = f32[8]{0} get-tuple-element(%loop), index=1
}
"""


def test_what_cannot_be_known_is_left_open(traced):
    ops = executed_ops(hlo.read(MODULE), traced.sharded)
    assert [(op.name, op.executions) for op in ops] == [
        ("cosine", 2),
        ("start", 1),
        ("next", None),
        ("sine", None),
    ]
    assert all(op.sites == () and op.where == "" for op in ops)
