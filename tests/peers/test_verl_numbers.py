"""verl's settings, imported, compute what verl's own functions compute with the same settings on the same tensors."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.algorithms.kl import build_kl
from hwgrpo.config import Config
from hwgrpo.data.sampler import PromptSampler
from hwgrpo.migrate.tables.verl_names import ROWS
from tests.migrate.verl_runs import config_of, imported
from tests.peers.peer_formulas import (
    trl_loss,
    verl_advantages,
    verl_core,
    verl_kl_penalty,
    verl_loss,
    verl_sampler,
    verl_settings,
    verl_weights,
)
from tests.peers.test_formulas import (
    COLUMNS,
    GROUPS,
    LENGTHS,
    MASK,
    REWARDS,
    SIZES,
    SizedBatch,
    T,
    assert_same,
    ours,
    tensors,
)

pytestmark = pytest.mark.slow

ACTOR = "actor_rollout_ref.actor."
KL = f"{ACTOR}use_kl_loss=True"
MEANS = f"{ACTOR}loss_agg_mode=seq-mean-token-mean"
CORRECTION = "algorithm.rollout_correction."
BIG_KL = (KL, f"{ACTOR}kl_loss_coef=0.3")


def imported_config(folder: Path, *overrides: str) -> Config:
    """Return what verl's overrides become here."""
    result = imported(*overrides)
    assert result.refused() == []
    return config_of(result, folder)


def theirs(overrides: tuple[str, ...], given: dict[str, torch.Tensor], logprob: torch.Tensor) -> torch.Tensor:
    """Return verl's loss."""
    all_settings = verl_settings(overrides)
    mask = MASK.double()
    batch = {
        "log_probs": logprob,
        "entropy": given["entropy"],
        "old_log_probs": given["old_logprob"],
        "ref_log_prob": given["ref_logprob"],
        "advantages": given["advantage"][:, None].expand(-1, T),
    }
    correction = all_settings.algorithm.rollout_correction
    weights, kept = verl_weights(correction, given["old_logprob"], given["rollout_logprob"], mask)
    batch |= {"response_mask": kept} | ({} if weights is None else {"rollout_is_weights": weights})
    return verl_loss(all_settings.actor_rollout_ref.actor, batch)


LOSSES = {
    "the defaults": (),
    "clip higher": (f"{ACTOR}clip_ratio_low=0.1", f"{ACTOR}clip_ratio_high=0.28"),
    "one clip": (f"{ACTOR}clip_ratio=0.05", f"{ACTOR}clip_ratio_low=null", f"{ACTOR}clip_ratio_high=null"),
    "a clip without effect": (f"{ACTOR}clip_ratio=0.05",),
    "dual clip": (f"{ACTOR}clip_ratio_c=1.1",),
    "entropy": (f"{ACTOR}entropy_coeff=0.3",),
    "gspo": (f"{ACTOR}policy_loss.loss_mode=gspo", f"{ACTOR}clip_ratio_low=0.03", f"{ACTOR}clip_ratio_high=0.04"),
    "gspo with a KL": (f"{ACTOR}policy_loss.loss_mode=gspo", MEANS, *BIG_KL, f"{ACTOR}entropy_coeff=0.3"),
    "sapo": (f"{ACTOR}policy_loss.loss_mode=sapo", f"{ACTOR}tau_pos=0.9", f"{ACTOR}tau_neg=1.2"),
    "geo_mean": (f"{ACTOR}policy_loss.loss_mode=geo_mean",),
    "gpg": (f"{ACTOR}policy_loss.loss_mode=gpg",),
    "cispo": (f"{ACTOR}policy_loss.loss_mode=cispo", f"{ACTOR}clip_ratio_high=0.28"),
    "cispo without a lower bound": (f"{ACTOR}policy_loss.loss_mode=cispo", f"{ACTOR}clip_ratio_low=10"),
    "gspo without a lower bound": (f"{ACTOR}policy_loss.loss_mode=gspo", f"{ACTOR}clip_ratio_low=10"),
    **{f"geo_mean, {name}": (f"{ACTOR}policy_loss.loss_mode=geo_mean", f"{CORRECTION}rollout_is={level}",
                             f"{CORRECTION}rollout_is_threshold={bounds}",
                             f"{CORRECTION}rollout_is_batch_normalize={normalizes}")
       for name, level, bounds, normalizes in [
           ("weights of tokens", "token", "1.05", False), ("masked tokens", "token", "0.9_1.1", False),
           ("weights of tokens with a mean of 1", "token", "1.05", True),
           ("weights of sequences", "sequence", "1.1", False), ("masked sequences", "sequence", "0.8_1.2", False)]},
    "clip_cov": (f"{ACTOR}policy_loss.loss_mode=clip_cov", f"{ACTOR}policy_loss.clip_cov_ratio=1.0",
                 f"{ACTOR}policy_loss.clip_cov_lb=0.2", f"{ACTOR}policy_loss.clip_cov_ub=0.8"),
    "kl_cov": (f"{ACTOR}policy_loss.loss_mode=kl_cov", f"{ACTOR}policy_loss.kl_cov_ratio=0.2",
               f"{ACTOR}policy_loss.ppo_kl_coef=0.7"),
    "dppo_tv": (f"{ACTOR}policy_loss.loss_mode=dppo_tv", f"{ACTOR}clip_ratio_c=1.3"),
    "dppo_kl": (f"{ACTOR}policy_loss.loss_mode=dppo_kl", f"{ACTOR}clip_ratio_low=0.02",
                f"{ACTOR}clip_ratio_high=0.05"),
    "dro": (f"{ACTOR}policy_loss.loss_mode=dro", f"{ACTOR}policy_loss.dro_beta=0.3"),
    **{mode: (f"{ACTOR}loss_agg_mode={mode}", KL, f"{ACTOR}entropy_coeff=0.1")
       for mode in ROWS[f"{ACTOR}loss_agg_mode"].values if not mode.endswith("norm")},
    "Dr. GRPO": (f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}loss_scale_factor=512", KL),
    **{f"the KL {kind}": (*BIG_KL, f"{ACTOR}kl_loss_type={kind}")
       for kind, here in ROWS[f"{ACTOR}kl_loss_type"].values.items() if here},
    "weights of tokens": (f"{CORRECTION}rollout_is=token", f"{CORRECTION}rollout_is_threshold=1.05"),
    "weights of sequences": (f"{CORRECTION}rollout_is=sequence", f"{CORRECTION}rollout_is_threshold=1.1"),
    "masked tokens": (f"{CORRECTION}rollout_is=token", f"{CORRECTION}rollout_is_threshold=0.9_1.1"),
    "masked sequences": (f"{CORRECTION}rollout_is=sequence", f"{CORRECTION}rollout_is_threshold=0.8_1.2"),
    "weights with a mean of 1": (f"{CORRECTION}rollout_is=token", f"{CORRECTION}rollout_is_threshold=1.05",
                                 f"{CORRECTION}rollout_is_batch_normalize=True"),
}  # fmt: skip


