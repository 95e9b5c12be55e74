"""Profiles: written and read back, merged, looked up; what is refused, and in which words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_deepcompile import errors
from jax_deepcompile.costs.entries import (
    Axis,
    CollectiveFit,
    CollectiveKind,
    CopyFit,
    Direction,
    LinearFit,
    Machine,
    MemoryFigures,
    Method,
    OpTime,
    Source,
    StepTime,
    analytical,
)
from jax_deepcompile.costs.profile import FORMAT, Profile

pytestmark = pytest.mark.pure

MEASURED = Source(Method.MEASURED, "2026-11-21", 5)
NOT_MEASURED = analytical("the devices were busy")
MACHINE = Machine("NVIDIA H100", (Axis("data", 4, hosts=4), Axis("fsdp", 8)), (("jax", "0.10.2"),))
FIT = LinearFit(2e-5, 1e-11, 0.03, ((1024, 2.1e-5), (1 << 20, 3e-5)))


def gather(fit: LinearFit | None = FIT, source: Source = MEASURED) -> CollectiveFit:
    return CollectiveFit(CollectiveKind.ALL_GATHER, ("fsdp",), fit, source)


def op(name: str = "fusion.1", *per_device_s: float, source: Source = MEASURED) -> OpTime:
    return OpTime(name, per_device_s, 4, (7, 9), "train.py:12 (loss)", source)


def memory(**changes) -> MemoryFigures:
    figures = MemoryFigures(100, 90, 80, 50, 0, 0, 0, (), Source(Method.COMPILED), None, NOT_MEASURED)
    return replace(figures, **changes)


PROFILE = Profile(
    "a" * 32,
    MACHINE,
    ops=(op("fusion.1", 1e-3, 2e-3, 9e-3), op("fusion.2", source=NOT_MEASURED)),
    collectives=(gather(),),
    copies=(CopyFit(Direction.TO_HOST, FIT, MEASURED), CopyFit(Direction.FROM_HOST, None, NOT_MEASURED)),
    step=StepTime(0.5, MEASURED),
    memory=memory(),
)

seconds = st.floats(0, 1e6)
words = st.text(max_size=8)


def tuples(elements, **options):
    return st.lists(elements, max_size=3, **options).map(tuple)


def entries(kind, *fields):
    return tuples(st.builds(kind, *fields), unique_by=lambda entry: entry.key)


wholes = st.integers(0, 2**63 - 1)
sources = st.builds(Source, st.sampled_from(Method), words, st.integers(0, 99), words)
fits = st.none() | st.builds(LinearFit, seconds, seconds, seconds, tuples(st.tuples(wholes, seconds)))
axes = st.builds(Axis, words, st.integers(1, 1024), st.integers(1, 64))
profiles = st.builds(
    Profile,
    words,
    st.builds(Machine, words, tuples(axes), tuples(st.tuples(words, words))),
    ops=entries(OpTime, words, tuples(seconds), wholes, tuples(wholes), words, sources),
    collectives=entries(CollectiveFit, st.sampled_from(CollectiveKind), tuples(words), fits, sources),
    copies=entries(CopyFit, st.sampled_from(Direction), fits, sources, st.none() | st.floats(1, 9)),
    step=st.none() | st.builds(StepTime, seconds, sources),
    memory=st.none() | st.builds(memory, live_bytes=tuples(wholes)),
)


@given(profiles)
def test_what_is_written_is_read_back(profile: Profile):
    assert Profile.from_json(profile.to_json()) == profile


def test_a_notebook_folds_what_each_entry_takes():
    shown = PROFILE._repr_html_()
    assert shown.count("<details") == 3
    assert all(f"<b>{op.name}</b>" in shown for op in PROFILE.ops)
    assert Profile("", PROFILE.machine)._repr_html_().count("<details") == 0


@given(profiles)
def test_merging_a_profile_with_itself_changes_nothing(profile: Profile):
    assert profile.merge(profile) == profile


def test_a_file(tmp_path):
    path = tmp_path / "profile.json"
    PROFILE.write(path)
    assert Profile.read(path) == PROFILE


def changed(**changes) -> str:
    document = json.loads(PROFILE.to_json())
    document["profile"] |= changes
    return json.dumps(document)


def changed_op(**changes) -> str:
    return changed(ops=[json.loads(PROFILE.to_json())["profile"]["ops"][0] | changes])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON: Expecting value"),
        (PROFILE.to_json()[:-40], "not JSON: "),
        ("[]", "the whole: expected an object with format, profile, found []"),
        ("{}", "format: missing"),
        (
            json.dumps({"format": FORMAT + 1, "ops": []}),
            f"it has format {FORMAT + 1}, and this version reads format {FORMAT}",
        ),
        (changed(flops=3), "profile.flops: an unknown key; there are fingerprint, machine, ops"),
        (changed(fingerprint=None), "profile.fingerprint: expected str, found None"),
        (changed(ops={}), "profile.ops: expected a list, found {}"),
        (changed_op(executions=True), "profile.ops[0].executions: expected int, found True"),
        (changed_op(per_device_s=[1.0, "fast"]), "profile.ops[0].per_device_s[1]: expected float, found 'fast'"),
        (
            changed_op(source={"method": "guessed", "date": "", "runs": 0, "note": ""}),
            "profile.ops[0].source.method: expected one of measured, compiled, analytical, found 'guessed'",
        ),
        (changed_op(per_device_s=[float("nan")]), "NaN is not a number that JSON has"),
        (
            changed(copies=[json.loads(PROFILE.to_json())["profile"]["copies"][0]] * 2),
            "profile: two entries for to host",
        ),
        (PROFILE.to_json().replace("2e-05", "-2e-05"), "a fit with a negative latency, bandwidth or residual"),
        (PROFILE.to_json().replace('"runs"', '"rums"', 1), "an unknown key; there are method, date, runs, note"),
        pytest.param("[" * 200_000, "its lists and objects are nested too deeply", id="deep"),
        (PROFILE.to_json().replace("2e-05", "9" * 401), "99999999999999999999... does not fit 64 bits"),
        pytest.param(
            PROFILE.to_json().replace("2e-05", "9" * 5000), "99999999999999999999... does not fit 64 bits", id="digits"
        ),
        (PROFILE.to_json().replace("2e-05", "-9e999"), "-9e999 is not a number that JSON has"),
        (changed(fingerprint="\ud800"), r"profile.fingerprint: expected text, found '\ud800'"),
        (changed(**{"\udfff": 1}), r"profile.\udfff: an unknown key"),
        (changed_op(per_device_s=[1.0, -1e-9]), "profile.ops[0]: fusion.1 took less than no time"),
    ],
)
def test_text_that_is_no_profile(text: str, problem: str):
    with pytest.raises(errors.ProfileFormatError) as caught:
        Profile.from_json(text, "run/profile.json")
    assert str(caught.value).startswith("run/profile.json is not a profile: ")
    assert problem in str(caught.value)
    assert str(caught.value).endswith(
        ". Take the profile again (deepcompile profile); profiles are not meant to be edited, and not kept from one "
        "format to the next."
    )


def test_a_file_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "profile.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(errors.ProfileFormatError, match=r"profile\.json is not a profile: not JSON"):
        Profile.read(path)


def test_lookups():
    assert PROFILE.collective_s(CollectiveKind.ALL_GATHER, ["fsdp"], 1 << 30) == 2e-5 + (1 << 30) * 1e-11
    assert PROFILE.copy_s(Direction.TO_HOST, 0) == 2e-5
    assert PROFILE.op_s("fusion.1") == 2e-3


def test_lookups_of_what_was_not_measured():
    assert PROFILE.collective_s(CollectiveKind.ALL_REDUCE, ("fsdp",), 8) is None
    assert PROFILE.collective_s(CollectiveKind.ALL_GATHER, ("data", "fsdp"), 8) is None
    assert PROFILE.copy_s(Direction.FROM_HOST, 8) is None
    assert PROFILE.op_s("fusion.2") is None
    assert PROFILE.op_s("fusion.3") is None


def test_fallbacks_say_what_and_why():
    missing = replace(PROFILE, collectives=(gather(None, analytical("no two sizes fit")),))
    assert missing.fallbacks() == (
        "op fusion.2, copy from host, allocator peak: the devices were busy",
        "all-gather over fsdp: no two sizes fit",
    )
    assert str(MEASURED) == "measured 2026-11-21, median of 5"
    assert str(NOT_MEASURED) == "analytical: the devices were busy"


def test_later_measurements_win():
    later = replace(PROFILE, ops=(op("fusion.1", 5e-3), op("fusion.3", 1e-6)), collectives=(), step=None, memory=None)
    merged = PROFILE.merge(later)
    assert [merged.op_s(name) for name in ("fusion.1", "fusion.2", "fusion.3")] == [5e-3, None, 1e-6]
    assert (merged.collectives, merged.step, merged.memory) == (PROFILE.collectives, PROFILE.step, PROFILE.memory)


def test_a_fallback_replaces_no_measurement():
    later = replace(PROFILE, collectives=(gather(None, NOT_MEASURED),), ops=(op("fusion.1", source=NOT_MEASURED),))
    assert PROFILE.merge(later).collectives == PROFILE.collectives
    assert later.merge(PROFILE).collectives == PROFILE.collectives
    assert PROFILE.merge(later).op_s("fusion.1") == 2e-3


def test_of_another_program_only_what_the_machine_does_is_taken():
    other = replace(
        PROFILE, fingerprint="b" * 32, ops=(op("fusion.9", 1.0),), step=StepTime(9.0, MEASURED), collectives=()
    )
    merged = replace(other, copies=()).merge(PROFILE)
    assert merged == replace(other, collectives=PROFILE.collectives)


def test_memory_keeps_the_peak_and_the_curve_it_lacks():
    peak = memory(allocator_peak_bytes=77, allocator_source=MEASURED, live_bytes=(1, 2))
    merged = replace(PROFILE, memory=peak).merge(replace(PROFILE, memory=memory(temp_bytes=60)))
    assert merged.memory == replace(peak, temp_bytes=60)
    assert merged.memory.device_bytes == 100 + 90 - 80 + 60


@pytest.mark.parametrize(
    "machine",
    [
        replace(MACHINE, device_kind="NVIDIA H200"),
        replace(MACHINE, axes=(Axis("data", 4), Axis("fsdp", 8))),
        replace(MACHINE, versions=(("jax", "0.12.0"),)),
    ],
)
def test_another_machine_is_refused(machine: Machine):
    with pytest.raises(errors.ProfileMismatchError) as caught:
        PROFILE.merge(replace(PROFILE, machine=machine))
    assert str(caught.value) == (
        f"the profile is of another machine: expected NVIDIA H100 (data=4 on 4 hosts, fsdp=8; jax 0.10.2), found "
        f"{machine}. Take a profile of this machine; without one, costs come from the analytical model."
    )
