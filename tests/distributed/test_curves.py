"""The tiny recipe trains to the same curve, whatever the strategy; benchmarks/curves.py has all of it, for a reader."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.numbers.rounding import GENTLE, assert_metrics_close, drift
from tests.support.processes.deepspeed_package import with_deepspeed
from tests.support.processes.launch import ROOT
from tests.support.runs import runs

STEPS = 8
WAYS = {
    "ddp": ["trainer.strategy=ddp"],
    "fsdp2": ["trainer.strategy=fsdp2"],
    "layers cut": ["trainer.strategy=fsdp2", "trainer.tensor_parallel_size=2"],
    **{f"zero-{n}": ["trainer.strategy=deepspeed", f"trainer.deepspeed.stage={n}"] for n in (1, 2, 3)},
}
WORDS = (
    "model.dtype=float32",
    f"trainer.max_steps={STEPS}",
    "trainer.prompts_per_step=32",
    "trainer.save_every=0",
    "data.validation_max_rows=8",
    "observe.loggers=[jsonl]",
    "observe.progress=none",
    *GENTLE,
)
Curve = list[dict[str, Any]]
pytestmark = pytest.mark.slow


def trained(folder: Path, ranks: int, ways: dict[str, list[str]]) -> dict[str, Curve]:
    """Return the metrics of the steps of each way, on processes that are started once."""
    each = [["tiny_sort", *WORDS, *words, f"trainer.output_dir={folder / way}"] for way, words in ways.items()]
    done = with_deepspeed(ranks, str(ROOT / "tests/support/runs/train_worker.py"), "gloo", json.dumps(each))
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return {way: [line for line in runs.metrics(folder / way) if "reward" in line] for way in ways}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return trained(tmp_path_factory.mktemp("one"), 1, {"single": ["trainer.strategy=single"]})["single"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Curve]:
    return trained(tmp_path_factory.mktemp("two"), 2, WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_draw_the_curve_of_one(way: str, alone: Curve, shared: dict[str, Curve]):
    assert len(alone) == STEPS
    rewards = [line["reward"] for line in alone]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2, "a curve that does not rise compares nothing"
    for step, (ours, theirs) in enumerate(zip(shared[way], alone, strict=True), start=1):
        for name in ("reward", "response_length/mean"):
            assert ours[name] == theirs[name], (step, name, "some responses are others")
    names = ("step", "actor/loss", "actor/kl_loss", "entropy", "actor/grad_norm")
    ours, theirs = ([{name: line[name] for name in names} for line in curve] for curve in (shared[way], alone))
    assert_metrics_close(ours, theirs, drift(STEPS))
