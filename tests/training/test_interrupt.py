"""Signals that ask a run to end: one request may come twice, and a second request ends it at once."""

import signal

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
