"""`hwgrpo sft` from the shell: the commands of docs/sft.md, and mistakes."""

import json
import re

import pytest

from tests.docs.pages import page

[COMMANDS] = re.findall(r"^```bash\n(.*?)^```$", page("sft.md"), flags=re.DOTALL | re.MULTILINE)
QUIET = "observe.log_every=100"


def test_a_model_without_skill_learns_by_sft_then_by_grpo_then_from_its_own_responses(hwgrpo, tmp_path):
    """As on the page, with fewer steps of GRPO."""
    words = [line.replace('"', "").split()[1:] for line in COMMANDS.splitlines()]
    sft, train, own, report = words
    done = hwgrpo(*sft, QUIET)
    assert done.returncode == 0, done.stderr
    assert re.search(r"validation loss +4\.\d+ +0\.[01]\d+ +-4\.\d+", done.stdout)
    done = hwgrpo(*train, QUIET, "trainer.max_steps=50")
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.findall(r"sampled \(mean of 4\) +([\d.]+) +([\d.]+)", done.stdout)[0])
    assert 0.2 < before < after - 0.05
    done = hwgrpo(*own, QUIET)
    assert done.returncode == 0, done.stderr
    note = r"(\d+) of 800 logged responses are trained \(data.keep=correct\); that run logged 16 of 512 responses"
    kept = re.search(note, done.stdout)
    assert kept, done.stdout
    logged = [json.loads(line) for line in (tmp_path / "runs/sorted/completions.jsonl").read_text().splitlines()]
    correct = {(each["prompt"], each["response"]) for each in logged if each["reward"] > 0.5}
    assert int(kept[1]) == len(correct)
    done = hwgrpo(*report)
    assert done.returncode == 0, done.stderr
    assert "Validation loss fell from" in (tmp_path / "runs/tiny_sort-sft/report.html").read_text()


def test_a_dry_run_counts_examples_and_passes(hwgrpo, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "sort 1=", "response": "1"}\n' * 10)
    done = hwgrpo(
        "sft", "tiny_sort", "data.train=data.jsonl", "trainer.max_steps=5", "reward.functions=[]", "--dry-run"
    )
    assert done.returncode == 0, done.stderr
    assert "data.jsonl: 10 examples, longest prompt 7 tokens" in done.stdout
    assert "5 steps of 64 examples: 32.00 passes over 10" in done.stdout
    assert "runs/tiny_sort-sft" in done.stdout
    assert re.search(r"^memory     about [\d.]+ MiB per device at the most:$", done.stdout, flags=re.MULTILINE)
    assert "optimizer states (AdamW)" in done.stdout
    assert not re.search("rollout: |reference|copy that samples", done.stdout)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("dpo", "tiny_sort"), 2, "hwgrpo has no DPO: train preference pairs with TRL's DPOTrainer"),
        (("sft",), 2, "name a recipe (hwgrpo sft RECIPE), or a run with --from-run RUN"),
        (("sft", "tiny_sort", "--keep", "correct"), 2, "--keep is for --from-run; for files set data.keep"),
        (("sft", "--from-run", "nowhere"), 2, "there is no nowhere/completions.jsonl"),
        (("sft", "tiny_sort", "data.train=task://sort", "optim.lr=-1"), 2, "optim.lr=-1"),
    ],
)
def test_mistakes_are_explained(words, code, message, hwgrpo):
    done = hwgrpo(*words)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