def test_every_loss_of_verl_that_maps_is_compared():
    modes = {name for name, here in ROWS[f"{ACTOR}policy_loss.loss_mode"].values.items() if here} - {"vanilla"}
    used = {each.partition("=")[2] for overrides in LOSSES.values() for each in overrides if "loss_mode=" in each}
    assert used == modes


@pytest.mark.parametrize("overrides", LOSSES.values(), ids=LOSSES)
def test_a_loss(overrides: tuple[str, ...], tmp_path: Path):
    config = imported_config(tmp_path, *overrides)
    given = tensors()
    logprob = given["logprob"].clone().requires_grad_()
    expected = theirs(overrides, given, logprob)
    algorithm = config.algorithm
    found = ours(algorithm, given, algorithm.aggregation.name, norm_length=algorithm.aggregation.norm_length or 0)
    gradient = assert_same(expected, logprob, found, atol=1e-6)
    assert gradient.abs().max() > 1e-4
    torch.testing.assert_close(found[1], gradient, rtol=1e-6, atol=1e-8)


def advantages_here(config: Config, **more: Any) -> torch.Tensor:
    valid = torch.ones(len(REWARDS), dtype=torch.bool)
    return group_advantages(REWARDS, GROUPS, valid, config.algorithm.advantage, SIZES, **more)


ESTIMATORS = [
    (name, std)
    for name, here in ROWS["algorithm.adv_estimator"].values.items()
    if here and name not in ("gdpo", "optimal_token_baseline")  # compared in test_formulas.py with their own tensors
    for std in (True, False)
]


