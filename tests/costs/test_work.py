"""FLOPs and bytes of single operations, counted by hand."""

from __future__ import annotations

import pytest

from jax_deepcompile.analysis.work import Product
from jax_deepcompile.costs.work import Work, work_of
from tests.costs.snippets import ADDER, module

pytestmark = pytest.mark.pure


def work(entry: str, *computations: str, name: str = "r") -> Work:
    read = module(entry, *computations)
    return work_of(read, read.entry, read.entry.by_name[name])


def product_flops(found: Work) -> float:
    return sum(each.flops for each in found.products)


def gemm(config: str, left: str, right: str, result: str, target: str = "__cublas$lt$matmul") -> Work:
    return work(
        f"""
%a = {left} parameter(0)
%b = {right} parameter(1)
%r = ({result}, s8[4096]{{0}}) custom-call(%a, %b), custom_call_target="{target}", backend_config={config}
"""
    )


def test_cublas_counts_batch_and_contracted_dimensions_but_no_workspace():
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
        '"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]},'
        '"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]}}}'
    )
    found = gemm(config, "bf16[4,10,30]{2,1,0}", "bf16[4,30,20]{2,1,0}", "f32[4,10,20]{2,1,0}")
    assert found == Work((Product(4, 10, 20, 30, "bf16"),), 0.0, 2 * 4 * (300 + 600) + 4 * 4 * 200)


def test_a_library_call_on_a_slice_of_a_stack_is_one_fusion():
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]},"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]}}}'
    )
    sliced = f"""
%sliced (a: bf16[10,30], stack: bf16[8,30,20], i: s32[]) -> (bf16[10,20], s8[4096]) {{
  %a = bf16[10,30]{{1,0}} parameter(0)
  %stack = bf16[8,30,20]{{2,1,0}} parameter(1)
  %i = s32[] parameter(2)
  %o = s32[] constant(0)
  %layer = bf16[1,30,20]{{2,1,0}} dynamic-slice(%stack, %i, %o, %o), dynamic_slice_sizes={{1,30,20}}
  %b = bf16[30,20]{{1,0}} bitcast(%layer)
  ROOT %product = (bf16[10,20]{{1,0}}, s8[4096]{{0}}) custom-call(%a, %b), \
custom_call_target="__cublas$lt$matmul", backend_config={config}
}}
"""
    entry = """
%left = bf16[10,30]{1,0} parameter(0)
%layers = bf16[8,30,20]{2,1,0} parameter(1)
%t = s32[] parameter(2)
%r = (bf16[10,20]{1,0}, s8[4096]{0}) fusion(%left, %layers, %t), kind=kCustom, calls=%sliced
"""
    assert work(entry, sliced) == Work((Product(1, 10, 20, 30, "bf16"),), 0.0, 2 * (300 + 600 + 200) + 4)


@pytest.mark.parametrize(("precision", "factor"), [("DEFAULT", "f32"), ("HIGHEST", "f32-highest")])
def test_float32_is_tf32_unless_asked_otherwise(precision: str, factor: str):
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]},'
        f'"precision_config":{{"operand_precision":["{precision}","{precision}"]}}}}}}'
    )
    assert gemm(config, "f32[2,3]{1,0}", "f32[3,5]{1,0}", "f32[2,5]{1,0}").products == (Product(1, 2, 5, 3, factor),)


@pytest.mark.parametrize(
    ("target", "mask", "products"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 2.0),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 1.0),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 2.5),
    ],
)
def test_cudnn_attention(target: str, mask: str, products: float):
    config = (
        '{"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":["2","8","100","100"]},'
        f'"mask_type":"{mask}"}}}}'
    )
    found = gemm(config, "bf16[2,100,8,64]{3,2,1,0}", "bf16[2,100,8,64]{3,2,1,0}", "bf16[2,100,8,64]{3,2,1,0}", target)
    assert product_flops(found) == products * 2 * 2 * 8 * 100 * 100 * 64
    assert [each.dtype for each in found.products] == ["bf16"]


