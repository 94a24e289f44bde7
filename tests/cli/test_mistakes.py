"""Slips on the command line, closed outputs and faults of the program: how the command ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hwgrpo.cli import config, main

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join(str(ROOT / folder) for folder in (".", "backends", "kernels"))
RUN = "from hwgrpo.__main__ import run\nfrom hwgrpo.cli import config, main\n"
PROJECT_URL = (
    'main.metadata.metadata = lambda name: __import__("email").message_from_string("Project-URL: Issues, {}")\n'
)


def process(code: str, *keys: str, **options) -> subprocess.Popen[str]:
    """Start the command as a process, with some of it replaced by `code`."""
    return subprocess.Popen(
        [sys.executable, "-c", f"{RUN}{code}\nrun()", "config", *keys],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": ""},
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["trian", "tiny_sort"], "Did you mean train?"),
        (["Config"], "Did you mean config?"),
        (["data", "gsm8"], "Did you mean gsm8k?"),
        (["nothing-like-it"], "'doctor', 'env')\n"),
        (["train", "tiny_sort", "--num_generations=4"], "num_generations=4; that is rollout.n here)"),
        (["train", "tiny_sort", "--rollout.n=4"], "(a setting is written without dashes: rollout.n=4)"),
    ],
)
def test_a_misspelt_command_is_answered_with_the_one_that_was_meant(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ending:
        main.main(words)
    assert ending.value.code == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("keys", [(), ("optim.lr",)], ids=["more than a buffer holds", "less"])
def test_a_reader_that_has_left_ends_the_command_quietly(keys: tuple[str, ...]):
    reading, writing = os.pipe()
    os.close(reading)
    running = process("", *keys, stdout=writing)
    os.close(writing)
    assert running.communicate(timeout=60)[1] == ""
    assert running.returncode == main.OUTPUT_CLOSED == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
@pytest.mark.parametrize(
    ("command", "unbuffered", "code"), [("config", "", 1), ("config", "1", 1), ("train", "", 0), ("sft", "", 3)]
)
def test_a_full_standard_output_is_said_in_one_line_and_a_finished_training_has_its_own_code(
    command: str, unbuffered: str, code: int
):
    program = f"{RUN}from hwgrpo.cli import sft, train\n"
    program += "train.run = lambda args: print('shown') or 0\nsft.run = lambda args: print('shown') or 3\nrun()"
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": unbuffered}
    for errors in (subprocess.PIPE, subprocess.STDOUT):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-c", program, command, *(["tiny_sort"] if command != "config" else [])],
                env=environment,
                stdout=full,
                stderr=errors,
                text=True,
                timeout=60,
                check=False,
            )
        assert done.returncode == code, done.stderr
        if done.stderr is not None:
            assert done.stderr == "hwgrpo: standard output could not be written: No space left on device\n"


def test_a_process_without_standard_output_does_its_work():
    running = process("import os, sys; sys.stdout = None")
    assert (running.communicate(timeout=60)[1], running.returncode) == ("", 0)


def test_another_broken_pipe_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    def broken(args):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(config, "run", broken)
    with pytest.raises(BrokenPipeError):
        main.main(["config"])


@pytest.mark.parametrize(
    ("code", "where"),
    [("", "report it with"), (PROJECT_URL.format("https://x.org/y"), "report it at https://x.org/y with")],
)
def test_a_fault_ends_in_its_traceback_and_a_line_on_where_to_report_it(code: str, where: str):
    running = process(f"{code}config.run = lambda args: [][0]", stdout=subprocess.PIPE)
    told = running.communicate(timeout=60)[1].splitlines()
    assert running.returncode == 1
    assert told[0] == "Traceback (most recent call last):"
    assert told[-2] == "IndexError: list index out of range"
    assert told[-1].startswith(f"hwgrpo: this is a bug in hwgrpo: {where}")
    assert told[-1].endswith("`hwgrpo doctor`")


def test_ctrl_c_ends_with_one_line(tmp_path: Path):
    running = process(f"config.run = lambda args: (open({str(tmp_path / 'on')!r}, 'w'), __import__('time').sleep(60))")
    while not (tmp_path / "on").exists():
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    assert (running.communicate(timeout=60)[1], running.returncode) == ("hwgrpo: interrupted\n", main.INTERRUPTED)