@pytest.mark.parametrize(("name", "std"), ESTIMATORS)
def test_an_advantage(name: str, std: bool, tmp_path: Path):
    overrides = (f"algorithm.adv_estimator={name}", f"algorithm.norm_adv_by_std_in_grpo={std}")
    config = imported_config(tmp_path, *overrides)
    token_rewards = torch.zeros(COLUMNS.shape, dtype=torch.float64)
    token_rewards[torch.arange(len(SIZES)), SIZES - 1] = REWARDS
    greedy = torch.tensor([0.25, 1.0, 0.0, 0.5, 0.75], dtype=torch.float64)[GROUPS]
    batch: dict[str, Any] = {"token_level_rewards": token_rewards, "response_mask": COLUMNS.double()}
    more: dict[str, Any] = {}
    if name == "remax":
        batch["reward_baselines"], more["greedy_S"] = greedy, greedy
    expected = verl_advantages(verl_settings(overrides).algorithm, batch, {"uid": GROUPS.numpy()})
    found = advantages_here(config, **more).double()
    signal = torch.ones(len(REWARDS), dtype=torch.bool)
    if name == "reinforce_plus_plus_baseline":
        signal = GROUPS != 2  # whose equal rewards give exactly 0 here
    torch.testing.assert_close(found[signal], expected[signal, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo"])
def test_the_advantage_of_a_group_of_one(name: str, tmp_path: Path):
    """One response is left of a group whose others failed, or `rollout.n` is 1."""
    overrides = (f"algorithm.adv_estimator={name}",)
    config = imported_config(tmp_path, *overrides)
    rewards, alone, sizes = REWARDS[:3], torch.arange(3), SIZES[:3]
    token_rewards = torch.zeros(3, COLUMNS.shape[1], dtype=torch.float64)
    token_rewards[alone, sizes - 1] = rewards
    batch = {"token_level_rewards": token_rewards, "response_mask": COLUMNS[:3].double()}
    expected = verl_advantages(verl_settings(overrides).algorithm, batch, {"uid": alone.numpy()})
    valid = torch.ones(3, dtype=torch.bool)
    found = group_advantages(rewards, alone, valid, config.algorithm.advantage, sizes)
    torch.testing.assert_close(found.double(), expected[:, 0], rtol=1e-6, atol=1e-6)


KINDS = [kind for kind, here in ROWS["algorithm.kl_penalty"].values.items() if here]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("control", ["fixed", "adaptive"])
def test_the_kl_in_the_reward(kind: str, control: str, tmp_path: Path):
    given = tensors()
    overrides = ("algorithm.use_kl_in_reward=True", f"algorithm.kl_penalty={kind}", f"algorithm.kl_ctrl.type={control}")
    config = imported_config(tmp_path, *overrides, "algorithm.kl_ctrl.kl_coef=0.3", "algorithm.kl_ctrl.horizon=5000")
    scores = torch.zeros(MASK.shape, dtype=torch.float64)
    scores[torch.arange(len(LENGTHS)), LENGTHS - 1] = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 0.2], dtype=torch.float64)
    batch: Any = {"response_mask": MASK.double(), "token_level_scores": scores}
    batch |= {"old_log_probs": given["old_logprob"], "ref_log_prob": given["ref_logprob"]}
    settings = verl_settings([*overrides, "algorithm.kl_ctrl.kl_coef=0.3", "algorithm.kl_ctrl.horizon=5000"]).algorithm
    controller = verl_core().get_kl_controller(settings.kl_ctrl)
    expected, _ = verl_kl_penalty()(SimpleNamespace(batch=SizedBatch(batch)), controller, settings.kl_penalty)
    kl = config.algorithm.kl
    assert kl.in_reward
    kl_R = build_kl(kl)(given["old_logprob"][MASK], given["ref_logprob"][MASK])
    spread = torch.zeros(MASK.shape, dtype=torch.float64)
    spread[MASK] = kl_R
    rewards = scores.sum(-1) - kl.coef * spread.sum(-1)
    torch.testing.assert_close(rewards, expected.batch["token_level_rewards"].sum(-1), rtol=1e-6, atol=1e-6)
    assert (kl.target, kl.horizon) == ((0.1, 5000) if control == "adaptive" else (None, kl.horizon))


@pytest.mark.parametrize("bound", [1.3, 1.6])
def test_dual_clip_of_verl_is_delta_of_trl(bound: float):
    """Where the bound is above `1 + clip_high`, one bounds the loss of negative advantages, the other the ratio."""
    given = tensors()
    logprob = given["logprob"].clone().requires_grad_()
    of_verl = theirs((f"{ACTOR}clip_ratio_c={bound}",), given, logprob)
    inputs = {"completion_mask": MASK.to(torch.int64), "advantages": given["advantage"]}
    inputs["old_per_token_logps"] = given["old_logprob"]
    of_trl = trl_loss(logprob, given["entropy"], inputs, delta=bound)
    found = torch.autograd.grad(of_verl, logprob)[0], torch.autograd.grad(of_trl, logprob)[0]
    torch.testing.assert_close(of_verl, of_trl, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)
    ratio, advantage = (logprob - given["old_logprob"]).exp(), given["advantage"][:, None]
    assert ((ratio > bound) & (advantage < 0) & MASK).any(), "the bound acts"


def test_rejected_tokens_are_out_of_verls_mean_and_in_ours(tmp_path: Path):
    overrides = (f"{CORRECTION}rollout_rs=token_k1", f"{CORRECTION}rollout_rs_threshold=0.9_1.1")
    config, given = imported_config(tmp_path, *overrides), tensors()
    logprob = given["logprob"].clone().requires_grad_()
    expected = theirs(overrides, given, logprob)
    (gradient,) = torch.autograd.grad(expected, logprob)
    loss, found = ours(config.algorithm, given, "token-mean")
    correction = verl_settings(overrides).algorithm.rollout_correction
    _, kept = verl_weights(correction, given["old_logprob"], given["rollout_logprob"], MASK.double())
    share = float(kept.sum() / MASK.sum())
    assert 0 < share < 1
    torch.testing.assert_close(loss, expected.detach() * share, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found, gradient * share, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_gives_another_order_of_prompts(seed: int):
    of_verl = [*verl_sampler(verl_settings((f"data.seed={seed}",)).data, range(20))]
    here = [row for _, row in PromptSampler(20, seed).take(20)]
    assert sorted(of_verl) == sorted(here) == [*range(20)]
    assert of_verl != here