@pytest.mark.parametrize(("window", "share"), [(0, 0.5), (100, 0.5), (200, 0.5), (50, 0.375), (10, 0.095)])
def test_cudnn_attention_leaves_out_what_a_window_hides(window: int, share: float):
    """Of 100 keys the query at t sees t, and of those the last ones of the window."""
    config = (
        '{"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":["2","8","100","100"]},'
        f'"mask_type":"CAUSAL","sliding_window_length":{window}}}}}'
    )
    sizes = ["bf16[2,100,8,64]{3,2,1,0}"] * 3
    found = gemm(config, *sizes, "__cudnn$fmhaSoftmax")
    assert product_flops(found) == pytest.approx(share * 2 * 2 * 2 * 8 * 100 * 100 * 64)


CONVOLUTION = 2.0 * (2 * 14 * 14 * 32) * (3 * 3 * 16)
IMAGE, KERNEL, OUTPUT = "f32[2,14,14,16]{3,2,1,0}", "f32[32,3,3,16]{3,2,1,0}", "f32[2,14,14,32]{3,2,1,0}"


@pytest.mark.parametrize(
    ("target", "left", "right", "result"),
    [("Forward", IMAGE, KERNEL, OUTPUT), ("BackwardInput", OUTPUT, KERNEL, IMAGE),
     ("BackwardFilter", IMAGE, OUTPUT, KERNEL)],
)  # fmt: skip
def test_cudnn_convolutions(target: str, left: str, right: str, result: str):
    entry = f"""
%a = {left} parameter(0)
%b = {right} parameter(1)
%r = ({result}, u8[64]{{0}}) custom-call(%a, %b), window={{size=3x3 pad=1_1x1_1}}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{target}"
"""
    assert product_flops(work(entry)) == CONVOLUTION


def test_an_unknown_library_call_moves_its_bytes():
    entry = '%a = f32[10]{0} parameter(0)\n%r = f32[5]{0} custom-call(%a), custom_call_target="my_kernel"'
    assert work(entry) == Work(bytes=60)


def fusion(body: str, *computations: str, parameters: str) -> Work:
    entry = f"{parameters}\n%r = f32[] fusion({', '.join(_names(parameters))}), kind=kLoop, calls=%fused"
    return work(entry, *computations, f"%fused () -> f32[] {{\n{body.strip()}\n}}\n".replace("\n%", "\n  %"))


def _names(parameters: str) -> list[str]:
    return [line.partition(" = ")[0].strip() for line in parameters.strip().splitlines()]


def test_a_fusion_reads_once_and_writes_once():
    body = """
  %p = f32[100]{0} parameter(0)
  %e = f32[100]{0} exponential(%p)
  ROOT %m = f32[100]{0} multiply(%e, %p)
"""
    assert fusion(body, parameters="%x = f32[100]{0} parameter(0)") == Work(vector_flops=900.0, bytes=800)


def test_a_sliced_parameter_counts_the_slice():
    body = """
  %p = f32[80,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %b = f32[80,10,10]{2,1,0} bitcast(%p)
  %s = f32[1,10,10]{2,1,0} dynamic-slice(%b, %i, %z, %z), dynamic_slice_sizes={1,10,10}
  ROOT %c = bf16[1,10,10]{2,1,0} convert(%s)
"""
    found = fusion(body, parameters="%x = f32[80,100]{1,0} parameter(0)\n%j = s32[] parameter(1)")
    assert found.bytes == 400 + 4 + 200


def test_integers_are_slower_and_a_rotation_of_them_is_one_instruction():
    body = """
  %p = u32[100]{0} parameter(0)
  %left = u32[100]{0} shift-left(%p, %p)
  %right = u32[100]{0} shift-right-logical(%p, %p)
  %rotated = u32[100]{0} or(%left, %right)
  ROOT %x = u32[100]{0} xor(%rotated, %p)
"""
    assert fusion(body, parameters="%x = u32[100]{0} parameter(0)").vector_flops == 2 * 4 * 100


def test_what_is_converted_and_then_sliced_counts_the_slices():
    body = """
  %p = f32[80,100]{1,0} parameter(0)
  %c = bf16[80,100]{1,0} convert(%p)
  %first = bf16[1,100]{1,0} slice(%c), slice={[0:1], [0:100]}
  %last = bf16[2,100]{1,0} slice(%c), slice={[78:80], [0:100]}
  ROOT %t = (bf16[1,100]{1,0}, bf16[2,100]{1,0}) tuple(%first, %last)
"""
    assert fusion(body, parameters="%x = f32[80,100]{1,0} parameter(0)") == Work(vector_flops=300.0, bytes=1200 + 600)


