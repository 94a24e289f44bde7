"""What an update selects of its tokens does not depend on ranks: two processes train as one does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import ranks
from tests.support.runs import runs

RUN = (
    "model.path=builtin://tiny?task=sort&hidden=64&layers=2&head=32&steps=30&batch=32&digits=3",
    "trainer.max_steps=2",
    "trainer.prompts_per_step=8",
    "trainer.prompts_per_update=4",
    "trainer.validate_every=0",
    "optim.eps=1e-2",
    "algorithm.kl.coef=0",
    "observe.progress=none",
)
WAYS = {
    "clip_cov": ("algorithm.loss.name=clip_cov", "algorithm.loss.kwargs={share: 0.05, low: 0.01, high: 9.0}"),
    "kl_cov": ("algorithm.loss.name=kl_cov", "algorithm.loss.kwargs={share: 0.2, coef: 1.0}"),
    "normalized": (
        "algorithm.correction.name=sequence_truncate",
        "algorithm.correction.normalize=true",
        "rollout.dtype=bfloat16",
        "rollout.guard=off",
    ),
    "entropy": ("algorithm.top_entropy_share=0.3", "algorithm.m2po_threshold=0.001"),
}


def train(folder: Path, processes: int, *words: str) -> list[dict[str, Any]]:
    def body(rank: int) -> None:
        torch.set_num_threads(1)
        runs.run(folder / "run", *RUN, f"trainer.strategy={'ddp' if processes > 1 else 'single'}", *words)

    assert ranks.forked(processes, body) == [0] * processes
    return [line for line in runs.metrics(folder / "run") if "actor/loss" in line]


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_select_what_one_does(way: str, tmp_path: Path):
    alone, both = (train(tmp_path / str(n), n, *WAYS[way]) for n in (1, 2))
    shares = [name for name in alone[0] if name.startswith("actor/") and name.endswith("_tokens")]
    assert len(shares) == {"entropy": 2, "normalized": 0}.get(way, 1)
    for one, two in zip(alone, both, strict=True):
        for name in shares:
            assert 0 < one[name] <= 1
            assert two[name] == pytest.approx(one[name], abs=1e-6)
        assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-3)
