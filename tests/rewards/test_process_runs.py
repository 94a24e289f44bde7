"""Whole runs with a reward that hangs: they go on, count it, and leave no process behind."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.cli.main import main
from hwgrpo.config.load import to_yaml
from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.planning.dry_run import make_plan
from hwgrpo.training.evaluate import build_evaluation
from tests.support.runs import runs

SOMETIMES = """
import os, time
calls = []

def hangs_once_a_step(solution_str, ground_truth):
    calls.append(1)
    if not os.path.exists(f"{FOLDER}/armed"):
        return 0.5
    if {WHEN}:
        while True: pass
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / len(ground_truth)
"""


@pytest.fixture
def function(reward_file, tmp_path):
    """Return a function: settings -> an entry of reward.functions whose 6th call in each process hangs."""
    source = SOMETIMES.replace("{FOLDER}", str(tmp_path)).replace("{WHEN}", "len(calls) == 6")
    path = reward_file(source)
    (tmp_path / "armed").touch()

    def entry(**settings):
        return f"reward.functions=[{json.dumps({'name': f'{path}:hangs_once_a_step', **settings})}]"

    return entry


@pytest.mark.parametrize(
    ("policy", "aborted"),
    [
        ("value", 0.0),
        pytest.param("mask_sample", 2 / 16, marks=pytest.mark.slow),
        pytest.param("drop_group", 8 / 16, marks=pytest.mark.slow),
    ],
)
def test_a_run_in_which_samples_hang_goes_on_and_counts_them(policy, aborted, function, tmp_path, processes, soon):
    # 16 samples a step: the 6th and the 12th of the first step hang (a new process begins to count anew)
    settings = function(timeout=1.0, on_timeout=policy)
    assert runs.run(tmp_path / "run", settings, "trainer.max_steps=2", "trainer.validate_at_start=false") == "completed"
    first, second = runs.metrics(tmp_path / "run")[:2]
    assert first["reward_failures/timeouts/hangs_once_a_step"] == 2
    assert second["reward_failures/timeouts/hangs_once_a_step"] >= 2
    assert first["response/aborted_ratio"] == pytest.approx(aborted)
    assert 0 <= first["reward"] <= 1
    soon(lambda: processes() == [])


def test_under_raise_the_run_stops_with_the_sample_and_the_remedy(function, tmp_path, processes, soon):
    said = r"reward hangs_once_a_step, .*, sample \d of its group took longer than its timeout of 1 s at .*:10 and was"
    with pytest.raises(RewardError, match=said):
        runs.run(tmp_path / "run", function(timeout=1.0))
    soon(lambda: processes() == [])


def test_the_numbers_of_a_run_are_the_same_with_and_without_processes(function, tmp_path):
    (tmp_path / "armed").unlink()
    for name, settings in (("here", {}), ("there", {"timeout": 100.0}), ("three", {"workers": 3})):
        runs.run(tmp_path / name, function(**settings), "trainer.max_steps=2")
    here = runs.everything(tmp_path / "here")
    assert runs.everything(tmp_path / "there") == here
    assert runs.everything(tmp_path / "three") == here


@contextmanager
def command(*words, cwd):
    """Run the hwgrpo command in a process of its own; kill it where the test fails before it ends."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-m", "hwgrpo", *words]
    with subprocess.Popen(
        words, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            yield run
        finally:
            run.kill()


def recipe(tmp_path, function):
    """Write the small run as a recipe; return what is to be said on the command line."""
    (tmp_path / "recipe.yaml").write_text("{}\n")
    small = [word for word in runs.SMALL if not word.startswith("reward.")]
    return ["train", "recipe.yaml", *small, function, f"trainer.output_dir={tmp_path}/run"]


@pytest.mark.slow
def test_a_user_is_told_which_sample_hung_and_the_run_ends_well(function, tmp_path, processes, soon):
    words = recipe(tmp_path, function(timeout=1.0, on_timeout="mask_sample"))
    words = [*words, "trainer.max_steps=1", "observe.progress=auto"]
    with command(*words, cwd=tmp_path) as run:
        shown, _ = run.communicate()
    print(shown)
    assert run.returncode == 0, shown
    flat = " ".join(shown.split())
    assert "reward timeouts/hangs_once_a_step: 2 samples in step 1 (reward hangs_once_a_step, " in flat
    assert "took longer than its timeout of 1 s at" in flat
    soon(lambda: processes() == [])


def test_a_user_whose_run_stops_is_told_why_in_one_line(function, tmp_path, processes, soon):
    with command(*recipe(tmp_path, function(timeout=1.0)), cwd=tmp_path) as run:
        shown, _ = run.communicate()
    print(shown)
    assert run.returncode == 1
    assert "Traceback" not in shown
    assert "took longer than its timeout of 1 s" in " ".join(shown.split())
    soon(lambda: processes() == [])


@pytest.mark.slow
def test_a_run_that_is_killed_while_a_sample_hangs_leaves_no_process(function, tmp_path, processes, soon):
    words = recipe(tmp_path, function(timeout=3.0, on_timeout="mask_sample"))
    with command(*words, "trainer.max_steps=500", cwd=tmp_path) as run:
        soon(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
        soon(lambda: len(processes()) >= 2)  # between two samples that hang there is none but the run's own
        run.send_signal(signal.SIGKILL)
        run.communicate()
    soon(lambda: processes() == [])


def test_a_dry_run_tells_of_a_reward_that_hangs(function, tmp_path, reward_file, processes, soon):
    reward_file("import time\ndef hangs_once_a_step(solution_str): time.sleep(600)")
    with pytest.raises(ConfigError, match="took longer than its timeout of 1 s at"):
        make_plan(runs.small(tmp_path / "run", function(timeout=1.0)), BACKEND, 1)
    told = make_plan(runs.small(tmp_path / "run", function(timeout=1.0, on_timeout="mask_sample")), BACKEND, 1).text
    assert "hangs_once_a_step fails, which would not stop the run: reward hangs_once_a_step" in told
    assert "took longer than its timeout of 1 s at" in told
    assert "mend it" not in told
    soon(lambda: processes() == [])


def test_inspecting_data_with_a_recipe_tells_of_a_reward_that_hangs(
    function, reward_file, tmp_path, processes, soon, capsys
):
    reward_file("def hangs_once_a_step(solution_str, ground_truth):\n    while '3' in ground_truth: pass\n    return 1")
    rows = [{"prompt": "a", "answer": "12"}, {"prompt": "b", "answer": "34"}, {"prompt": "c", "answer": "56"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = runs.small(
        tmp_path / "run",
        function(timeout=1.0),
        f"data.train={tmp_path}/train.jsonl",
        "data.validation_max_rows=256",
        "trainer.validation_n=4",
    )
    (tmp_path / "recipe.yaml").write_text(to_yaml(config))
    words = ["data", "inspect", f"{tmp_path}/train.jsonl", "--recipe", f"{tmp_path}/recipe.yaml", "--json"]
    assert main(words) == 1
    (bad,) = json.loads(capsys.readouterr().out)["files"][0]["bad"]
    assert "line 2" in str(bad)
    assert "took longer than its timeout of 1 s" in str(bad)
    soon(lambda: processes() == [])


def test_measuring_a_model_goes_on_after_a_reward_that_hangs(function, tmp_path, processes, soon):
    settings = function(timeout=1.0, on_timeout="mask_sample")
    evaluation = build_evaluation(
        runs.small(tmp_path / "run", settings, "data.validation=task://sort?digits=3"), BACKEND, 0
    )
    with evaluation.rewards:
        assert evaluation.greedy().rewards.isnan().any()
        assert not evaluation.greedy().rewards.isnan().all()
    soon(lambda: processes() == [])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"on_timeout": "mask_sample"},
            r"0.on_timeout='mask_sample' has no effect with reward.functions.0.timeout=null; set",
        ),
        ({"timeout": 0}, r"reward.functions.0.timeout=0.* is out of range; allowed: 0 < x <= 1e\+07"),
        (
            {"timeout": 1, "on_timeout": "skip"},
            "on_timeout='skip' is not known; choose one of: drop_group, mask",
        ),
        ({"workers": -1}, "workers=-1 is out of range"),
        ({"timeuot": 1}, "timeuot.* Did you mean .*timeout"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_loaded(settings, said, function, tmp_path):
    with pytest.raises(ConfigError, match=said):
        runs.small(tmp_path / "run", function(**settings))
