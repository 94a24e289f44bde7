"""The rollout engine's log-probs as the old ones: the ratio is against them, and the gap is still measured."""

import pytest
import torch

from tests.support.runs import runs

RUN = (
    "model.path=builtin://tiny?task=sort&hidden=64&layers=2&head=32&steps=30&batch=32&digits=3",
    "trainer.max_steps=3",
    "trainer.validate_every=0",
    "rollout.max_staleness=1",  # so that the engine's log-probs differ from the trainer's
)


def test_the_ratio_is_against_what_the_engine_reported(tmp_path):
    def train() -> None:
        torch.set_num_threads(1)
        runs.run(tmp_path / "run", *RUN, "algorithm.old_logprobs=rollout")
        runs.run(tmp_path / "plain", *RUN, "algorithm.correction.name=token_truncate")

    assert runs.forked(train) == 0
    steps, plain = (
        [line for line in runs.metrics(tmp_path / name) if "actor/loss" in line] for name in ("run", "plain")
    )
    assert len(steps) == 3
    stale, as_stale = steps[1], plain[1]  # of weights that are the same in both runs: those before the first update
    assert stale["rollout/staleness_max"] == 1
    assert abs(stale["rollout_corr/kl"]) > 1e-3
    # both are means of roll - lp, one over trained tokens and one over those that are measured
    assert stale["actor/ppo_kl"] == pytest.approx(stale["rollout_corr/kl"], rel=0.5)
    assert "actor/ppo_kl" not in as_stale
