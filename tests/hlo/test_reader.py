"""Reading scheduled HLO."""

from __future__ import annotations

import pytest

from jax_deepcompile import errors
from jax_deepcompile.hlo import reader as hlo

pytestmark = pytest.mark.pure

MODULE = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), \
{1}: (1, {2}, must-alias) }, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, num_partitions=4

FileNames
1 "/home/me/model.py"
2 "/lib/site-packages/flax/linen.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=98 end_line=98 column=52 end_column=52}
2 {file_name_id=2 function_name_id=1 line=612 end_line=612 column=16 end_column=16}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%fused_add (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%p, %p), metadata={op_name="jit(step)/add" stack_frame_id=2}
}

ENTRY %main (x: f32[8], y: bf16[80,2,16]) -> (f32[8], /*index=1*/f32[8]) {
  %x = f32[8]{0} parameter(0), metadata={op_name="state[\\'w\\']"}
  %y = bf16[80,2,16]{2,1,0:S(5)} parameter(1)
  %fusion.7 = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_add, control-predecessors={%x, %y}, \
metadata={op_name="jit(step)/add" stack_frame_id=2}, backend_config={"fusion_backend_config":{"kind":"__triton"}}
  %gemm = (f32[8]{0}, s8[64]{0}) custom-call(%x, %fusion.7), custom_call_target="__cublas$lt$matmul", \
output_to_operand_aliasing={{0}: (1, {})}
  %got = f32[8]{0} get-tuple-element(%gemm), index=0
  ROOT %out = (f32[8]{0}, /*index=1*/f32[8]{0}) tuple(%got, /*index=1*/%x)
}
"""


@pytest.fixture
def module() -> hlo.Module:
    return hlo.read(MODULE)


def test_header(module: hlo.Module):
    assert (module.name, module.entry_name, module.is_scheduled, module.device_count) == ("jit_step", "main", True, 4)
    assert module.aliases == (hlo.Alias((0,), 0, ()), hlo.Alias((1,), 1, (2,)))


def test_instructions_keep_the_order_of_the_schedule(module: hlo.Module):
    assert [step.opcode for step in module.entry.instructions] == [
        "parameter", "parameter", "fusion", "custom-call", "get-tuple-element", "tuple",
    ]  # fmt: skip
    assert module.entry.root.name == "out"
    assert [step.name for step in module.entry.parameters] == ["x", "y"]


def test_shapes(module: hlo.Module):
    _, y, fusion, gemm, *_ = module.entry.instructions
    assert y.shape == hlo.Array("bf16", (80, 2, 16), memory_space=5)
    assert (hlo.bytes_of(y.shape), hlo.bytes_of(gemm.shape)) == (2 * 80 * 2 * 16, 32 + 64)
    assert isinstance(y.shape, hlo.Array)
    assert y.shape.is_on_host
    assert isinstance(fusion.shape, hlo.Array)
    assert not fusion.shape.is_on_host


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("pred[]", 1), ("s4[3]{0:E(4)}", 2), ("f8e4m3fn[2,0]{1,0}", 0), ("c128[2]", 32), ("((f32[2]{0}), u32[])", 12)],
)
def test_bytes(text: str, size_bytes: int):
    read = hlo.read(f"HloModule m\n\nENTRY %e () -> f32[] {{\n  ROOT %a = {text} custom-call()\n}}\n")
    assert hlo.bytes_of(read.entry.root.shape) == size_bytes


def test_attributes(module: hlo.Module):
    _, _, fusion, gemm, got, out = module.entry.instructions
    assert module.body(fusion).name == "fused_add"
    assert fusion.config == {"fusion_backend_config": {"kind": "__triton"}}
    assert fusion.attribute("control-predecessors") == "{%x, %y}"
    assert (gemm.target, gemm.aliased_operands) == ("__cublas$lt$matmul", {(0,): (1, ())})
    assert (got.number, out.operands, out.called, gemm.config) == (0, ("got", "x"), (), {})


def test_source_is_the_innermost_line_of_the_user(module: hlo.Module):
    assert module.source(module.entry.instructions[2]) == "/home/me/model.py:98"
    assert module.source(module.entry.instructions[1]) == ""
    assert module.entry.instructions[2].op_name == "jit(step)/add"
    assert module.entry.instructions[1].op_name == ""


def test_of_what_has_no_line_the_nearest_is_told():
    """``custom-call.2`` reads what has one, ``x`` is read by it, and nobody is near to what is not there."""
    line = ', metadata={source_file="model.py" source_line=7}'
    text = f"""HloModule m, is_scheduled=true

