import os
import signal
import threading

import pytest

from jax_deepcompile.training.stopping import StopRequest

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_second_is_itself(number, monkeypatch):
    received = []
    before = signal.signal(number, lambda *_: received.append(number))
    try:
        with StopRequest(lambda step: False) as stop:
            assert not stop.is_due(1)
            os.kill(os.getpid(), number)
            assert stop.is_due(1)
            assert not received
            os.kill(os.getpid(), number)
            assert received == [number]
    finally:
        signal.signal(number, before)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(lambda step: False):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_signals_are_left_alone():
    errors = []

    def enter():
        try:
            with StopRequest(lambda step: False):
                pass
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not errors


def test_several_processes_stop_when_they_agree(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(lambda step: step == 5) as stop:
        assert signal.getsignal(signal.SIGTERM) is before
        assert [step for step in range(8) if stop.is_due(step)] == [5]


def test_the_watch_is_told_what_a_stop_waits_for():
    class Watch:
        waits_for: str | None = None

    watch = Watch()
    with StopRequest(lambda step: False, watch) as stop:
        assert watch.waits_for == "the step under way and its checkpoint"
        with stop.waiting_for("the checkpoint after step 3"):
            assert watch.waits_for == "the checkpoint after step 3"
        assert watch.waits_for == "the step under way and its checkpoint"
    assert watch.waits_for is None
