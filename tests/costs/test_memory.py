"""Buffers and their live ranges, by hand: everything called K takes 4096 bytes."""

from __future__ import annotations

import itertools

import pytest

from jax_deepcompile.costs.held import Holds, contents
from jax_deepcompile.costs.memory import MemoryUse, memory_of
from tests.costs.snippets import GROUPS, module

pytestmark = pytest.mark.pure

K = "f32[1024]{0}"
SIZE = 4096


def memory(entry: str, *computations: str, header: str = "") -> MemoryUse:
    entry = entry.replace("K ", f"{K} ").replace("K,", f"{K},").replace("K)", f"{K})")
    return memory_of(module(entry, *computations, header=header))


def pointwise(name: str, opcode: str = "negate") -> str:
    return (
        f"%{name} () -> f32[1024] {{\n  %p_{name} = {K} parameter(0)\n  ROOT %r_{name} = {K} {opcode}(%p_{name})\n}}\n"
    )


def test_a_value_is_needed_until_its_last_use():
    use = memory("""
%x = K parameter(0)
%a = K reverse(%x), dimensions={0}
%b = K reverse(%a), dimensions={0}
%c = K reverse(%b), dimensions={0}
ROOT %d = f32[] custom-call(%c), custom_call_target="sum"
""")
    assert (use.argument_bytes, use.output_bytes, use.temporary_bytes) == (SIZE, 4, 2 * SIZE)
    assert use.peak_bytes == use.live_peak_bytes == 3 * SIZE + 4
    assert [live - SIZE - 4 for live in use.live_bytes] == [0, SIZE, 2 * SIZE, 2 * SIZE, SIZE]
    assert use.names == ("x", "a", "b", "c", "d")
    assert use.peak_values == ((SIZE, "b"), (SIZE, "a"))


CHAIN = """
%x = K parameter(0)
%a = K reverse(%x), dimensions={0}
%b = K fusion(%a), kind=kLoop, calls=%step
"""


def test_a_pointwise_fusion_writes_over_its_operand():
    use = memory(f'{CHAIN}ROOT %r = f32[] custom-call(%b), custom_call_target="sum"', pointwise("step"))
    assert use.temporary_bytes == SIZE


@pytest.mark.parametrize(
    ("last", "body"),
    [
        ("custom-call(%a, %b)", pointwise("step")),  # the operand is still needed
        ("custom-call(%b)", pointwise("step", "reverse")),  # elements move
    ],
)
def test_otherwise_it_does_not(last: str, body: str):
    use = memory(f'{CHAIN}ROOT %r = f32[] {last}, custom_call_target="sum"', body)
    assert use.temporary_bytes == 2 * SIZE


def test_a_fusion_whose_operand_feeds_two_results_does_not_write_over_it():
    body = f"""%step () -> (f32[1024], f32[1024]) {{
  %p = {K} parameter(0)
  %n = {K} negate(%p)
  %m = {K} multiply(%p, %p)
  ROOT %t = ({K}, {K}) tuple(%n, %m)
}}
"""
    use = memory(
        """
%x = K parameter(0)
%a = K reverse(%x), dimensions={0}
%b = (K, K) fusion(%a), kind=kLoop, calls=%step
%c = K get-tuple-element(%b), index=0
%d = K get-tuple-element(%b), index=1
ROOT %r = f32[] custom-call(%c, %d), custom_call_target="sum"
""",
        body,
    )
    assert use.temporary_bytes == 3 * SIZE


