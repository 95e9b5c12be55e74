"""How often loops run, from what XLA prints."""

from __future__ import annotations

import pytest

from jax_deepcompile.hlo import reader as hlo
from jax_deepcompile.hlo.trip_counts import trip_count

pytestmark = pytest.mark.pure

LOOP = """HloModule loop, is_scheduled=true

%body (s: (s32[])) -> (s32[]) {
  %s = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %r = (s32[]) tuple(%i)
}

%cond (c: (s32[])) -> pred[] {
  %c = (s32[]) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %bound = s32[] constant(12)
  ROOT %lt = pred[] compare(%j, %bound), direction=LT
}

ENTRY %main (start: (s32[])) -> (s32[]) {
  %start = (s32[]) parameter(0)
  ROOT %w = (s32[]) while(%start), condition=%cond, body=%body
}
"""

CARRIED = """HloModule loop, is_scheduled=true

%body (s: (s32[], s32[])) -> (s32[], s32[]) {
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  ROOT %r = (s32[], s32[]) tuple(%i, %n)
}

%compared (p: s32[], q: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %lt = pred[] compare(%p, %q), direction=LT
}

%cond (c: (s32[], s32[])) -> pred[] {
  %c = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %bound = s32[] get-tuple-element(%c), index=1
  ROOT %fusion = pred[] fusion(%j, %bound), kind=kLoop, calls=%compared
}

ENTRY %main (zero: s32[]) -> (s32[], s32[]) {
  %zero = s32[] parameter(0)
  %sixteen = s32[] constant(16)
  %copy = s32[] copy(%sixteen)
  %start = (s32[], s32[]) tuple(%zero, %copy)
  ROOT %w = (s32[], s32[]) while(%start), condition=%cond, body=%body
}
"""


def count(text: str) -> int | None:
    module = hlo.read(text)
    return trip_count(module, module.entry.root)


def test_a_constant_in_the_condition():
    assert count(LOOP) == 12
    assert count(LOOP.replace("direction=LT", "direction=LE")) == 13


def test_what_xla_wrote_down_comes_first():
    assert count(LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')) == 5


def test_a_constant_carried_to_the_condition():
    assert count(CARRIED) == 16


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (LOOP, "direction=LT", "direction=NE"),
        (LOOP, "constant(12)", "parameter(1)"),
        (CARRIED, "tuple(%i, %n)", "tuple(%i, %i)"),
        (CARRIED, "constant(16)", "parameter(1)"),
        (CARRIED, "(s32[], s32[]) tuple(%zero, %copy)", 'custom-call(), custom_call_target="start"'),
    ],
    ids=["not a bound", "no constant", "changed by the body", "no constant carried", "start unknown"],
)
def test_nothing_is_guessed(text: str, old: str, new: str):
    new = new.replace("custom-call", "(s32[], s32[]) custom-call")
    assert count(text.replace(old, new)) is None
