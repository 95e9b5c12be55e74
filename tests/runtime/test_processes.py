"""Processes of a run agree before they run anything: none waits for one that does not come, nor runs another thing."""

from __future__ import annotations

import logging
import sys
import time
from functools import partial

import jax
import pytest

from jax_deepcompile import errors
from jax_deepcompile.runtime.processes import ALONE, Processes, processes_of
from tests.together import outcomes, processes

pytestmark = pytest.mark.pure


def agree_all(members: list[Processes], *what: str) -> list:
    """What comes of every process's agreement, one on each of ``what``, or all of them on one."""
    said = what if len(what) == len(members) else what * len(members)
    return outcomes(*(partial(member.agree, text) for member, text in zip(members, said, strict=True)))


def fail(member: Processes, error: BaseException) -> None:
    with member.together():
        raise error


def test_processes_that_do_the_same_go_on():
    def loop(member: Processes) -> str:
        for step in range(300):
            with member.together():
                member.agree("evaluate" if step % 10 == 9 else "train")
        return "done"

    members = processes(3)
    assert outcomes(*(partial(loop, member) for member in members)) == ["done"] * 3
    kept = members[0]._store.values  # pyright: ignore
    assert len(kept) <= 3 + 2 * 2 * 64, "what was said at meetings long past is deleted"


def test_processes_that_do_different_things_are_all_told_who_does_what():
    members = processes(3)
    found = agree_all(members, "run a on x float32[8]", "run a on x float32[4]", "run a on x float32[8]")
    assert {type(error) for error in found} == {errors.ProcessMismatchError}
    assert {str(error) for error in found} == {
        "the processes of this run are about to do different things: processes 0, 2 would run a on x float32[8]; "
        "process 1 would run a on x float32[4]. Their collectives would wait for each other forever. Give every "
        "process the same code, configuration and versions, the same of what is no batch, and in every step as many "
        "rows: drop the last, shorter batch of an epoch in all of them."
    }


def test_a_difference_stays_one_when_it_is_said_again():
    members = processes(2)
    for _ in range(2):
        assert all(isinstance(error, errors.ProcessMismatchError) for error in agree_all(members, "a", "b"))
    assert agree_all(members, "a") == [None, None]


def test_one_that_does_something_new_alone_is_a_difference():
    members = processes(2)
    for _ in range(3):
        assert agree_all(members, "a") == [None, None]
    assert all(isinstance(error, errors.ProcessMismatchError) for error in agree_all(members, "a", "b"))


def test_who_cannot_come_says_why_and_nobody_waits_for_a_third():
    first, second, _ = members = processes(3)
    reason = ValueError("a batch too short")
    found = outcomes(partial(first.agree, "a"), partial(fail, second, reason))
    assert found[1] is reason
    assert isinstance(found[0], errors.ProcessStoppedError)
    assert str(found[0]) == (
        "process 1 of this run does not go on, so this one stops too: its collectives would wait for process 1 "
        "forever. Its reason: ValueError: a batch too short"
    )
    assert isinstance(outcomes(partial(members[2].agree, "a"))[0], errors.ProcessStoppedError), "it comes later"
    assert agree_all(members, "a") == [None] * 3, "who catches that in all processes can go on"


def test_each_keeps_its_own_error_when_all_fail():
    members, reasons = processes(2), [ValueError("a"), ValueError("b")]
    assert outcomes(*map(partial, [fail] * 2, members, reasons)) == reasons
    assert agree_all(members, "a") == [None] * 2


def test_what_fails_inside_a_larger_whole_is_said_once():
    first, second = members = processes(2)

    def whole() -> None:
        with first.together():
            fail(first, ValueError("inside"))

    assert isinstance(outcomes(whole)[0], ValueError)
    assert isinstance(outcomes(partial(second.agree, "a"))[0], errors.ProcessStoppedError)
    assert agree_all(members, "a") == [None] * 2


def test_what_others_said_is_not_said_back():
    first, second = members = processes(2)

    def listen() -> None:
        with second.together():
            second.agree("a")

    found = outcomes(partial(fail, first, ValueError("a")), listen)
    assert isinstance(found[1], errors.ProcessStoppedError)
    assert agree_all(members, "a") == [None] * 2


