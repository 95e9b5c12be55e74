"""What XLA leaves without a name is called by what is beside it."""

from __future__ import annotations

import pytest

from jax_deepcompile.costs.neighbours import Neighbours
from jax_deepcompile.report.origins import Origins
from tests.costs.snippets import ADDER, GROUPS, module

pytestmark = pytest.mark.pure

MODULE = module(
    f"""
    %w = f32[8]{{0}} parameter(0), metadata={{op_name="inputs[0]"}}
    %b = f32[32]{{0}} parameter(1), metadata={{op_name="inputs[1]"}}
    %narrow = f32[8]{{0}} copy(%w)
    %gather = (f32[32]{{0}}, f32[32]{{0}}) all-gather(%narrow, %b), {GROUPS}, dimensions={{0}}, \
metadata={{op_name="jit(f)/(all_gather:all_gather)"}}
    %whole = f32[32]{{0}} get-tuple-element(%gather), index=0
    %up = f32[32]{{0}} copy(%whole), metadata={{op_name="jit(f)/Net/up/dot_general" source_file="/my/net.py" \
source_line=7}}
    %kept = f32[32]{{0}} copy(%up)
    %sum = f32[32]{{0}} all-reduce(%kept), {GROUPS}, to_apply=%adder
    ROOT %alone = f32[32]{{0}} add(%sum, %b), metadata={{op_name="jit(f)/add"}}
    """,
    ADDER,
)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gather", ("up/kernel and 1 more all_gather", "/my/net.py:7")),
        ("up", ("Net/up dot_general", "/my/net.py:7")),
        ("kept", ("Net/up dot_general", "/my/net.py:7")),
        ("sum", ("up/bias all_reduce", "/my/net.py:7")),
        ("alone", ("add", "/my/net.py:7")),
        ("elsewhere", ("elsewhere", "")),
    ],
)
def test_what_has_no_name_has_that_of_a_parameter_or_a_neighbour(name: str, said: tuple[str, str]):
    instruction = MODULE.entry.by_name.get(name)
    own = ("", "") if instruction is None else (instruction.op_name, MODULE.source(instruction))
    assert Origins(Neighbours(MODULE), ["up/kernel", "up/bias"], {0, 1}).said(name, *own) == said
