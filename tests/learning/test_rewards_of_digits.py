"""Rewards of steps teach a task whose outcome is never right by chance, and so teaches nothing."""

from pathlib import Path
from typing import Any

import torch

from tests.support.runs import digit_rewards, runs

REWARDS = digit_rewards.__file__
TASK = (
    "model.path=builtin://tiny?task=sort&hidden=32&layers=1&steps=60&batch=32&digits=6",
    "data.train=task://sort?digits=6",
    "rollout.max_response_tokens=6",
    "rollout.n=16",
    "trainer.prompts_per_step=16",
    "trainer.max_steps=50",
    "trainer.validate_every=0",
    "trainer.validate_at_start=false",
    "trainer.save_every=0",
    "optim.lr=2e-3",
)


def steps_of(folder: Path, *words: str) -> list[dict[str, Any]]:
    def train() -> None:
        torch.set_num_threads(1)
        runs.run(folder, *TASK, *words)

    assert runs.forked(train) == 0
    return [line for line in runs.metrics(folder) if "reward" in line]


def test_rewards_of_digits_teach_what_the_reward_of_all_digits_does_not(tmp_path: Path):
    by_step = steps_of(
        tmp_path / "process",
        "algorithm.advantage.name=process",
        f"algorithm.process.function={REWARDS}:characters",
        f"reward.functions=[{REWARDS}:digits]",
    )
    by_outcome = steps_of(
        tmp_path / "grpo",
        f"reward.functions=[{REWARDS}:all_digits,{{name: '{REWARDS}:sum_of_digits', weight: 0}}]",
    )

    def mean(lines: list[dict[str, Any]], name: str) -> float:
        return sum(line[f"rewards/{name}/mean"] for line in lines) / len(lines)

    before, after = mean(by_step[:5], "digits"), mean(by_step[-5:], "digits")
    assert before < 0.8
    assert after > before + 0.8
    assert sum(line["reward"] for line in by_outcome) / len(by_outcome) < 1e-3
    assert abs(mean(by_outcome[-5:], "sum_of_digits") - mean(by_outcome[:5], "sum_of_digits")) < 0.2