def test_other_types_of_the_same_size_share_a_buffer_and_smaller_ones_do_not():
    body = f"%step () -> X {{\n  %p = {K} parameter(0)\n  ROOT %c = X[1024]{{0}} convert(%p)\n}}\n"
    entry = CHAIN.replace("%b = K", "%b = X[1024]{0}") + 'ROOT %r = f32[] custom-call(%b), custom_call_target="sum"'
    for dtype, temporary_bytes in (("s32", SIZE), ("bf16", SIZE + SIZE // 2)):
        assert memory(entry.replace("X", dtype), body.replace("X", dtype)).temporary_bytes == temporary_bytes


UPDATE = """%update () -> f32[8,1024] {
  %b = f32[8,1024]{1,0} parameter(0)
  %u = f32[1,1024]{1,0} parameter(1)
  %i = s32[] constant(0)
  ROOT %d = f32[8,1024]{1,0} dynamic-update-slice(%b, %u, %i, %i)
}
"""


def test_an_update_in_place_needs_no_second_buffer():
    use = memory(
        """
%u = f32[1,1024]{1,0} parameter(0)
%zero = f32[8,1024]{1,0} custom-call(), custom_call_target="zeros"
%one = f32[8,1024]{1,0} fusion(%zero, %u), kind=kLoop, calls=%update
%two = f32[8,1024]{1,0} fusion(%one, %u), kind=kLoop, calls=%update
ROOT %r = f32[] custom-call(%two), custom_call_target="sum"
""",
        UPDATE,
    )
    assert use.temporary_bytes == 8 * SIZE


def test_a_product_added_to_an_operand_takes_its_buffer():
    entry = """
%x = K parameter(0)
%a = K reverse(%x), dimensions={0}
%g = (K, s8[256]{0}) custom-call(%x, %x, %a), custom_call_target="__cublas$lt$matmul"ALIAS
%c = K get-tuple-element(%g), index=0
ROOT %r = f32[] custom-call(%c), custom_call_target="sum"
"""
    aliased = entry.replace("ALIAS", ", output_to_operand_aliasing={{0}: (2, {})}")
    assert memory(aliased).temporary_bytes == SIZE + 256
    apart = memory(entry.replace("ALIAS", ""))
    assert apart.temporary_bytes == 2 * SIZE + 256
    assert apart.peak_values == ((SIZE, "g"), (SIZE, "a"), (256, "workspace of libraries"))


def test_an_outcome_may_take_a_donated_argument():
    entry = "%x = K parameter(0)\n%a = K reverse(%x), dimensions={0}\nROOT %r = (K, K) tuple(%a, %x)"
    kept = memory(entry)
    assert (kept.argument_bytes, kept.output_bytes, kept.temporary_bytes) == (SIZE, SIZE + 16, 0)
    donated = memory(entry, header=", input_output_alias={ {0}: (0, {}, may-alias) }")
    assert (donated.argument_bytes, donated.output_bytes) == (SIZE, 16)


def test_a_gather_is_there_from_its_start_and_its_operand_until_it_is_done():
    use = memory(f"""
%x = K parameter(0)
%a = K reverse(%x), dimensions={{0}}
%s = (K, f32[4096]{{0}}) all-gather-start(%a), {GROUPS}, dimensions={{0}}
%b = K reverse(%x), dimensions={{0}}
%d = f32[4096]{{0}} all-gather-done(%s)
ROOT %r = f32[] custom-call(%d, %b), custom_call_target="sum"
""")
    assert [live - SIZE - 4 for live in use.live_bytes] == [0, SIZE, 5 * SIZE, 6 * SIZE, 6 * SIZE, 5 * SIZE]


@pytest.mark.parametrize("operands", ["(K)", "K"])
def test_an_asynchronous_fusion_passes_its_operands_on(operands: str):
    use = memory(
        f"""
%x = K parameter(0)
%s = ({operands}, K, u32[]) fusion-start(%x), kind=kLoop, calls=%step
%d = K fusion-done(%s)
ROOT %r = f32[] custom-call(%d), custom_call_target="sum"
""",
        pointwise("step"),
    )
    assert use.temporary_bytes == SIZE + 256


def test_host_memory_is_counted_apart():
    use = memory("""
%x = K parameter(0)
%s = (f32[1024]{0:S(5)}, K, u32[]) copy-start(%x)
%h = f32[1024]{0:S(5)} copy-done(%s)
%t = (K, f32[1024]{0:S(5)}, u32[]) copy-start(%h)
%b = K copy-done(%t)
ROOT %r = f32[] custom-call(%b), custom_call_target="sum"
""")
    assert (use.host_bytes, use.temporary_bytes) == (SIZE, SIZE + 256)


def loop(body: str, tuple_type: str) -> tuple[str, str]:
    tuple_type = tuple_type.replace("K", K)
    lines = body.strip().replace("K ", f"{K} ")
    head = f"(s: {tuple_type}) ->"
    return (
        f"%body {head} {tuple_type} {{\n  %s = {tuple_type} parameter(0)\n  {lines}\n}}\n",
        f"%cond {head} pred[] {{\n  %c = {tuple_type} parameter(0)\n  ROOT %y = pred[] constant(true)\n}}\n",
    )


def test_what_a_loop_carries_has_one_buffer_and_its_body_a_peak_of_its_own():
    body, condition = loop(
        """
  %i = K get-tuple-element(%s), index=0
  %w = K get-tuple-element(%s), index=1
  %n = K custom-call(%i, %w), custom_call_target="f"
  %m = K custom-call(%n), custom_call_target="g"
  ROOT %o = (f32[1024]{0}, f32[1024]{0}) tuple(%m, %w)
""",
        "(K, K)",
    )
    use = memory(
        """
%x = K parameter(0)
%w0 = K parameter(1)
%a = K reverse(%x), dimensions={0}
%t = (K, K) tuple(%a, %w0)
%l = (K, K) while(%t), condition=%cond, body=%body
%f = K get-tuple-element(%l), index=0
ROOT %r = f32[] custom-call(%f), custom_call_target="sum"
""",
        body,
        condition,
    )
    # The carried array and n: m may take the carried buffer, as what was in it is dead once n is there. w stays put.
    assert use.temporary_bytes == 2 * SIZE
    assert set(use.names) >= {"n", "m", "l"}
    assert {name: loop for name, loop in zip(use.names, use.loops, strict=True) if loop} == dict.fromkeys(
        [*"siwnmo", *"cy"], "l"
    )
    assert {each.address for each in use.held} == {0, SIZE}
    for one, other in itertools.combinations(use.held, 2):
        apart = one.end < other.begin or other.end < one.begin
        assert apart or one.address + one.bytes <= other.address or other.address + other.bytes <= one.address


def test_branches_share_their_result_and_not_their_temporaries_with_each_other():
    branch = """%{0} () -> f32[1024] {{
  %p_{0} = f32[1024]{{0}} parameter(0)
  %q_{0} = f32[{1}]{{0}} custom-call(%p_{0}), custom_call_target="f"
  ROOT %r_{0} = f32[1024]{{0}} custom-call(%q_{0}), custom_call_target="g"
}}
"""
    use = memory(
        """
%x = K parameter(0)
%w = pred[] parameter(1)
%c = K conditional(%w, %x, %x), true_computation=%large, false_computation=%small
ROOT %r = f32[] custom-call(%c), custom_call_target="sum"
""",
        branch.format("large", 3072),
        branch.format("small", 2048),
    )
    assert use.temporary_bytes == 4 * SIZE


def test_constants_and_views_take_nothing():
    use = memory("""
%x = K parameter(0)
%c = K constant({...})
%v = f32[32,32]{1,0} bitcast(%x)
%t = (f32[32,32]{1,0}) tuple(%v)
%g = f32[32,32]{1,0} get-tuple-element(%t), index=0
ROOT %r = f32[] custom-call(%g, %c), custom_call_target="sum"
""")
    assert use.temporary_bytes == 0


def test_what_many_ways_lead_to_is_looked_at_once():
    """By every one of them that would be a million times a million times as often."""
    doubled = "".join(
        f"%a{at} = K copy(%v{at})\n%b{at} = K copy(%v{at})\n%v{at + 1} = K dynamic-update-slice(%a{at}, %b{at}, %i)\n"
        for at in range(40)
    )
    last = 'ROOT %r = f32[] custom-call(%v40), custom_call_target="sum"'
    entry = f"%v0 = K parameter(0)\n%i = s32[] parameter(1)\n{doubled}{last}"
    scheduled = module(entry.replace("K ", f"{K} "))
    found = list(contents(scheduled, memory_of(scheduled).held, ()))
    assert len(found) >= 80
    assert Holds.GRADIENT not in {each.holds for each in found}
