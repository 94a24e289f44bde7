"""scripts/record_hardware.py writes down what it ran, how that ended and on what; and nothing that nobody can find."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hwgrpo.doctor import hardware
from tests.support.processes.launch import variables
from tests.support.processes.preloaded_programs import programs

REPO = Path(__file__).parents[2]
COMMIT = "0123456789abcdef" * 2 + "01234567"
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 500,
    "tie_word_embeddings": True, "max_position_embeddings": 128,
}  # fmt: skip


AS_PYTHON = (
    "import runpy, sys; _, sys.executable, *sys.argv = sys.argv; runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Runs a script to which another program is Python."""


@pytest.fixture
def record(tmp_path: Path):
    """Runs the script in a copy of this repository that is no git checkout; returns its result and the records.

    What it starts is forked from a process that has imported the project: a record has up to eight processes.
    """
    copy = tmp_path / "copy"
    (copy / "scripts").mkdir(parents=True)
    shutil.copy(REPO / "scripts/record_hardware.py", copy / "scripts")
    for name in ("hwgrpo", "backends", "kernels", "configs"):
        (copy / name).symlink_to(REPO / name)
    (tmp_path / "Small.json").write_text(json.dumps(SHAPE))
    tools = tmp_path / "tools"
    tools.mkdir()

    def run(*words: str, instead: str = ""):
        started = tmp_path / "python"
        started.write_text(
            f'#!/bin/sh\n{instead}\nPYTHONPATH={variables()["PYTHONPATH"]} exec {tools / "python"} "$@"\n'
        )
        started.chmod(0o755)
        script = copy / "scripts/record_hardware.py"
        command = [sys.executable, "-c", AS_PYTHON, str(started), str(script), "--backend", "cpu"]
        command += ["--shape", str(tmp_path / "Small.json"), "--out", str(tmp_path / "out"), *words]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        return done, [json.loads(file.read_text()) for file in (tmp_path / "out").glob("*.json")]

    run.copy = copy  # pyright: ignore[reportFunctionMemberAccess]
    with programs(tools, {"python": ()}):
        yield run


def instead_of(command: str, printed: str, code: int) -> str:
    """Return lines of a shell with which `python -m hwgrpo COMMAND` prints a text and ends with a code."""
    text = f"printf %s {shlex.quote(printed)}; exit {code}"
    return f'case "$*" in *--run*) ;; "-m hwgrpo {command} "*) {text} ;; esac'


@pytest.mark.slow
def test_a_run_is_written_down_with_its_outcome_and_figures(record):
    done, [document] = record("--parts", "doctor,shaped", "--commit", COMMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert hardware.problems(document) == []
    assert (document["backend"], document["commit"], document["devices"]) == ("cpu", COMMIT, 1)
    assert document["versions"]["torch"]
    *compared, doctor, shaped = document["what"]
    assert [(each["name"], each["outcome"]) for each in compared] == 2 * [("parity", "passed")]
    assert 0 < compared[0]["figures"]["largest_share"] < 1
    assert shaped["figures"]["tokens_per_s"] > 0
    assert (doctor["name"], doctor["outcome"], doctor["figures"]["fail"]) == ("doctor --run", "passed", 0)
    assert doctor["figures"]["pass"] > 5
    assert (shaped["name"], shaped["outcome"], shaped["figures"]["steps"]) == ("Small-shaped", "passed", 5)
    assert shaped["command"].startswith("hwgrpo train tiny_sort backend.name=cpu model.path=FOLDER/model ")
    assert shaped["figures"]["last_grad_norm"] > 0


DIFFERS = json.dumps({"passed": False, "comparisons": [{"stages": [{"error": 2.0, "tolerance": 1.0}]}]})


@pytest.mark.slow
def test_a_part_that_fails_is_written_down_as_failed_and_no_speed_without_parity(record):
    settings = ("trainer.max_steps=1", "optim.lr=1e-12", "data.validation_max_rows=16")
    words = ("--parts", "tiny_sort,shaped", "--commit", COMMIT, *(f"--set={each}" for each in settings))
    done, [document] = record(*words, instead=instead_of("parity", DIFFERS, 1))
    assert done.returncode == 1
    *compared, tiny_sort, shaped = [(each["name"], each["outcome"]) for each in document["what"]]
    assert compared == 2 * [("parity", "failed")]
    assert tiny_sort == ("tiny_sort", "failed"), "at this learning rate nothing is learnt"
    assert shaped == ("Small-shaped", "passed")
    assert not any("tokens_per_s" in each["figures"] for each in document["what"])


@pytest.mark.parametrize(
    "words, said",
    [
        ((), "pass the commit of this copy"),
        (("--commit", "main"), "pass the commit of this copy"),
        (
            ("--commit", COMMIT, "--parts", "doctor,speed"),
            "unknown part speed; use parity, doctor, kernels, tiny_sort",
        ),
        (("--commit", COMMIT, "--backend", "cuda"), "hwgrpo detect --backend cuda --probe` prints the reason"),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_the_remedy(record, words, said):
    done, documents = record(*words)
    assert (done.returncode, documents) == (2, [])
    assert said in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("printed, said", [("", "nothing"), ("[1]\n{}\n", "[1]\n{}"), ("out of order", "out of order")])
def test_a_diagnosis_that_reports_nothing_ends_it_before_anything_is_run(record, printed, said):
    done, documents = record("--parts", "doctor", "--commit", COMMIT, instead=instead_of("doctor", printed, 3))
    assert (done.returncode, documents) == (2, [])
    assert f"`hwgrpo doctor --json` printed no report (exit code 3):\n{said}\n" in done.stderr
    assert "doctor --run" not in done.stdout


def test_a_checkout_with_changes_is_refused(record):
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, "-C", str(record.copy), *words], check=True, capture_output=True)

    git("init", "-q")
    git("add", "scripts")
    git("commit", "-q", "-m", "all")
    with (record.copy / "scripts/record_hardware.py").open("a") as file:
        file.write("# changed\n")
    done, documents = record("--parts", "doctor")
    assert (done.returncode, documents) == (2, [])
    assert "files differ from commit" in done.stderr
    assert "scripts/record_hardware.py" in done.stderr
