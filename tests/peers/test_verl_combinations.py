"""Settings of verl together, imported, train as verl's own functions do in verl's order of operations.

A step of verl: the KL leaves the token-level rewards, importance weights, advantages, then epochs of mini-batches, each
with the policy loss, the KL and the aggregation over the mini-batch. With `bypass_mode` the old log-probs are those of
the engine, and there are no weights (verl's v1 trainer).
"""

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.algorithms.kl import build_kl
from hwgrpo.algorithms.scope import sequence_sum
from hwgrpo.algorithms.token_advantages import check_token_level, is_token_level
from hwgrpo.catalog import ENGINES
from hwgrpo.config import Config
from hwgrpo.config.derived import prompts_per_update
from hwgrpo.errors import ConfigError
from hwgrpo.migrate.tables.verl_names import ROWS
from hwgrpo.rollout.local.token_sampling import filter_logits
from hwgrpo.training.update.train_batch import split_updates
from tests.migrate.verl_runs import config_of, imported
from tests.peers.peer_formulas import (
    verl_advantages,
    verl_core,
    verl_kl_penalty,
    verl_loss,
    verl_settings,
    verl_weights,
)
from tests.peers.test_formulas import CU, LENGTHS, MASK, SizedBatch, ours, tensors

pytestmark = pytest.mark.slow

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "algorithm.rollout_correction."
BATCH = ("data.train_batch_size=2", f"{ROLLOUT}n=3")
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
REWARDS = torch.tensor([1.0, 0.0, 0.3, 0.2, 0.7, 0.5], dtype=torch.float64)
GREEDY = torch.tensor([0.25, 0.6], dtype=torch.float64)[GROUPS]
IN_REWARD = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.2")
IN_LOSS = (f"{ACTOR}use_kl_loss=True", f"{ACTOR}kl_loss_coef=0.3")
OF_TOKENS = ("reinforce_plus_plus", "remax")
"""Estimators with rewards to go, which the KL in the reward makes one per token."""
FORCED = ("sapo", "geo_mean")
"""Losses with an aggregation of their own, which the KL has here, too."""


def mode(name: str, *more: str) -> tuple[str, ...]:
    return (f"{ACTOR}policy_loss.loss_mode={name}", *more)


AXES: dict[str, dict[str, tuple[str, ...]]] = {
    "estimator": {
        name: (f"algorithm.adv_estimator={name}",)
        for name, here in ROWS["algorithm.adv_estimator"].values.items()
        if here and name not in ("gdpo", "optimal_token_baseline")  # which read more than rewards
    },
    "KL": {
        "none": (),
        "loss": IN_LOSS,
        "reward": IN_REWARD,
        "reward, k3": (*IN_REWARD, "algorithm.kl_penalty=low_var_kl"),
    },
    "old log-probs": {"trainer": (), "bypass": (f"{CORRECTION}bypass_mode=True",)},
    "loss": {
        **{name: mode(name) for name in ("vanilla", "gspo", "sapo", "geo_mean", "gpg", "dppo_tv", "dppo_kl")},
        "cispo": mode("cispo", f"{ACTOR}clip_ratio_low=10", f"{ACTOR}clip_ratio_high=0.05"),
        "dro": mode("dro", f"{ACTOR}policy_loss.dro_beta=0.3"),
        "kl_cov": mode("kl_cov", f"{ACTOR}policy_loss.kl_cov_ratio=0.2"),
        "clip_cov": mode(
            "clip_cov", *(f"{ACTOR}policy_loss.clip_cov_{each}" for each in ("ratio=1", "lb=0.1", "ub=2"))
        ),
    },
    "weights": {
        "none": (),
        "tokens": (f"{CORRECTION}rollout_is=token", f"{CORRECTION}rollout_is_threshold=1.05"),
        "masked tokens": (f"{CORRECTION}rollout_is=token", f"{CORRECTION}rollout_is_threshold=0.9_1.1"),
        "sequences": (f"{CORRECTION}rollout_is=sequence", f"{CORRECTION}rollout_is_threshold=1.1"),
    },
    "aggregation": {
        name: (f"{ACTOR}loss_agg_mode={name}", f"{ACTOR}loss_scale_factor={9 if name.endswith('norm') else 'null'}")
        for name in ROWS[f"{ACTOR}loss_agg_mode"].values
    },
    "updates": {
        f"{epochs} x {2 // size}": (f"{ACTOR}ppo_epochs={epochs}", f"{ACTOR}ppo_mini_batch_size={size}")
        for epochs in (1, 2)
        for size in (1, 2)
    },
}  # fmt: skip
DEFAULTS = {"estimator": "grpo", "aggregation": "token-mean", "updates": "1 x 1", "old log-probs": "trainer"}
DEFAULTS |= {"KL": "none", "loss": "vanilla", "weights": "none"}


def combinations(size: int) -> list[dict[str, str]]:
    """Return the settings of all choices of `size` axes that leave the default; the other axes have theirs."""
    return [
        DEFAULTS | dict(zip(axes, values, strict=True))
        for axes in itertools.combinations(AXES, size)
        for values in itertools.product(*([v for v in AXES[axis] if v != DEFAULTS[axis]] for axis in axes))
    ]