def test_what_is_reduced_and_then_sliced_counts_the_whole():
    body = """
  %p = f32[80,100]{1,0} parameter(0)
  %z = f32[] constant(0)
  %s = f32[80]{0} reduce(%p, %z), dimensions={1}, to_apply=%adder
  ROOT %first = f32[1]{0} slice(%s), slice={[0:1]}
"""
    assert fusion(body, ADDER, parameters="%x = f32[80,100]{1,0} parameter(0)").bytes == 32_000 + 4


def test_what_is_spread_out_is_read_once():
    body = """
  %p = f32[100]{0} parameter(0)
  %unused = f32[100]{0} parameter(1)
  ROOT %b = f32[80,100]{1,0} broadcast(%p), dimensions={1}
"""
    parameters = "%x = f32[100]{0} parameter(0)\n%y = f32[100]{0} parameter(1)"
    assert fusion(body, parameters=parameters).bytes == 400 + 32_000


def test_a_parameter_sliced_and_read_whole_counts_once():
    body = """
  %p = f32[100]{0} parameter(0)
  %s = f32[100]{0} slice(%p), slice={[0:100]}
  ROOT %a = f32[100]{0} add(%s, %p)
"""
    assert fusion(body, parameters="%x = f32[100]{0} parameter(0)").bytes == 800


UPDATE = """
  %p = f32[80,100]{1,0} parameter(0)
  %u = f32[1,100]{1,0} parameter(1)
  %i = s32[] constant(0)
  %d = f32[80,100]{1,0} dynamic-update-slice(BASE, %u, %i, %i)
  ROOT %b = f32[8000]{0} bitcast(%d)
"""
UPDATED = "%x = f32[80,100]{1,0} parameter(0)\n%y = f32[1,100]{1,0} parameter(1)"


def test_an_update_in_place_counts_the_update_twice():
    assert fusion(UPDATE.replace("BASE", "%p"), parameters=UPDATED).bytes == 800


def test_an_update_that_is_computed_with_reads_what_it_updates():
    body = UPDATE.replace("BASE", "%p").replace(
        "ROOT %b = f32[8000]{0} bitcast(%d)", "ROOT %n = f32[80,100] negate(%d)"
    )
    assert fusion(body, parameters=UPDATED).bytes == 32_000 + 400 + 32_000


def test_updates_in_place_one_after_the_other_and_returned_beside_others():
    body = UPDATE.replace("BASE", "%p").replace("  ROOT %b = f32[8000]{0} bitcast(%d)\n", "")
    body += """  %e = f32[80,100]{1,0} dynamic-update-slice(%d, %u, %i, %i)
  %n = f32[1,100]{1,0} negate(%u)
  ROOT %t = (f32[80,100]{1,0}, f32[1,100]{1,0}) tuple(%e, %n)
"""
    assert fusion(body, parameters=UPDATED).bytes == 400 + 2 * 400 + 400


def test_an_update_of_something_computed_writes_it_all():
    body = UPDATE.replace("  %d = ", "  %n = f32[80,100]{1,0} negate(%p)\n  %d = ").replace("BASE", "%n")
    assert fusion(body, parameters=UPDATED).bytes == 32_000 + 400 + 32_000


def test_a_dot_in_a_fusion():
    body = """
  %p = bf16[10,30]{1,0} parameter(0)
  %q = bf16[30,20]{1,0} parameter(1)
  ROOT %d = bf16[10,20]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
"""
    parameters = "%x = bf16[10,30]{1,0} parameter(0)\n%y = bf16[30,20]{1,0} parameter(1)"
    assert fusion(body, parameters=parameters) == Work((Product(1, 10, 20, 30, "bf16"),), 0.0, 600 + 1200 + 400)


def test_a_reduction_counts_its_operand():
    body = """
  %p = f32[100]{0} parameter(0)
  %z = f32[] constant(0)
  ROOT %s = f32[] reduce(%p, %z), dimensions={0}, to_apply=%adder
"""
    assert fusion(body, ADDER, parameters="%x = f32[100]{0} parameter(0)") == Work(vector_flops=100.0, bytes=404)
