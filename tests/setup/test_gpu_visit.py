"""scripts/gpu_visit.sh keeps what every step said and how it ended, whatever becomes of the others."""

import os
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
STAND_IN = """#!/usr/bin/env bash
echo "python $*"
[ -z "${NO_PYTEST:-}" ] || [[ "$*" != *pytest* ]] || { echo "No module named pytest"; exit 1; }
case "$*" in
    *"--shape slow"*) sleep 30 ;;
    *"--shape wrong"*) exit 1 ;;
    *"parity model.dtype"*) exit ${DIFFERS:-0} ;;
    *"not test_sanitizer"*) exit 3 ;;
esac
"""


@pytest.fixture
def visit(tmp_path):
    """Runs the script with a stand-in for Python; returns its result and the lines of steps.tsv."""
    for name in ("python", "compute-sanitizer"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    stand_in, path = tmp_path / "python", f"{tmp_path}:{os.environ['PATH']}"

    def run(*arguments, shapes="A B", **more):
        environment = {**os.environ, "PATH": path, "PYTHON": str(stand_in), "SHAPES": shapes, **more}
        command = ["bash", str(REPO / "scripts" / "gpu_visit.sh"), str(tmp_path / "out"), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        table = tmp_path / "out" / "steps.tsv"
        lines = table.read_text().splitlines() if table.exists() else []
        return done, [line.split("\t") for line in lines], tmp_path / "out"

    return run


def test_a_step_that_fails_or_takes_too_long_ends_no_other(visit):
    done, steps, out = visit(shapes="wrong slow A", LIMIT="2")
    codes = {step: int(code) for step, code, _, _ in steps}
    assert codes == {
        "parity": 0, "facts": 0, "kernels": 0, "tests": 3, "record": 0, "sanitizer": 0,
        "bench-wrong": 1, "bench-slow": 124, "bench-A": 0,
    }  # fmt: skip
    assert done.returncode == 1
    for step, _, _, log in steps:
        assert "python" in (out / log).read_text(), step
        assert f"== {step} ==" in done.stdout


def test_steps_of_later_calls_are_added_and_each_call_answers_for_its_own(visit):
    done, steps, _ = visit("tests")
    assert (done.returncode, [step[:2] for step in steps]) == (1, [["tests", "3"]])
    done, steps, out = visit("parity", "bench-B")
    assert (done.returncode, [step[0] for step in steps]) == (0, ["tests", "parity", "bench-B"])
    assert f"--shape B --repeat 5 --json {out}/bench-B.json" in (out / "bench-B.log").read_text()


def test_no_speed_is_measured_where_the_numbers_are_not_those_of_fp64(visit):
    done, steps, out = visit("bench-B")
    assert (done.returncode, [step[:2] for step in steps]) == (1, [["bench-B", "6"]])
    assert f"bash scripts/gpu_visit.sh {out} parity" in (out / "bench-B.log").read_text()
    done, steps, _ = visit("parity", "bench-B", DIFFERS="1")
    assert [step[:2] for step in steps[1:]] == [["parity", "1"], ["bench-B", "6"]]
    done, steps, _ = visit("parity", "bench-B")
    assert [step[:2] for step in steps[3:]] == [["parity", "0"], ["bench-B", "0"]]


@pytest.mark.parametrize("step", ["tests", "sanitizer"])
def test_a_visit_without_pytest_names_the_set_up_before_any_step(visit, step):
    done, steps, _ = visit("facts", step, NO_PYTEST="1")
    assert (done.returncode, steps) == (2, [])
    assert "bash scripts/setup.sh --dev" in done.stderr
    done, steps, _ = visit("facts", NO_PYTEST="1")
    assert (done.returncode, [step[:2] for step in steps]) == (0, [["facts", "0"]])


def test_the_visit_writes_a_record_that_names_the_commit_of_a_copy(visit):
    done, _, out = visit("record", COMMIT="12ab")
    assert done.returncode == 0
    assert f"record_hardware.py --out {out}/hardware --commit 12ab\n" in (out / "record.log").read_text()


def test_a_missing_sanitizer_is_no_success(visit, tmp_path):
    (tmp_path / "compute-sanitizer").unlink()
    done, steps, out = visit("sanitizer", PATH="/usr/bin:/bin")
    assert (done.returncode, steps[0][1]) == (1, "5")
    assert "compute-sanitizer is not installed" in (out / "sanitizer.log").read_text()


def test_an_unknown_step_is_a_failure_that_says_where_the_steps_are(visit):
    done, steps, out = visit("bnech-A")
    assert (done.returncode, steps[0][1]) == (1, "2")
    assert "unknown step 'bnech-A'" in (out / "bnech-A.log").read_text()