def test_an_interrupted_wait_is_told(monkeypatch):
    first, second = processes(2)

    def interrupted(key: str, timeout_in_ms: int) -> str:
        raise KeyboardInterrupt

    def wait() -> None:
        with first.together():
            first.agree("a")

    with monkeypatch.context() as patch:
        patch.setattr(first._store, "blocking_key_value_get", interrupted)  # pyright: ignore
        assert isinstance(outcomes(wait)[0], KeyboardInterrupt)
    assert "Its reason: KeyboardInterrupt" in str(outcomes(partial(second.agree, "a"))[0])


def test_one_interrupted_when_all_had_agreed_does_not_come_to_the_next_meeting():
    first, second = members = processes(2)
    assert first.first_says("text") == "text"
    assert isinstance(outcomes(partial(fail, second, KeyboardInterrupt()))[0], KeyboardInterrupt)
    assert isinstance(outcomes(partial(first.agree, "a"))[0], errors.ProcessStoppedError)
    assert agree_all(members, "a") == [None] * 2


def test_the_first_one_says_what_all_hear():
    members, text = processes(3), "plan " * 1000
    assert outcomes(*(partial(member.first_says, text if member.is_first else "") for member in members)) == [text] * 3


def test_what_the_first_one_fails_at_is_heard_by_all():
    members = processes(3)
    found = outcomes(
        partial(fail, members[0], MemoryError("too little")), *(partial(m.first_says, "") for m in members[1:])
    )
    assert all("MemoryError: too little" in str(error) for error in found[1:])
    assert {type(error) for error in found[1:]} == {errors.ProcessStoppedError}


def test_a_program_that_ends_is_told_with_its_error(monkeypatch):
    first, second, third = processes(3)
    first.leave()
    assert str(outcomes(partial(second.agree, "a"))[0]).endswith("Its reason: its program has ended")
    monkeypatch.setattr(sys, "last_value", OSError("no data"), raising=False)
    second.leave()
    assert str(outcomes(partial(third.agree, "a"))[0]).endswith("Its reason: its program has ended")
    assert str(outcomes(partial(third.agree, "a"))[0]).endswith(
        "Its reason: its program has ended with OSError: no data"
    )


def test_one_that_fails_again_and_again_is_heard_by_a_slow_one():
    first, second = processes(2)
    for _ in range(200):
        with pytest.raises(KeyError):
            fail(first, KeyError())
    for _ in range(200):
        with pytest.raises(errors.ProcessStoppedError, match=r"Its reason: KeyError$"):
            second.agree("a")
    assert agree_all([first, second], "a") == [None] * 2


def test_a_slow_process_is_named_and_waited_for(monkeypatch, caplog):
    monkeypatch.setattr("jax_deepcompile.runtime.processes._POLL_MS", 10)
    first, second, third = processes(3, patience_s=0.1)

    def slow() -> None:
        time.sleep(0.6)
        second.agree("a")

    with caplog.at_level(logging.WARNING):
        assert outcomes(partial(first.agree, "a"), slow, partial(third.agree, "a")) == [None] * 3
    assert [record.message for record in caplog.records] == [
        "Waiting for process 1 (a). A slow one may be reading data, compiling, planning or writing a checkpoint."
    ] * 2


def test_a_service_that_is_gone_is_an_error_and_says_so(monkeypatch):
    first, _ = processes(2)

    def gone(*_, **__) -> None:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")

    for name in ("key_value_set", "blocking_key_value_get"):
        monkeypatch.setattr(first._store, name, gone)  # pyright: ignore

    def run() -> None:
        with first.together():
            first.agree("a")

    error = outcomes(run)[0]
    assert isinstance(error, jax.errors.JaxRuntimeError)
    assert "UNAVAILABLE" in str(error)


def test_one_process_asks_nobody(monkeypatch):
    mesh = jax.make_mesh((8,), ("fsdp",))
    assert processes_of(mesh) is ALONE
    assert ALONE.first_says("text") == "text"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert processes_of(mesh) is ALONE, "the other process has none of these devices"
    assert processes_of(mesh.abstract_mesh) is ALONE


def test_many_processes_are_listed_in_few_words():
    assert errors.listed_processes([3]) == "process 3"
    assert errors.listed_processes([2, 0]) == "processes 0, 2"
    assert errors.listed_processes(range(100)) == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"
