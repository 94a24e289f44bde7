"""The rollout engine's log-probs as the old ones: the ratio is against them, and the gap is still measured."""

import math
from types import SimpleNamespace

import pytest
import torch

from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.config.schema import AlgorithmConfig, CorrectionConfig, LossConfig
from hwgrpo.errors import ConfigError
from hwgrpo.training.update.train_batch import with_rollout_shares
from hwgrpo.values import Completions, TrainBatch
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


def interpolated(step: int, versions: list[int], trained: list[bool]) -> torch.Tensor | None:
    """Return the rollout's shares of responses of one token each."""
    count, nothing = len(versions), torch.zeros(0, dtype=torch.int64)
    completions = Completions(
        prompt_index=torch.zeros(count, dtype=torch.int64),
        tokens=torch.zeros(count, dtype=torch.int64),
        offsets=torch.arange(count + 1),
        logprobs=torch.zeros(count),
        finished=torch.ones(count, dtype=torch.bool),
        texts=("",) * count,
        weight_version=versions[0],
        versions=torch.tensor(versions) if len(set(versions)) > 1 else None,
    )
    batch = TrainBatch(nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    return with_rollout_shares(batch, completions, torch.tensor(trained), step).rollout_shares


def test_the_old_policy_is_between_the_engines_and_the_current_one_by_the_age_of_a_token():
    shares = interpolated(2, [0], [True])
    assert shares is not None
    # the numbers of AReaL's own tests: versions 0 of 2, and 0 and 2 of 4
    rollout, current = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.5, -3.5])
    assert current.lerp(rollout, shares[0]).tolist() == [-1.25, -2.25, -3.25]
    assert interpolated(4, [0, 2], [True, True]).tolist() == [0.25, 0.5]  # type: ignore[union-attr]
    assert interpolated(4, [0, 3, 2], [True, False, True]).tolist() == [0.25, 0.5]  # type: ignore[union-attr]
    assert interpolated(4, [3], [True]).tolist() == [1.0], "fresh ones are the engine's"  # type: ignore[union-attr]


def test_the_ratio_moves_with_the_current_policy_and_the_correction_is_of_the_rest_of_the_gap():
    correction = CorrectionConfig("token_truncate", high=10.0)
    algorithm = AlgorithmConfig(loss=LossConfig(clip_high=9.0), correction=correction, old_logprobs="interpolated")
    loss = build_loss(algorithm)
    assert loss.needs_rollout
    logprob = torch.tensor([-1.0], requires_grad=True)
    rows = {
        "advantage": torch.ones(1),
        "weight": torch.ones(1),
        "rollout_logprob": torch.tensor([-1.8]),
        "rollout_share": torch.tensor([0.25]),
        "old_logprob": torch.tensor([-5.0]),  # as a KL in the reward leaves it: not what the ratio is against
    }
    value, metrics = loss(SimpleNamespace(logprob=logprob, entropy=None, cu_seqlens=None), rows)
    old = -1.0 * 0.75 - 1.8 * 0.25
    ratio, weight = math.exp(-1.0 - old), math.exp(old + 1.8)
    assert float(value.detach()) == pytest.approx(-ratio * weight)
    value.sum().backward()
    assert float(logprob.grad) == pytest.approx(-ratio * weight), "the old log-prob has no gradient"  # type: ignore[arg-type]
    assert float(metrics["ratio"]) == pytest.approx(ratio)


def test_a_stale_run_has_ratios_without_a_pass_for_old_logprobs(tmp_path):
    words = ("algorithm.old_logprobs=interpolated", "algorithm.correction.name=token_truncate")

    def train() -> None:
        torch.set_num_threads(1)
        runs.run(tmp_path / "run", *RUN, *words, "trainer.prompts_per_update=2")

    assert runs.forked(train) == 0
    steps = [line for line in runs.metrics(tmp_path / "run") if "actor/loss" in line]
    assert steps[2]["rollout/staleness_max"] == 1
    # half of the gap, with several updates also what these moved
    assert steps[2]["actor/ppo_kl"] == pytest.approx(steps[2]["rollout_corr/kl"] / 2, rel=0.5)
    with pytest.raises(ConfigError, match=r"algorithm.correction.name, e.g. token_truncate"):
        runs.small(tmp_path, *RUN, "algorithm.old_logprobs=interpolated")
