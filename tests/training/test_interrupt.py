"""Signals that ask a run to end: one request may come twice, and a second request ends it at once."""

import signal
import threading

import pytest

from hwgrpo.training import interrupt
from hwgrpo.training.interrupt import SAME_REQUEST, Interrupt


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr(interrupt, "time", found := Clock())
    return found


def test_a_signal_of_a_scheduler_that_the_launcher_passes_on_is_one_request(clock):
    with Interrupt() as asked:
        signal.raise_signal(signal.SIGTERM)
        clock.now += SAME_REQUEST - 1
        signal.raise_signal(signal.SIGTERM)
        assert asked.received == "SIGTERM"
        clock.now += 2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_a_first_request_ends_the_run_at_once(clock, first):
    with Interrupt() as asked:
        signal.raise_signal(first)
        assert asked.received == first.name
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_loop_that_another_thread_ends_changes_no_signal_handler():
    before = signal.getsignal(signal.SIGINT)
    abandoned, failures = Interrupt(), []
    abandoned.__enter__()

    def end() -> None:
        try:
            abandoned.__exit__()
        except ValueError as error:
            failures.append(error)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    abandoned.__exit__()
    assert not failures
    assert signal.getsignal(signal.SIGINT) == before


def test_the_handler_of_another_that_replaced_it_stays():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with Interrupt():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
