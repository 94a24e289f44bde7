"""Responses that reached the length limit can be left out of the update."""

from pathlib import Path

import torch

from tests.support.runs import runs

REWARD = """
def first_digit(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str[:1].isdigit() and int(solution_str[0]))
"""
RUN = (
    "model.path=builtin://tiny?task=sort&hidden=64&layers=2&head=32&steps=30&batch=32&digits=3",
    "trainer.max_steps=2",
    "trainer.validate_every=0",
    "algorithm.kl.coef=0",
)


def gradient_norms(folder: Path, *words: str) -> list[float]:
    def train() -> None:
        torch.set_num_threads(1)
        (folder / "reward.py").write_text(REWARD)
        runs.run(folder / "run", *RUN, f"reward.functions=[{folder}/reward.py:first_digit]", *words)

    folder.mkdir()
    assert runs.forked(train) == 0
    return [line["actor/grad_norm"] for line in runs.metrics(folder / "run") if "actor/grad_norm" in line]


def test_truncated_responses_are_left_out_of_the_update(tmp_path):
    short = "rollout.max_response_tokens=1"
    assert gradient_norms(tmp_path / "masked", short, "algorithm.mask_truncated=true") == [0.0, 0.0]
    assert min(gradient_norms(tmp_path / "plain", short)) > 0.01
