import logging
import subprocess
import sys
import threading

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


def test_a_computation_that_no_signal_interrupts_is_ended_and_the_next_one_gets_a_new_process(monkeypatch):
    monkeypatch.setattr(mathematics, "STEPS", 0.001)
    child = mathematics._child.__wrapped__(1)
    monkeypatch.setattr(mathematics, "_child", lambda timeout: child)
    assert mathematics._in_child(r"\boxed{9^{9^{9}}}", "5", 1) is False
    monkeypatch.setattr(child._pool, "_timeout", 60)
    assert mathematics._in_child(r"\boxed{0.5}", "1/2", 1) is True
    assert mathematics._in_child("no idea", "1/2", 1) is None
    with pytest.raises(ValueError, match="is not an expression that math-verify can parse"):
        mathematics._in_child("1", "$ $", 1)


SCRIPT = """
import threading
from hwgrpo.rewards.mathematics import math
print("begun", flush=True)
thread = threading.Thread(target=lambda: print("scored", math("$0.5$", "1/2"), flush=True))
thread.start()
thread.join()
"""


def test_a_script_that_scores_in_a_thread_runs_once_without_a_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.stdout.split("\n") == ["begun", "scored 1.0", ""], done.stderr[-2000:]


@pytest.mark.parametrize("name", ["parser", "grader"])
def test_a_timeout_of_math_verify_is_named_once_and_without_the_response(name, caplog):
    mathematics.shorten_timeout_warnings()
    records = [
        logging.LogRecord(name, logging.WARNING, "", 0, f"Timeout during parsing: \x1b[2J{each}%s", (), None)
        for each in ("first", "second")
    ]
    first = mathematics._FirstTimeout()
    assert [first.shorten(each) for each in records] == [True, False]
    shown = records[0].getMessage()
    assert "timeout during parsing" in shown
    assert "first" not in shown
    logger = logging.getLogger(f"math_verify.{name}")
    assert logger.filters, "the filter is installed"
    with caplog.at_level(logging.WARNING, logger.name):  # whatever quieted it before
        logger.warning("Timeout during parsing: \x1b[2J the response")
        logger.warning("another warning")
    assert "another warning" in caplog.text
    assert "the response" not in caplog.text


def test_a_response_that_takes_too_long_is_not_printed(capfd):
    assert math(r"\boxed{9^{9^{9}}} and a long text", "5", timeout=1) == 0
    assert "a long text" not in "".join(capfd.readouterr())
