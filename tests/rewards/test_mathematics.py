import multiprocessing
import os
import threading
import time

import pytest

from hwgrpo.errors import DataError
from hwgrpo.rewards import mathematics
from hwgrpo.rewards.mathematics import math


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", "1/2", 1),
        ("it is $0.5$", r"\frac{1}{2}", 1),
        (r"\boxed{1+x^2}", "$x^2+1$", 1),
        (r"\boxed{\{2,1\}}", r"\boxed{\{1,2\}}", 1),
        (r"\boxed{42}", 42, 1),
        (r"\boxed{18.9}", r"\$18.90", 1),
        (r"\boxed{\$18.90}", r"\$18.90", 1),
        (r"\boxed{\$18.80}", r"\$18.90", 0.25),
        (r"\boxed{18.9}", r"it is $\$18.90$", 1),
        (r"\boxed{41}", "42", 0.25),
        (r"first $42$, finally \boxed{41}", "42", 0.25),
        ("no idea", "42", 0),
    ],
)
def test_expressions_are_compared_by_value(response, truth, reward):
    assert math(response, truth, format_score=0.25) == reward


def test_a_response_that_takes_too_long_is_wrong():
    assert math(r"\boxed{9^{9^{9}}}", "5", timeout=1) == 0


def test_it_works_and_keeps_time_outside_the_main_thread_too():
    rewards = {}

    def ask():
        rewards["equal"] = math(r"\boxed{0.5}", "1/2")
        rewards["endless"] = math(r"\boxed{9^{9^{9}}}", "5", timeout=1, format_score=0.25)
        try:
            math("1", None)
        except DataError as error:
            rewards["error"] = str(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert rewards["equal"] == 1
    assert rewards["endless"] == 0.25
    assert "data.ground_truth_key" in rewards["error"]


def test_a_ground_truth_that_is_no_expression_is_an_error():
    with pytest.raises(ValueError, match="is not an expression that math-verify can parse"):
        math("1", "$ $")


def test_a_computation_that_no_signal_interrupts_is_ended_and_the_next_one_gets_a_new_process():
    child = mathematics._Child()
    with pytest.raises(multiprocessing.TimeoutError):
        child.call(time.sleep, 60, seconds=0.2)
    assert child.call(abs, -3, seconds=60) == 3


def test_the_order_of_sets_is_the_same_in_every_process_that_judges(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    child = mathematics._Child()
    assert child.call(os.getenv, "PYTHONHASHSEED", seconds=60) == "0"
    assert "PYTHONHASHSEED" not in os.environ
    pool = child._pool
    assert pool is not None
    pool.terminate()
