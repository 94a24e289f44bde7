"""The KL in the reward and its adapted coefficient do not depend on ranks: two processes train as one does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import ranks
from tests.support.runs import runs

RUN = (
    "trainer.max_steps=3",
    "trainer.prompts_per_update=2",
    "trainer.validate_every=0",
    "optim.eps=1e-2",
    "optim.lr=1e-2",
    "algorithm.kl.coef=1",
    "algorithm.kl.in_reward=true",
    "algorithm.kl.estimator=k1",
    "algorithm.kl.target=1e-4",
    "algorithm.kl.horizon=50",
)


def train(folder: Path, strategy: str, *words: str) -> list[dict[str, Any]]:
    def body(rank: int) -> None:
        torch.set_num_threads(1)
        runs.run(folder / "run", *RUN, f"trainer.strategy={strategy}", *words)

    count = 1 if strategy == "single" else 2
    assert ranks.forked(count, body) == [0] * count
    return [line for line in runs.metrics(folder / "run") if "actor/loss" in line]


@pytest.mark.parametrize(
    ("strategy", "words"),
    [("ddp", ()), ("fsdp2", ("model.lora.rank=4",)), ("ddp", ("algorithm.advantage.name=reinforce_plus_plus",))],
    ids=["ddp", "fsdp2", "whitened over tokens"],
)
def test_two_ranks_take_the_kl_that_one_does(strategy: str, words: tuple[str, ...], tmp_path: Path):
    alone, both = (train(tmp_path / each, each, *words) for each in ("single", strategy))
    assert abs(alone[1]["actor/reward_kl_penalty"]) > 1e-4
    for one, two in zip(alone[:2], both[:2], strict=True):
        for name in ("actor/reward_kl_penalty", "critic/rewards/mean", "critic/rewards/max", "critic/rewards/min"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5)
        assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-3)
    coefficients = [line["actor/reward_kl_penalty_coeff"] for line in alone]
    assert len(set(coefficients)) == 3
    assert [line["actor/reward_kl_penalty_coeff"] for line in both] == pytest.approx(coefficients, rel=1e-5)
