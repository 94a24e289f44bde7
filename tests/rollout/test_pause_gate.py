"""Who may be at the weights: the thread that generates, or the one that brings new ones."""

import threading

import pytest

from hwgrpo.errors import RunError
from hwgrpo.rollout.pause_gate import Gate, Stopped


class Generating:
    """A batch that goes on for as long as `until` is not set, with a step every millisecond."""

    def __init__(self, gate: Gate) -> None:
        self.until, self.begun = threading.Event(), threading.Event()
        self.inside, self.ended = False, ""
        self._gate = gate
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        assert self.begun.wait(60)

    def _run(self) -> None:
        try:
            with self._gate.inside():
                self.inside = True
                self.begun.set()
                while not self.until.wait(0.001):
                    self._gate.step()
                self.inside = False
            self.ended = "done"
        except Stopped:
            self.ended = "stopped"


def test_between_two_tokens_it_makes_way_and_goes_on_after():
    gate = Gate(between_steps=True)
    batch = Generating(gate)
    with gate.held():
        assert batch.inside, "its batch is not done"
    batch.until.set()
    batch.thread.join(60)
    assert batch.ended == "done"


@pytest.mark.parametrize(("between_steps", "finish_batch"), [(False, False), (True, True)])
def test_a_batch_is_finished_first_where_it_must_be(between_steps: bool, finish_batch: bool):
    gate = Gate(between_steps)
    batch = Generating(gate)
    threading.Timer(0.2, batch.until.set).start()
    with gate.held(finish_batch=finish_batch):
        assert not batch.inside
    batch.thread.join(60)


def test_nothing_begins_while_the_gate_is_held():
    gate = Gate()
    entered = threading.Event()

    def generate() -> None:
        with gate.inside():
            entered.set()

    with gate.held():
        thread = threading.Thread(target=generate)
        thread.start()
        assert not entered.wait(0.2)
    thread.join(60)
    assert entered.is_set()


def test_stopping_ends_a_batch_at_its_next_token():
    gate = Gate()
    batch = Generating(gate)
    gate.stop()
    batch.thread.join(60)
    assert batch.ended == "stopped"


def test_a_thread_that_never_makes_way_is_waited_for_until_the_time_limit():
    gate = Gate(timeout=0.1)
    with gate.inside(), pytest.raises(RunError, match=r"waited 0.1 s for the rollout thread to pause"), gate.held():
        pass
    with gate.inside():
        pass  # who gave up holds nothing
