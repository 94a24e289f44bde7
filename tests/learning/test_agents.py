"""The recipe of the calculator teaches to call it, which few of the untrained model's greedy turns do."""

from pathlib import Path

from hwgrpo_backends.cpu import BACKEND

from hwgrpo.config import load_config
from hwgrpo.training.finish import finish
from hwgrpo.training.loop import train
from hwgrpo.training.setup import build_run
from tests.support.runs import runs

GREEDY = "val-core/task://calculator/reward/greedy"


def test_a_tiny_model_learns_to_call_the_calculator(tmp_path: Path):
    words = ("trainer.max_steps=20", "trainer.save_every=0", "data.validation_max_rows=64", "trainer.validation_n=0")
    output = [f"trainer.output_dir={tmp_path}/run", "observe.loggers=[jsonl]", "observe.progress=none"]

    def run() -> None:
        parts = build_run(load_config("tiny_calculator", [*words, *output]), BACKEND, 0, 1)
        finish(parts, train(parts))

    assert runs.forked(run) == 0
    lines = list(runs.metrics(tmp_path / "run"))
    before, after = (line[GREEDY] for line in lines if GREEDY in line)
    assert before < 0.4
    assert after > 0.9
    calls = [line["tools/calculator/calls"] for line in lines if "tools/calculator/calls" in line]
    assert calls[-1] > 1.5 * calls[0]