%f (p: f32[4]) -> f32[4] {{
  ROOT %p = f32[4] parameter(0)
}}

ENTRY %main (x: f32[4], y: f32[4]) -> ((f32[4], s8[64]), f32[4]) {{
  %x = f32[4] parameter(0)
  %y = f32[4] parameter(1)
  %fusion.1 = f32[4] fusion(%x), kind=kLoop, calls=%f{line}
  %custom-call.2 = (f32[4], s8[64]) custom-call(%fusion.1), custom_call_target="t"
  %other = f32[4] negate(%y)
  ROOT %out = ((f32[4], s8[64]), f32[4]) tuple(%custom-call.2, %other)
}}
"""
    read = hlo.read(text)
    assert [read.source_of(name) for name in ("fusion.1", "custom-call.2", "x")] == ["model.py:7"] * 3
    assert [read.source_of(name) for name in ("p", "nowhere")] == ["", ""]


def test_source_written_in_place():
    old = MODULE.replace("stack_frame_id=2", 'source_file="a/b.py" source_line=7')
    read = hlo.read(old)
    assert read.source(read.entry.instructions[2]) == "a/b.py:7"


def test_what_is_quoted_is_as_the_user_wrote_it():
    japanese = r"\346\227\245\346\234\254"
    text = MODULE.replace("/home/me", f"/{japanese}").replace("jit(step)/add", rf"jit(step)/{japanese}\"\\\'\n/add\"")
    text = text.replace("__cublas$lt$matmul", rf"{japanese}\'")
    read = hlo.read(text)
    x, _, fusion, gemm, *_ = read.entry.instructions
    assert (x.op_name, fusion.op_name, gemm.target) == ("state['w']", 'jit(step)/日本"\\\'\n/add"', "日本'")
    assert read.source(fusion) == "/日本/model.py:98"
    placed = hlo.read(MODULE.replace("stack_frame_id=2", rf'source_file="{japanese}\".py" source_line=7'))
    assert placed.source(placed.entry.instructions[2]) == '日本".py:7'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "line 1: the first line does not start with 'HloModule'"),
        ("ENTRY %main () -> f32[] {\n}", "line 1: the first line does not start with 'HloModule'"),
        ("HloModule m\n", "there is no ENTRY computation; the text is cut off"),
        (MODULE[: MODULE.index("  ROOT %out")], "computation main has no end; the text is cut off"),
        (MODULE[: MODULE.index("%fusion.7), custom")], "the operands of gemm have no end; the text is cut off"),
        (MODULE.replace("f32[8]{0} add", "g32[8]{0} add"), "not a shape: g32[8]{0}"),
        (MODULE.replace("add(%p, %p)", "add(%p, %q)"), "add.1 in fused_add uses q, which is not defined before it"),
        (MODULE.replace("calls=%fused_add", "calls=%gone"), "fusion.7 in main uses gone"),
        (MODULE.replace("%got = f32[8]{0}", "%got f32[8]{0}"), "not an instruction: %got f32[8]{0} get-tuple"),
    ],
)
def test_what_is_no_whole_program(text: str, found: str):
    with pytest.raises(errors.MalformedHloError) as raised:
        hlo.read(text)
    assert found in str(raised.value)
    assert "Pass what Compiled.as_text() returns, unabridged." in str(raised.value)
