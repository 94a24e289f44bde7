"""Stages of a step: what the settings insert, their order, and stages of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hwgrpo.config import load_config
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.training.loop import train
from hwgrpo.training.setup import build_run
from tests.support.runs import runs

OWN = """
class Halved:
    slot, timed = "score", "reward"

    def __init__(self, run):
        self.steps = []

    def __call__(self, state):
        self.steps.append(state.step)
        state.metrics["seen"] = float(len(self.steps))
        state.rewards.total.mul_(0.5)


class Exits:
    slot = "observe"

    def __init__(self, run):
        pass

    def __call__(self, state):
        assert "critic/rewards/mean" in state.metrics, "after the metrics, before the report"
        raise SystemExit(3)


class Nowhere:
    slot = "scores"


class Broken:
    slot = "sync"

    def __init__(self, run):
        run.nothing_of_this_name
"""
CORE = [
    *("Collect", "Score", "TakeRewards", "Advantages", "MakeBatch", "OldLogprobs", "RefLogprobs"),
    *("Update", "Guard", "SendWeights", "SampleMetrics", "Report"),
]


REPLACED = {"ScoreBefore": "TakeRewards", "SendProbedWeights": "SendWeights"}
"""Stage -> the one whose place it takes."""


def stages_of(tmp_path: Path, *overrides: str) -> list[str]:
    """Return the names of a run's stages, in their order."""
    run = build_run(runs.small(tmp_path / "run", "algorithm.kl.coef=0", *overrides), runs.BACKEND, 0, 1)
    try:
        return [type(stage).__name__ for slot in vars(run.stages).values() for stage in slot.stages]
    finally:
        run.close()


@pytest.mark.parametrize(
    ("overrides", "inserted"),
    [
        ((), {}),
        (("reward.shuffle=true",), {"ShuffleRewards": "Score"}),
        (("algorithm.preset=remax",), {"GreedyResponses": "Collect", "GreedyRewards": "Score"}),
        (("rollout.final_temperature=0.5",), {"SetTemperature": "Collect"}),
        (("algorithm.mask_truncated=true",), {"MaskTruncated": "Advantages"}),
        (("data.difficulty.easy_threshold=0.9",), {"ReportDifficulty": "Score"}),
        (
            ("algorithm.kl.coef=0.1", "algorithm.kl.in_reward=true", "algorithm.kl.estimator=k1"),
            {"ScoreBefore": "Score"},
        ),
        (
            ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate"),
            {"ReportProbe": "Collect", "SendProbedWeights": "Guard"},
        ),
        (("algorithm.kl.coef=0.1", "algorithm.kl.sync_every=2"), {"MoveReference": "Guard"}),
        (("observe.metrics=[code]",), {"MeasureCustom": "SampleMetrics"}),
        (("trainer.capture_steps=[2]",), {"BeginCapture": "RefLogprobs", "EndCapture": "Update"}),
        (
            (
                *("rollout.max_staleness=1", "rollout.probe_every=0", "trainer.prompts_per_update=2"),
                *("algorithm.old_logprobs=interpolated", "algorithm.correction.name=token_truncate"),
            ),
            {"RolloutShares": "MakeBatch"},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_feature_inserts_its_stages_and_no_other_has_a_place(
    overrides: tuple[str, ...], inserted: dict[str, str], tmp_path: Path
):
    expected = [name for name in CORE if name not in [REPLACED.get(other) for other in inserted]]
    for name, before in inserted.items():
        expected.insert(expected.index(before) + 1, name)
    assert stages_of(tmp_path, *overrides) == expected


def own(tmp_path: Path, name: str, *overrides: str) -> Any:
    (tmp_path / "own.py").write_text(OWN)
    stage = f"trainer.stages=[{tmp_path / 'own.py'}:{name}]"
    return runs.small(tmp_path / "run", stage, "trainer.max_steps=2", "trainer.validate_every=0", *overrides)


def test_a_stage_of_ones_own_changes_the_step_and_keeps_its_state(tmp_path: Path):
    run = build_run(own(tmp_path, "Halved"), runs.BACKEND, 0, 1)
    train(run)
    run.close()
    steps = [line for line in runs.metrics(tmp_path / "run") if "seen" in line]
    assert [line["seen"] for line in steps] == [1, 2]
    assert all(line["critic/rewards/max"] <= 0.5 for line in steps)
    assert any((tmp_path / "run").rglob("*-own.py")), "the run keeps a copy of the code"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nowhere", r"slot.*'scores'.*score"),
        ("Broken", r"trainer\.stages=.*Broken.*nothing_of_this_name"),
        ("Missing", r"no function 'Missing'.*Halved"),
    ],
)
def test_a_stage_that_cannot_be_made_is_refused(name: str, message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        build_run(own(tmp_path, name), runs.BACKEND, 0, 1)


def test_a_stage_that_exits_is_an_error_of_the_run(tmp_path: Path):
    run = build_run(own(tmp_path, "Exits"), runs.BACKEND, 0, 1)
    with pytest.raises(RunError, match=r"trainer\.stages=.*Exits.*SystemExit"):
        train(run)
    run.close()


def test_a_name_without_a_file_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.stages.*path/to/file\.py"):
        load_config("tiny_sort", ["trainer.stages=[shuffle]"])
