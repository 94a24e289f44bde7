"""`hwgrpo reward-model` from the shell: the commands of docs/train-reward-model.md, and mistakes."""

import re
import shlex

import pytest

from hwgrpo.support.jsonlines import read_lines
from tests.docs.pages import page
from tests.support.runs.reward_model_runs import outcomes, pairs

RUN, PAIRS = re.findall(r"^```bash\n(.*?)^```$", page("train-reward-model.md"), flags=re.DOTALL | re.MULTILINE)
QUIET = "observe.log_every=100"


@pytest.mark.slow
def test_a_policy_is_trained_with_a_reward_model_of_another_runs_responses(hwgrpo, tmp_path):
    """As on the page, with smaller and fewer steps of GRPO; the last half of its rewards is above the first."""
    sampled, trained, scored, report = (shlex.split(line)[1:] for line in RUN.splitlines())
    fewer = "trainer.validate_at_start=false", "data.validation_max_rows=1", "trainer.prompts_per_step=16"
    for command in ([*sampled, *fewer], trained, [*scored, *fewer, "trainer.max_steps=16"]):
        done = hwgrpo(*command, QUIET)
        assert done.returncode == 0, done.stderr
    lines = list(read_lines(tmp_path / "runs/sampled-reward-model/metrics.jsonl"))
    assert sum(each["reward_model/accuracy"] for each in lines[-10:]) / 10 > 0.7
    rewards = [each["reward"] for each in read_lines(tmp_path / "runs/scored/metrics.jsonl") if "reward" in each]
    assert sum(rewards[-8:]) > sum(rewards[:8])
    done = hwgrpo(*report)
    assert done.returncode == 0, done.stderr
    assert "loss" in (tmp_path / "runs/sampled-reward-model/report.html").read_text()


@pytest.mark.slow
def test_pairs_are_trained_as_on_the_page(hwgrpo, tmp_path):
    pairs(tmp_path / "pairs.jsonl", 500)
    pairs(tmp_path / "held_out.jsonl", 50, held_out=True)
    done = hwgrpo(*shlex.split(PAIRS)[1:], QUIET)
    assert done.returncode == 0, done.stderr
    assert "LOAD REPORT" not in done.stdout + done.stderr
    lines = list(read_lines(tmp_path / "runs/tiny_sort-reward-model/metrics.jsonl"))
    found = {each["step"]: each["val/accuracy"] for each in lines if "val/accuracy" in each}
    assert list(found) == [0, 20, 40, 60]
    assert found[60] > 0.75
    assert re.search(r"validation loss +0\.\d+ +0\.\d+ +-0\.\d+", done.stdout)
    done = hwgrpo("export", "runs/tiny_sort-reward-model", "exported")
    assert done.returncode == 0, done.stderr
    files = [tmp_path / folder / "model.safetensors" for folder in ("exported", "runs/tiny_sort-reward-model/final")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_dry_run_counts_examples_and_passes_and_settings_are_printed(hwgrpo, tmp_path):
    outcomes(tmp_path / "data.jsonl", 10)
    given = ("reward-model", "tiny_sort", "data.train=data.jsonl", "trainer.max_steps=5", "reward.functions=[]")
    done = hwgrpo(*given, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "data.jsonl: 10 examples" in done.stdout
    assert "5 steps of 64 responses: 32.00 passes over 10" in done.stdout
    assert "runs/tiny_sort-reward-model" in done.stdout
    assert not (tmp_path / "runs").exists()
    done = hwgrpo(*given, "--print-config")
    assert "loss: classification" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("reward-model",), 2, "name a recipe (hwgrpo reward-model RECIPE), or a run with --from-run RUN"),
        (("reward-model", "--from-run", "nowhere"), 2, "there is no nowhere/completions.jsonl"),
        (("reward-model", "tiny_sort", "reward_model.loss=bt"), 2, "reward_model.loss"),
        (("reward-model", "tiny_sort", "--dry-run"), 1, "no column 'reward' (reward_model.score_key)"),
        (("reward-model", "tiny_sort", "trainer.strategy=deepspeed", "--dry-run"), 2, "use single, ddp, fsdp2 or auto"),
    ],
)
def test_mistakes_are_explained(words, code, message, hwgrpo):
    done = hwgrpo(*words)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
