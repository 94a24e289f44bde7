"""The code that a run calls is kept in its folder, and a resumed run says what has changed."""

from pathlib import Path

import pytest

from hwgrpo.cli.main import main

REWARD = "def score(completions, **_):\n    return [float(len(text)) for text in completions]\n"
LOGGER = """
class Nothing:
    def __init__(self, run_dir): pass
    def log(self, step, values): pass
    def cut_back(self, step): pass
    def close(self): pass
"""


def train(steps: int) -> int:
    own = ("reward.functions=[rewards.py:score]", "observe.loggers=[jsonl,loggers.py:Nothing]")
    small = ("trainer.prompts_per_step=2", "rollout.n=2", "trainer.validate_at_start=false", "optim.schedule=constant")
    where = ("backend.name=cpu", "observe.progress=plain", "trainer.output_dir=run", f"trainer.max_steps={steps}")
    return main(["train", "tiny_sort", *own, *small, *where])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "loggers.py").write_text(LOGGER)
    assert train(1) == 0
    return tmp_path / "run"


def test_copies_are_kept_and_a_changed_reward_is_reported_when_the_run_goes_on(run: Path, capsys):
    kept = {path.name[13:]: path.read_text() for path in (run / "code").iterdir()}
    assert kept == {"rewards.py": REWARD, "loggers.py": LOGGER}
    for name in kept:
        file = run.parent / name
        file.write_text(file.read_text() + "# mended\n")
    capsys.readouterr()
    assert train(2) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "warning: the file of reward.functions.0.name has changed since the checkpoint: sha256" in shown
    assert "observe.loggers" not in shown, "which changes no weights"
    assert len([*(run / "code").iterdir()]) == 4


def test_a_finished_run_whose_reward_has_changed_is_no_finished_run(run: Path, capsys):
    assert train(1) == 0
    (run.parent / "rewards.py").write_text(REWARD + "# mended\n")
    assert train(1) == 2
    assert "the file of reward.functions.0.name has changed since" in " ".join(capsys.readouterr().err.split())