def difference(combined: dict[str, str]) -> str:
    """Return "refused" or "noted" for settings that differ from verl's, which is said; "" for all others."""
    if combined["estimator"] in OF_TOKENS and combined["KL"].startswith("reward") and combined["loss"] == "geo_mean":
        return "refused"
    forced = combined["loss"] in FORCED and combined["aggregation"] != "seq-mean-token-mean"
    return "noted" if forced and combined["KL"] == "loss" else ""


PAIRS, TRIPLES = combinations(2), combinations(3)
DIFFERENT = [each for each in (*PAIRS, *TRIPLES) if difference(each)]
DRAWN = random.Random(0).sample(TRIPLES, len(TRIPLES) // 20)


class Update(NamedTuple):
    """What an update of a step computed."""

    loss: torch.Tensor
    gradient: torch.Tensor
    """[B, T], of the log-probs."""


def logprobs_at(given: dict[str, torch.Tensor], update: int) -> torch.Tensor:
    """Return the log-probs of the policy before an update, which moves away from the old ones."""
    return given["old_logprob"] + (given["logprob"] - given["old_logprob"]) * (update + 1) / 4


def of_verl(overrides: tuple[str, ...], given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[Update]]:
    """Return verl's advantages [B, T] and its updates."""
    settings = verl_settings(overrides)
    algorithm, actor, correction = settings.algorithm, settings.actor_rollout_ref.actor, None
    old = given["rollout_logprob" if algorithm.rollout_correction.bypass_mode else "old_logprob"]
    mask = MASK.double()
    scores = torch.zeros(MASK.shape, dtype=torch.float64)
    scores[torch.arange(len(LENGTHS)), LENGTHS - 1] = REWARDS
    batch: Any = {"token_level_scores": scores, "token_level_rewards": scores, "response_mask": mask}
    batch |= {"old_log_probs": old, "ref_log_prob": given["ref_logprob"]}
    batch |= {"reward_baselines": GREEDY} if algorithm.adv_estimator == "remax" else {}
    if algorithm.use_kl_in_reward:
        controller = verl_core().get_kl_controller(algorithm.kl_ctrl)
        batch = verl_kl_penalty()(SimpleNamespace(batch=SizedBatch(batch)), controller, algorithm.kl_penalty)[0].batch
    if not algorithm.rollout_correction.bypass_mode:
        correction, _ = verl_weights(algorithm.rollout_correction, old, given["rollout_logprob"], mask)
    advantages = verl_advantages(algorithm, batch, {"uid": GROUPS.numpy()})
    columns = {"entropy": given["entropy"], "old_log_probs": old, "ref_log_prob": given["ref_logprob"]}
    columns |= {"advantages": advantages, "response_mask": mask}
    columns |= {} if correction is None else {"rollout_is_weights": correction}
    rows = actor.ppo_mini_batch_size * settings.actor_rollout_ref.rollout.n
    updates = []
    for _ in range(actor.ppo_epochs):
        for part in torch.arange(len(LENGTHS)).split(rows):
            logprob = logprobs_at(given, len(updates)).requires_grad_()
            of_part = {name: column[part] for name, column in columns.items()}
            loss = verl_loss(actor, {"log_probs": logprob[part], **of_part})
            updates.append(Update(loss.detach(), torch.autograd.grad(loss, logprob)[0]))
    return advantages, updates


def of_ours(config: Config, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[Update]]:
    """Return our advantages [B, T] and updates."""
    algorithm = config.algorithm
    old = given["rollout_logprob" if algorithm.old_logprobs == "rollout" else "old_logprob"]
    rewards, kl_R = REWARDS, None
    if algorithm.kl.in_reward:
        kl_R = algorithm.kl.coef * build_kl(algorithm.kl)(old[MASK], given["ref_logprob"][MASK])
        rewards = REWARDS - sequence_sum(kl_R, CU)[0]
    valid = torch.ones(len(REWARDS), dtype=torch.bool)
    more = {"greedy_S": GREEDY, "kl_R": kl_R}
    found = group_advantages(rewards, GROUPS, valid, algorithm.advantage, LENGTHS, **more).double()
    advantages = torch.zeros(MASK.shape, dtype=torch.float64)
    per_token = is_token_level(algorithm.advantage, algorithm.kl.in_reward)
    advantages[MASK] = found if per_token else found.repeat_interleave(LENGTHS)
    step = given | {"old_logprob": old, "advantage": advantages}
    updates = []
    for _ in range(config.trainer.epochs_per_batch):
        order: Any = SimpleNamespace(prompt_index=GROUPS)
        for part in split_updates(order, config.trainer.prompts_per_step, prompts_per_update(config)):
            step["logprob"] = logprobs_at(given, len(updates))
            aggregation = algorithm.aggregation
            of_part = {name: column[part] for name, column in step.items()}
            length = aggregation.norm_length or 0
            loss, slope = ours(algorithm, of_part, aggregation.name, norm_length=length, lengths=LENGTHS[part])
            gradient = torch.zeros(MASK.shape, dtype=torch.float64)
            gradient[part] = slope
            updates.append(Update(loss, gradient))
    return advantages, updates


def compare(combined: dict[str, str], folder: Path) -> None:
    """Compare a step of verl with ours; where they differ, look for what says so.

    Raises:
        AssertionError: they differ, and nothing says so.
    """
    overrides = (*BATCH, *(each for axis, value in combined.items() for each in AXES[axis][value]))
    result = imported(*overrides)
    assert result.refused() == []
    config = config_of(result, folder)
    if difference(combined) == "refused":
        with pytest.raises(ConfigError, match="one advantage per token"):
            check_token_level(config.algorithm)
        return
    check_token_level(config.algorithm)
    if difference(combined) == "noted":
        assert "it aggregates KL and entropy by" in " ".join(each.note for each in result.entries)
        return
    given = tensors()
    expected, theirs = of_verl(overrides, given)
    found, updates = of_ours(config, given)
    torch.testing.assert_close(found, expected * MASK, rtol=1e-6, atol=1e-6)
    assert len(updates) == len(theirs)
    for mine, other in zip(updates, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=1e-6)
    assert max(float(each.gradient.abs().max()) for each in updates) > 1e-4


def described(combined: dict[str, str]) -> str:
    return ", ".join(f"{axis}: {value}" for axis, value in combined.items() if value != DEFAULTS[axis])


@pytest.mark.parametrize(
    "chosen",
    [PAIRS, DRAWN, DIFFERENT],
    ids=[
        f"all {len(PAIRS)} pairs",
        f"{len(DRAWN)} of {len(TRIPLES)} triples",
        f"the {len(DIFFERENT)} pairs and triples that differ",
    ],
)
def test_settings_together_are_those_of_verl_or_it_is_said(chosen: list[dict[str, str]], tmp_path: Path):
    failures = []
    for combined in chosen:
        try:
            compare(combined, tmp_path)
        except (AssertionError, ConfigError) as error:
            failures.append(f"{described(combined)}: {str(error).splitlines()[0]}")
    assert failures == [], f"{len(failures)} of {len(chosen)}"


@pytest.mark.parametrize("estimator", AXES["estimator"])
def test_advantages_without_rejected_tokens_are_noted(estimator: str):
    set_ = (f"{CORRECTION}rollout_rs=token_k1", f"{CORRECTION}rollout_rs_threshold=0.95_1.05")
    overrides = (*AXES["estimator"][estimator], *set_)
    settings, given, mask = verl_settings(overrides).algorithm, tensors(), MASK.double()
    _, kept = verl_weights(settings.rollout_correction, given["old_logprob"], given["rollout_logprob"], mask)
    last = torch.arange(len(LENGTHS)), LENGTHS - 1
    assert 0 < kept[last].sum() < len(LENGTHS)
    scores = torch.zeros(MASK.shape, dtype=torch.float64)
    scores[last] = REWARDS
    found = []
    for each in (mask, kept):
        batch = {"token_level_rewards": scores, "response_mask": each}
        batch |= {"reward_baselines": GREEDY} if estimator == "remax" else {}
        found.append(verl_advantages(settings, batch, {"uid": GROUPS.numpy()}) * kept)
    notes = " ".join(entry.note for entry in imported(*overrides).entries)
    assert ("leave rejected tokens out" in notes) == (not torch.allclose(*found))


VOCABULARY = 50
FILTERS = {"none": {}, "top_p": {"top_p": 0.7}, "top_k": {"top_k": 5}, "both": {"top_p": 0.7, "top_k": 5}}
MAY_BE = {"auto": ("local", "vllm"), "local": ("local",), "sglang_server": ("sglang_server",)}
"""Engine of an imported recipe -> what it may become."""


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("engine", ["vllm", "sglang", "hf"])
def test_log_probs_of_the_trainer_are_verls_or_the_import_says_so(engine: str, filters: str, tmp_path: Path):
    """verl's trainer never filters; ours filters as an engine that reports which tokens it dropped."""
    set_ = tuple(f"{ROLLOUT}{name}={value}" for name, value in FILTERS[filters].items())
    result = imported(f"{ROLLOUT}name={engine}", *set_)
    rollout = config_of(result, tmp_path).rollout
    logits = 3 * torch.randn(20, VOCABULARY, generator=torch.Generator().manual_seed(0))
    kept = filter_logits(logits, top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p)
    reports = any(ENGINES.load(each).reports_floors for each in MAY_BE[rollout.engine])
    likeliest = logits.argmax(-1, keepdim=True)
    verls, mine = (each.log_softmax(-1).gather(-1, likeliest) for each in (logits, kept if reports else logits))
    notes = [each.note for each in result.entries if each.key.startswith((f"{ROLLOUT}top_p", f"{ROLLOUT}top_k"))]
    said = [note for note in notes if "verl's trainer has log-probs over all tokens" in note]
    assert len(said) == (0 if torch.equal(verls, mine) else len(set_))
    assert torch.equal(verls, mine) == (engine == "sglang" or filters == "none")
