"""How often collectives are launched, in loops, branches and calls."""

from __future__ import annotations

import pytest

from jax_deepcompile.hlo.reader import read
from jax_deepcompile.hlo.trip_counts import launches

pytestmark = pytest.mark.pure

MODULE = """HloModule program, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (s: f32[8]) -> f32[8] {
  %s = f32[8] parameter(0)
  %start = (f32[8], f32[64]) all-gather-start(%s), replica_groups=[1,8]<=[8], dimensions={0}
  %done = f32[64] all-gather-done(%start)
  ROOT %part = f32[8] slice(%done), slice={[0:8]}
}

%cond (c: f32[8]) -> pred[] {
  %c = f32[8] parameter(0)
  ROOT %go_on = pred[] constant(true)
}

%once (o: f32[8]) -> f32[8] {
  %o = f32[8] parameter(0)
  ROOT %reduced = f32[8] all-reduce(%o), replica_groups=[1,8]<=[8], to_apply=%add
}

%never (n: f32[8]) -> f32[8] {
  ROOT %n = f32[8] parameter(0)
}

%wrapped (w: f32[64]) -> f32[8] {
  %w = f32[64] parameter(0)
  ROOT %scattered = f32[8] reduce-scatter(%w), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

ENTRY %main (start: f32[8], which: s32[], whole: f32[64]) -> f32[8] {
  %first = f32[8] parameter(0)
  %which = s32[] parameter(1)
  %whole = f32[64] parameter(2)
  %looped = f32[8] while(%first), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %unknown = f32[8] while(%looped), condition=%cond, body=%body
  %branch = f32[8] conditional(%which, %unknown, %unknown), branch_computations={%never, %once}
  %called = f32[8] call(%branch), to_apply=%once
  %async = ((f32[64]), f32[8], u32[]) async-start(%whole), calls=%wrapped
  %awaited = f32[8] async-done(%async)
  ROOT %result = f32[8] add(%called, %awaited)
}
"""


def test_each_is_counted_as_often_as_it_runs():
    assert launches(read(MODULE)) == {"all-gather": 13, "all-reduce": 2, "reduce-scatter": 1}


def test_none_is_none():
    alone = "HloModule alone, is_scheduled=true\n\nENTRY %main (a: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}"
    assert not launches(read(alone))
