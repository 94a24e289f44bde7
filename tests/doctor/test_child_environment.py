"""Child processes: what they said is kept, however they end."""

import os
import time

import pytest

from hwgrpo.doctor.child_environment import run_children, start_children


@pytest.fixture
def script(tmp_path):
    def write(*lines):
        file = tmp_path / "script.py"
        file.write_text("\n".join(("import json, os, sys, time", "question = json.loads(sys.argv[1])", *lines)))
        return file

    return write


def says(text):
    return f"print('hwgrpo.doctor ' + json.dumps({text}), flush=True)"


def test_answers_come_in_the_order_of_the_questions_and_other_output_is_left_out(script):
    file = script("print('a chatty plug-in')", "time.sleep(question['wait'])", says("{'n': question['n']}"))
    first, second = run_children(file, [{"n": 1, "wait": 0.3}, {"n": 2, "wait": 0}], 60)
    assert (first.lines, second.lines) == ([{"n": 1}], [{"n": 2}])
    assert (first.failure, second.failure) == (None, None)


def test_a_child_is_told_where_the_packages_lie(script):
    (answer,) = run_children(script(says("question['path']")), [{}], 60)
    assert all(os.path.isdir(folder) for folder in answer.lines[0])
    assert any(os.path.isdir(os.path.join(folder, "hwgrpo_kernels")) for folder in answer.lines[0])


def test_a_signal_an_exit_status_and_what_was_said_before_are_told(script):
    (answer,) = run_children(script(says("{'begun': 1}"), "os.kill(os.getpid(), 11)"), [{}], 60)
    assert answer.lines == [{"begun": 1}]
    assert "SIGSEGV" in answer.failure
    (answer,) = run_children(script("raise SystemExit('the driver is gone')"), [{}], 60)
    assert answer.failure == "it ended with exit status 1: the driver is gone"


def test_a_child_that_hangs_is_ended_with_what_it_started(script, tmp_path):
    pid = tmp_path / "pid"
    start = f"import subprocess; p = subprocess.Popen(['sleep', '600']); open({str(pid)!r}, 'w').write(str(p.pid))"
    began = time.monotonic()
    (answer,) = run_children(script(start, says("{'begun': 1}"), "time.sleep(600)"), [{}], 3)
    assert time.monotonic() - began < 60
    assert answer.lines == [{"begun": 1}]
    assert answer.failure == "it took more than 3 seconds"
    for _ in range(200):
        try:
            with open(f"/proc/{pid.read_text()}/stat") as stat:
                if stat.read().split()[2] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    pytest.fail("what the child started is still there")


def test_a_child_whose_answer_is_not_waited_for_is_ended(script, tmp_path):
    pid = tmp_path / "pid"
    file = script(
        f"open({str(pid) + '.part'!r}, 'w').write(str(os.getpid()))",
        f"os.rename({str(pid) + '.part'!r}, {str(pid)!r})",
        "time.sleep(600)",
    )
    with start_children(file, [{}], 600):
        while not pid.exists():
            time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
