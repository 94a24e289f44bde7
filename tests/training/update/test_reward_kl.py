"""The KL in the reward: which responses lose how much of their reward, before advantages are computed."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwgrpo.algorithms.coefficients import initial_coefficients
from hwgrpo.algorithms.token_advantages import check_token_level
from hwgrpo.config import load_config
from hwgrpo.errors import ConfigError
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.ragged import offsets_of
from hwgrpo.training.update.advantage_inputs import advantage_inputs
from hwgrpo.values import Completions, Rewards, TrainBatch
from tests.support.runs import runs

OLD = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.0])
REF = torch.tensor([-1.5, -1.0, -0.5, -4.0, -2.5])
KL = ("algorithm.kl.coef=0.1", "algorithm.kl.in_reward=true", "algorithm.kl.estimator=k1")
ADAPTED = ("algorithm.kl.target=0.1", "algorithm.kl.horizon=10", "trainer.prompts_per_step=2", "rollout.n=2")


def penalized(*words: str, loss_mask: torch.Tensor | None = None) -> tuple[Any, Any]:
    """Return the penalty of four responses of 2, 3 (invalid), 0 and 3 tokens, and the coefficients after it."""
    config = load_config("tiny_sort", [*KL, *words])
    lengths, valid = torch.tensor([2, 3, 0, 3]), torch.tensor([True, False, True, True])
    reference = SimpleNamespace(policy="reference", active=nullcontext)
    update = SimpleNamespace(
        config=config,
        coefficients=initial_coefficients(config.algorithm),
        strategy=SimpleNamespace(sum=lambda values: values, gather_objects=lambda value: [value]),
        score=lambda batch, policy=None, square_sums=None: REF if policy == "reference" else OLD,
        needs_old_logprobs=True,
    )
    completions = Completions(
        prompt_index=torch.tensor([0, 0, 1, 1]),
        tokens=torch.arange(8),
        offsets=offsets_of(lengths),
        logprobs=torch.tensor([0.0, 0.0, 9.0, 9.0, 9.0, 0.0, 0.0, 0.0]),
        finished=valid,
        texts=("",) * 4,
        loss_mask=loss_mask,
    )
    prompts: Any = SimpleNamespace(prompts=[SimpleNamespace(token_ids=[i], images=None) for i in (1, 2)])
    rewards: Any = rewards_of(torch.tensor([1.0, 7.0, 0.5, 0.0], dtype=torch.float64), valid)
    found = advantage_inputs(update, reference, prompts, completions, rewards, Stopwatch())  # type: ignore[arg-type]
    return found, update.coefficients


def rewards_of(total: torch.Tensor, valid: torch.Tensor) -> Any:
    return Rewards(total=total, valid=valid, per_function={"r": total})


def test_each_valid_response_loses_its_summed_kl():
    found, coefficients = penalized(*ADAPTED)
    # k1 of the tokens: 0.5, -1 | 0, 1, 1.5
    assert found.rewards.total.tolist() == pytest.approx([1.0 + 0.05, 7.0, 0.5, 0.0 - 0.25])
    assert found.rewards.per_function["r"].tolist() == [1.0, 7.0, 0.5, 0.0], "the functions' own stay"
    mean = (-0.25 + 0.0 + 2.5 / 3) / 3
    assert found.metrics == pytest.approx(
        {
            "actor/reward_kl_penalty": mean,
            "actor/reward_kl_penalty_coeff": 0.1,
            "critic/rewards/mean": 1.3 / 3,
            "critic/rewards/max": 1.05,
            "critic/rewards/min": -0.25,
        }
    )
    assert coefficients.kl == pytest.approx(0.1 * (1 + 0.2 * 3 / 10)), "three responses, and above the target by half"
    assert coefficients.kl_loss == 0
    of_tokens = [0.05, -0.1, 0, 0, 0, 0, 0.1, 0.15]
    assert found.kl_R.tolist() == pytest.approx(of_tokens), "0 where the response is invalid"


def test_old_log_probs_of_the_trained_responses_are_kept():
    found, _ = penalized()
    batch: Any = found.add_old_logprobs(_empty(), torch.tensor([False, False, True, True]), torch.tensor([2, 3, 0, 3]))
    assert batch.old_logprobs.tolist() == OLD[2:].tolist()


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "remax"])
def test_a_loss_of_sequences_is_refused_where_tokens_have_the_kl_from_themselves_on(name: str):
    words = (f"algorithm.advantage.name={name}", "algorithm.loss.name=gmpo")
    with pytest.raises(
        ConfigError, match=f"name='{name}' with algorithm.kl.in_reward=true has one advantage per token"
    ):
        check_token_level(load_config("tiny_sort", [*KL, *words]).algorithm)
    check_token_level(load_config("tiny_sort", words).algorithm)


def test_with_the_engines_log_probs_as_old_ones_the_kl_is_of_those():
    found, _ = penalized("algorithm.old_logprobs=rollout")
    assert found.rewards.total.tolist() == pytest.approx([1.0 - 0.25, 7.0, 0.5, 0.0 - 0.7])


def test_tokens_that_were_not_sampled_have_no_kl():
    mask = torch.tensor([True, False, True, True, True, False, True, True])
    found, _ = penalized("algorithm.old_logprobs=rollout", loss_mask=mask)
    assert found.rewards.total.tolist() == pytest.approx([1.0 - 0.15, 7.0, 0.5, 0.0 - 0.65])
    assert not found.kl_R[~mask].any()


def _empty() -> Any:
    nothing = torch.zeros(0)
    return TrainBatch(nothing, nothing, nothing, nothing, nothing, nothing, nothing)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("algorithm.advantage.name=gdpo",), "in_reward=true with algorithm.advantage.name='gdpo'.*compares reward"),
        (("algorithm.advantage.name=max_rl",), "in_reward=true with algorithm.advantage.name='max_rl'.*negative"),
        (("algorithm.advantage.name=online_rft",), "with algorithm.advantage.name='online_rft'.*threshold"),
        (("algorithm.advantage.name=process",), "in_reward=true with algorithm.advantage.name='process'.*steps"),
        (("algorithm.advantage.name=optimal_token_baseline",), "with.*'optimal_token_baseline'.*rewards to go"),
        (("algorithm.kl.times_ratio=true",), "algorithm.kl.times_ratio.*in_reward=false"),
        (("algorithm.kl.coef=0", "algorithm.kl.estimator=k3"), "algorithm.kl.in_reward.*algorithm.kl.coef above 0"),
        (("algorithm.kl.horizon=5",), "algorithm.kl.horizon.*algorithm.kl.target"),
    ],
)
def test_what_has_no_meaning_with_it_is_refused(words: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        load_config("tiny_sort", [*KL, *words])


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("model.lora.rank=4", "trainer.prompts_per_update=2"),
        ("algorithm.advantage.name=reinforce_plus_plus",),
        ("algorithm.advantage.name=remax",),
    ],
    ids=["full", "lora", "reinforce_plus_plus", "remax"],
)
def test_a_run_compares_rewards_less_the_kl(tmp_path: Path, words: tuple[str, ...]):
    def train() -> None:
        torch.set_num_threads(1)
        common = ("trainer.max_steps=4", "trainer.validate_every=0", "optim.lr=1e-2", *words)
        runs.run(tmp_path / "run", *KL, "algorithm.kl.coef=2", *common)
        runs.run(tmp_path / "free", *common)

    assert runs.forked(train) == 0
    steps, free = ([line for line in runs.metrics(tmp_path / name) if "actor/loss" in line] for name in ("run", "free"))
    assert steps[0]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-5), "the policy is the reference at first"
    assert any(abs(line["actor/reward_kl_penalty"]) > 1e-3 for line in steps[1:])
    for line in steps[1:]:
        assert line["critic/score/mean"] != line["critic/rewards/mean"]
        assert "kl" not in line
    assert [line["actor/grad_norm"] for line in steps[1:]] != [line["actor/grad_norm"] for line in free[1:]]
