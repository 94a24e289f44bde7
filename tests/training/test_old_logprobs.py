"""The rollout engine's log-probs as the old ones: the ratio is against them, and the gap is still measured."""

import pytest
import torch

from tests.support.runs import runs

RUN = (
    "model.path=builtin://tiny?task=sort&hidden=64&layers=2&head=32&steps=30&batch=32&digits=3",
    "trainer.max_steps=2",
    "trainer.validate_every=0",
    "rollout.top_k=3",  # so that the engine's log-probs differ from the trainer's
    "algorithm.correction.name=none",
)


def test_the_ratio_is_against_what_the_engine_reported(tmp_path):
    def train() -> None:
        torch.set_num_threads(1)
        runs.run(tmp_path / "run", *RUN, "algorithm.old_logprobs=rollout")
        runs.run(tmp_path / "plain", *RUN)

    assert runs.forked(train) == 0
    steps, plain = (
        [line for line in runs.metrics(tmp_path / name) if "actor/loss" in line] for name in ("run", "plain")
    )
    assert len(steps) == 2
    first = steps[0]
    assert first["actor/ppo_kl"] > 0.01
    # both are means of roll - lp, one over trained tokens and one over those that are measured
    assert first["actor/ppo_kl"] == pytest.approx(first["rollout_corr/kl"], rel=0.5)
    assert first["rollout_corr/kl"] == pytest.approx(plain[0]["rollout_corr/kl"], rel=1e-4)
    assert "actor/ppo_kl" not in plain[0]
