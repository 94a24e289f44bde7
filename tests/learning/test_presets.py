"""A small model learns a small task under every preset, with two updates a step, so that ratios are not all 1."""

from pathlib import Path

import pytest

from hwgrpo.config.shipped_files import preset_names
from tests.support.runs import runs

pytestmark = pytest.mark.slow

RUN = (
    "model.path=builtin://tiny?task=sort&hidden=64&layers=2&head=32&steps=60&batch=64&digits=3",
    "data.train=task://sort?digits=3",
    "trainer.strategy=single",
    "trainer.max_steps=30",
    "trainer.prompts_per_step=32",
    "trainer.prompts_per_update=16",
    "trainer.validate_every=0",
    "rollout.n=8",
    "optim.lr=2e-3",
    "optim.eps=1e-2",
    "observe.progress=none",
    "algorithm.kl.coef=0.01",
    "reward.functions=[exact_match]",  # max_rl wants no negative ones
)


@pytest.mark.parametrize("preset", preset_names())
def test_a_small_model_learns_under_a_preset(preset: str, tmp_path: Path):
    def train() -> None:
        runs.run(tmp_path / "run", *RUN, f"algorithm.preset={preset}")

    assert runs.forked(train) == 0
    lines = [line for line in runs.metrics(tmp_path / "run") if "critic/rewards/mean" in line]
    rewards = [line.get("filter_groups/reward", line["critic/rewards/mean"]) for line in lines]  # of all samples
    assert len(rewards) == 30
    # 256 samples a step: a mean of five steps is known to 0.015
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
