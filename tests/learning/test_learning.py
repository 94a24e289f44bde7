"""The shipped recipe teaches sorting to prompts it never saw, and learns nothing from shuffled rewards."""

from pathlib import Path

import pytest
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.config import load_config
from hwgrpo.data.tasks import parse_task
from hwgrpo.training.finish import finish
from hwgrpo.training.loop import train
from hwgrpo.training.setup import build_run
from tests.support.runs import runs

GREEDY, SAMPLED = "val-core/task://sort/reward/greedy", "val-core/task://sort/reward/mean@4"


def accuracies(output: Path, seed: int, *overrides: str) -> list[tuple[float, float]]:
    """Train the recipe; return (greedy, sampled) accuracy on all held-out prompts, before and after."""
    every = (
        f"model.path=builtin://tiny?task=sort&seed={seed}",
        f"trainer.seed={seed}",
        f"trainer.output_dir={output}",
        "trainer.save_every=0",
        "data.validation_max_rows=0",
        "observe.loggers=[jsonl]",
        "observe.progress=none",
        *overrides,
    )

    def run() -> None:
        parts = build_run(load_config("tiny_sort", every), BACKEND, 0, 1)
        finish(parts, train(parts))

    assert runs.forked(run) == 0
    return [(line[GREEDY], line[SAMPLED]) for line in runs.metrics(output) if GREEDY in line]


def test_held_out_prompts_were_in_neither_warm_start_nor_training():
    splits = {name: {row["prompt"] for row in rows} for name, rows in parse_task("task://sort").splits.items()}
    assert len(splits["validation"]) == 1000
    assert not splits["validation"] & (splits["warm"] | splits["train"])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_recipe_learns_to_sort(seed: int, tmp_path: Path):
    (greedy_before, sampled_before), (greedy_after, sampled_after) = accuracies(tmp_path / "run", seed)
    assert greedy_before < 0.5
    assert sampled_before < 0.35
    assert greedy_after > 0.95
    assert sampled_after > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_shuffled_rewards_teach_nothing(seed: int, tmp_path: Path):
    """In half the recipe's steps, after which the rewards as they are have taught the task."""
    before, after = accuracies(tmp_path / "run", seed, "reward.shuffle=true", "trainer.max_steps=50")
    assert max(abs(later - earlier) for earlier, later in zip(before, after, strict=True)) < 0.05
