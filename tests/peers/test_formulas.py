"""Losses and advantages give what verl's and TRL's own functions give on the same tensors, with their gradients."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.algorithms.aggregation import token_weights
from hwgrpo.algorithms.coefficients import Coefficients, adapt_kl, initial_coefficients
from hwgrpo.algorithms.correction import correction_weights, normalized_weights
from hwgrpo.algorithms.kl import build_kl
from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.algorithms.scope import sequence_sum
from hwgrpo.algorithms.token_advantages import TokenProbs
from hwgrpo.algorithms.token_selection import UpdateTokens
from hwgrpo.config import load_config
from hwgrpo.config.schema import AdvantageConfig, AlgorithmConfig, CorrectionConfig, KlConfig, LossConfig
from tests.peers.peer_formulas import VerlActor, trl_loss, verl_core, verl_correction, verl_kl_penalty

pytestmark = pytest.mark.slow

LENGTHS = torch.tensor([5, 1, 7, 3, 2, 7])
T = int(LENGTHS.max())
MASK = torch.arange(T) < LENGTHS[:, None]
CU = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])


# Our weights are fp32, which 2e-7 covers, and verl adds 1e-8 to lengths.


def tensors(spread: float = 0.4) -> dict[str, torch.Tensor]:
    """Return [B, T] fp64 log-probs and the rest; padding holds numbers that must not be read."""
    g = torch.Generator().manual_seed(3)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(len(LENGTHS), T, generator=g, dtype=torch.float64)

    old = -2 * torch.rand(len(LENGTHS), T, generator=g, dtype=torch.float64) - 0.05
    found = {
        "old_logprob": old,
        "logprob": (old + noise(spread)).clamp(max=-0.01),
        "ref_logprob": old + noise(0.5),
        "rollout_logprob": old + noise(0.1),
        "entropy": torch.rand(len(LENGTHS), T, generator=g, dtype=torch.float64),
    }
    return found | {"advantage": torch.tensor([1.2, -0.7, 0.4, -1.5, 0.0, 0.9], dtype=torch.float64)}


def ours(
    algorithm: AlgorithmConfig,
    given: dict[str, torch.Tensor],
    aggregation: str,
    *,
    norm_length: int = 256,
    coefficients: Coefficients | None = None,
    lengths: torch.Tensor = LENGTHS,
    entropy_slope: float = 0.0,
    **count: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return our loss, and its gradient with respect to the log-probs [B, T], whose entropies have this slope."""
    mask = torch.arange(T) < lengths[:, None]
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    weights = token_weights(
        aggregation,
        lengths,
        total_tokens=int(mask.sum()),
        total_sequences=int((lengths > 0).sum()),
        norm_length=norm_length,
    ).double()
    rows = {name: values[mask] for name, values in given.items() if values.dim() == 2}
    if given["advantage"].dim() == 1:
        rows["advantage"] = given["advantage"].repeat_interleave(lengths)
    rows["weight"] = weights.repeat_interleave(lengths)
    logprob = rows.pop("logprob").clone().requires_grad_()
    tokens = UpdateTokens(
        logprob.detach(),
        rows["old_logprob"],
        rows["rollout_logprob"],
        rows["entropy"],
        rows["advantage"],
        torch.arange(len(logprob)),
        lengths,
    )
    for name, select in build_loss(algorithm).selections.items():
        rows[name] = select(tokens).double()
    entropy = rows.pop("entropy") + entropy_slope * (logprob - logprob.detach())
    stats = SimpleNamespace(logprob=logprob, entropy=entropy, cu_seqlens=cu_seqlens)
    loss, _ = build_loss(algorithm, coefficients)(stats, rows)
    (gradient,) = torch.autograd.grad(loss.sum(), logprob)
    spread = torch.zeros_like(given["logprob"])
    spread[mask] = gradient
    return loss.sum().detach(), spread


def assert_same(
    expected: torch.Tensor, logprob: torch.Tensor, found: tuple[torch.Tensor, torch.Tensor], atol: float
) -> torch.Tensor:
    """Compare a peer's loss and its gradient with ours; return the gradient. 1e-7: TRL rounds temperatures to fp32."""
    (gradient,) = torch.autograd.grad(expected, logprob)
    torch.testing.assert_close(found[0], expected.detach(), rtol=2e-7, atol=atol)
    torch.testing.assert_close(found[1], gradient, rtol=2e-7, atol=atol)
    return gradient


@pytest.mark.parametrize(
    ("theirs", "loss", "actor", "aggregation"),
    [
        ("vanilla", LossConfig(clip_high=0.28), {}, "token-mean"),
        ("gspo", LossConfig("gspo", clip_low=0.1, clip_high=0.1), {"low": 0.1, "high": 0.1}, "seq-mean-token-mean"),
        ("sapo", LossConfig("sapo"), {}, "seq-mean-token-mean"),
        ("cispo", LossConfig("cispo", clip_high=0.28), {}, "token-mean"),
        ("gpg", LossConfig("gpg"), {}, "token-mean"),
        ("geo_mean", LossConfig("gmpo", clip_high=0.28), {}, "seq-mean-token-mean"),
        ("dppo_tv", LossConfig("dppo_tv", clip_high=0.28, kwargs={"cap": 1.3}), {"clip_ratio_c": 1.3}, "token-mean"),
        ("dppo_kl", LossConfig("dppo_kl", clip_low=0.02, clip_high=0.05),
         {"low": 0.02, "high": 0.05, "clip_ratio_c": 20}, "token-mean"),
        ("dro", LossConfig("dro", kwargs={"beta": 0.3}), {"policy_loss": {"dro_beta": 0.3}}, "token-mean"),
        ("kl_cov", LossConfig("kl_cov", kwargs={"share": 0.2, "coef": 0.7}),
         {"policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}}, "token-mean"),
        ("clip_cov", LossConfig("clip_cov", clip_high=0.28, kwargs={"share": 1.0, "low": 0.2, "high": 0.8}),
         {"policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 0.8}}, "token-mean"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("correction", ["none", "token_truncate"])
def test_a_loss_of_verl(theirs: str, loss: LossConfig, actor: dict[str, Any], aggregation: str, correction: str):
    given = tensors()
    logprob = given["logprob"].clone().requires_grad_()
    advantage = given["advantage"][:, None].expand(-1, T)
    weights = (given["old_logprob"] - given["rollout_logprob"]).exp().clamp(max=1.05)
    expected, _ = verl_core().get_policy_loss_fn(theirs)(
        old_log_prob=given["old_logprob"],
        log_prob=logprob,
        advantages=advantage,
        response_mask=MASK.double(),
        loss_agg_mode=aggregation,
        config=VerlActor(**actor),
        rollout_is_weights=None if correction == "none" else weights,
    )
    algorithm = AlgorithmConfig(loss=loss, correction=CorrectionConfig(correction, high=1.05))
    assert_same(expected, logprob, ours(algorithm, given, aggregation), atol=1e-8)


@pytest.mark.parametrize(
    ("reject", "theirs", "thresholds"),
    [
        ({"token_k1": [0.9, 1.1]}, "token_k1", "0.9_1.1"),
        ({"token_k2": 0.005}, "token_k2", 0.005),
        ({"token_k3": 0.005}, "token_k3", 0.005),
        ({"seq_sum_k1": [0.9, 1.2]}, "seq_sum_k1", "0.9_1.2"),
        ({"seq_sum_k2": 0.03}, "seq_sum_k2", 0.03),
        ({"seq_sum_k3": 0.03}, "seq_sum_k3", 0.03),
        ({"seq_mean_k1": [0.95, 1.05]}, "seq_mean_k1", "0.95_1.05"),
        ({"seq_mean_k2": 0.005}, "seq_mean_k2", 0.005),
        ({"seq_mean_k3": 0.005}, "seq_mean_k3", 0.005),
        ({"seq_max_k2": 0.015}, "seq_max_k2", 0.015),
        ({"seq_max_k3": 0.02}, "seq_max_k3", 0.02),
        ({"token_k1": [0.9, 1.1], "seq_mean_k3": 0.005}, "token_k1,seq_mean_k3", "0.9_1.1,0.005"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rejection_of_verl(reject: dict[str, Any], theirs: str, thresholds: str | float):
    given = tensors()
    log_ratio = (given["old_logprob"] - given["rollout_logprob"]) * MASK
    mask, _ = verl_correction().compute_rollout_rejection_mask(log_ratio, MASK.double(), theirs, thresholds)
    weights = correction_weights(log_ratio[MASK], CorrectionConfig(reject=reject), CU)
    assert weights is not None
    assert 0 < weights.sum() < len(weights)
    assert torch.equal(weights, mask[MASK])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bounds", [1.05, "0.9_1.1"])
def test_normalized_weights_of_verl(level: str, bounds: float | str):
    given = tensors()
    log_ratio = (given["old_logprob"] - given["rollout_logprob"]) * MASK
    expected, _ = verl_correction().compute_rollout_correction_weights(log_ratio, MASK.double(), level, bounds, True)
    low, high = map(float, bounds.split("_")) if isinstance(bounds, str) else (None, bounds)
    config = CorrectionConfig(f"{level}_{'truncate' if low is None else 'mask'}", low=low, high=high, normalize=True)
    rows = [given[name][MASK] for name in ("logprob", "old_logprob", "rollout_logprob")]
    tokens = UpdateTokens(*rows, torch.zeros(1), torch.zeros(1), torch.zeros(1), LENGTHS)
    found = normalized_weights(tokens, config)
    assert int((found != 0).sum()) > 0
    torch.testing.assert_close(found, expected[MASK], rtol=1e-7, atol=0)  # verl adds 1e-8 to counts


PLAIN = {"dual_clip": None, "log_ratio_clamp": None}
MEAN_OF_SEQUENCES, MEAN_OF_TOKENS = "seq-mean-token-mean", "token-mean"


@pytest.mark.parametrize(
    ("theirs", "loss", "aggregation"),
    [
        ({"loss_type": "grpo"}, LossConfig(**PLAIN), MEAN_OF_SEQUENCES),
        ({"loss_type": "dapo", "epsilon_high": 0.28}, LossConfig(clip_high=0.28, **PLAIN), MEAN_OF_TOKENS),
        ({"loss_type": "bnpo"}, LossConfig(**PLAIN), MEAN_OF_TOKENS),
        ({"loss_type": "dr_grpo"}, LossConfig(**PLAIN), "seq-mean-token-sum-norm"),
        ({"loss_type": "dapo", "delta": 1.25}, LossConfig(delta=1.25, **PLAIN), MEAN_OF_TOKENS),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1},
         LossConfig("gspo", clip_low=0.1, clip_high=0.1), MEAN_OF_SEQUENCES),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence", "delta": 1.02},
         LossConfig("gspo", delta=1.02), MEAN_OF_SEQUENCES),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, LossConfig("gspo"), "seq-mean-token-sum"),
        ({"loss_type": "cispo", "epsilon_high": 1.5}, LossConfig("cispo", clip_low=1.0, clip_high=0.5, **PLAIN),
         MEAN_OF_TOKENS),
        ({"loss_type": "sapo"}, LossConfig("sapo", **PLAIN), MEAN_OF_SEQUENCES),
        ({"loss_type": "vespo"}, LossConfig("vespo"), MEAN_OF_TOKENS),
    ],
    ids=lambda value: value.get("loss_type") if isinstance(value, dict) else "",
)  # fmt: skip
@pytest.mark.parametrize("beta", [0.0, 0.07])
def test_a_loss_of_trl(theirs: dict[str, Any], loss: LossConfig, aggregation: str, beta: float):
    given = tensors(spread=0.25)
    logprob = given["logprob"].clone().requires_grad_()
    inputs = {
        "completion_mask": MASK.to(torch.int64),
        "advantages": given["advantage"],
        "old_per_token_logps": given["old_logprob"],
        "ref_per_token_logps": given["ref_logprob"],
    }
    # a sequence's ratio weighs TRL's KL, there, and each token's own ours: they agree without
    times_ratio = theirs.get("importance_sampling_level") != "sequence"
    settings = theirs | {"beta": beta, "use_bias_correction_kl": times_ratio}
    expected = trl_loss(logprob, given["entropy"], inputs, **settings)
    kl = KlConfig(coef=beta, input_clamp=None, output_clamp=None, times_ratio=times_ratio)
    assert_same(expected, logprob, ours(AlgorithmConfig(loss=loss, kl=kl), given, aggregation), atol=1e-7)


@pytest.mark.parametrize("preset", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"])
def test_a_preset_is_the_loss_of_trl_with_its_name(preset: str):
    given = tensors(spread=0.25)
    logprob = given["logprob"].clone().requires_grad_()
    a = load_config("tiny_sort", [f"algorithm.preset={preset}", "algorithm.kl.coef=0"]).algorithm
    settings: dict[str, Any] = {"loss_type": preset, "epsilon_low": a.loss.clip_low, "epsilon_high": a.loss.clip_high}
    if preset == "luspo":
        settings["importance_sampling_level"] = "sequence"
    if preset == "cispo":
        settings["epsilon_high"] = 5.0
    inputs = {"completion_mask": MASK.to(torch.int64), "advantages": given["advantage"]}
    expected = trl_loss(logprob, given["entropy"], inputs | {"old_per_token_logps": given["old_logprob"]}, **settings)
    assert_same(expected, logprob, ours(a, given, a.aggregation.name), atol=1e-7)


def test_the_mask_of_low_entropies_of_trl():
    given = tensors(spread=0.25)
    logprob = given["logprob"].clone().requires_grad_()
    inputs = {"completion_mask": MASK.to(torch.int64), "advantages": given["advantage"]}
    inputs["old_per_token_logps"] = given["old_logprob"]
    expected = trl_loss(logprob, given["entropy"], inputs, top_entropy_quantile=0.3)
    algorithm = AlgorithmConfig(loss=LossConfig(**PLAIN), top_entropy_share=0.3)
    gradient = assert_same(expected, logprob, ours(algorithm, given, MEAN_OF_TOKENS), atol=1e-7)
    assert 0 < (gradient[MASK] != 0).sum() < 0.35 * MASK.sum()


@pytest.mark.parametrize("correction", ["none", "token_truncate"])
def test_the_off_policy_sequence_mask_of_trl(correction: str):
    given = tensors(spread=0.25)
    logprob = given["logprob"].clone().requires_grad_()
    inputs = {
        "completion_mask": MASK.to(torch.int64),
        "advantages": given["advantage"],
        "old_per_token_logps": given["old_logprob"],
        "sampling_per_token_logps": given["rollout_logprob"],
        "importance_sampling_ratio": (given["old_logprob"] - given["rollout_logprob"]).exp().clamp(max=1.05),
    }
    lengths = MASK.sum(1)
    gaps = ((given["rollout_logprob"] - given["logprob"]) * MASK).sum(1) / lengths
    threshold = float(gaps[given["advantage"] < 0].mean())  # leaves out one of the two
    settings = {"off_policy_mask_threshold": threshold, "use_vllm": correction != "none"}
    expected = trl_loss(logprob, given["entropy"], inputs, **settings)
    algorithm = AlgorithmConfig(
        loss=LossConfig(**PLAIN), correction=CorrectionConfig(correction, high=1.05), off_policy_threshold=threshold
    )
    gradient = assert_same(expected, logprob, ours(algorithm, given, MEAN_OF_TOKENS), atol=1e-7)
    assert (gradient.abs().sum(1) == 0).sum() == 2, "one left out, one without advantage"


REWARDS = torch.tensor([1, 0, 0, 0, 0.3, 0.5, 0.9, 1, 1, 0.2, 0.7, 0.7], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3])
SIZES = torch.tensor([3, 5, 1, 4, 2, 6, 6, 3, 3, 1, 5, 2])
COLUMNS = torch.arange(int(SIZES.max())) < SIZES[:, None]


@pytest.mark.parametrize(
    ("theirs", "config", "settings"),
    [
        ("grpo", AdvantageConfig(), {}),
        ("grpo", AdvantageConfig(std="none"), {"norm_adv_by_std_in_grpo": False}),
        ("rloo", AdvantageConfig("rloo"), {}),
        ("opo", AdvantageConfig("opo"), {}),
        ("gpg", AdvantageConfig("gpg"), {}),
        ("reinforce_plus_plus", AdvantageConfig("reinforce_plus_plus"), {}),
        ("reinforce_plus_plus_baseline", AdvantageConfig("reinforce_plus_plus_baseline"), {}),
    ],
)
def test_an_advantage_of_verl(theirs: str, config: AdvantageConfig, settings: dict[str, Any]):
    token_rewards = torch.zeros(COLUMNS.shape, dtype=torch.float64)
    token_rewards[torch.arange(len(SIZES)), SIZES - 1] = REWARDS
    more = {} if theirs == "reinforce_plus_plus" else {"index": GROUPS.numpy()}
    if theirs == "reinforce_plus_plus":
        more["config"] = SimpleNamespace(gamma=1.0)
    expected, _ = verl_core().get_adv_estimator_fn(theirs)(
        token_level_rewards=token_rewards, response_mask=COLUMNS.double(), **more, **settings
    )
    found = group_advantages(REWARDS, GROUPS, torch.ones(len(REWARDS), dtype=torch.bool), config, SIZES)
    signal = torch.ones(len(REWARDS), dtype=torch.bool)
    if theirs == "reinforce_plus_plus_baseline":
        signal = GROUPS != 2  # whose equal rewards give exactly 0 here
    torch.testing.assert_close(found[signal].double(), expected[signal, 0], rtol=1e-6, atol=1e-6)


def test_remax_of_verl():
    token_rewards = torch.zeros(COLUMNS.shape, dtype=torch.float64)
    token_rewards[torch.arange(len(SIZES)), SIZES - 1] = REWARDS
    greedy = torch.tensor([0.25, 1.0, 0.0, 0.5, 0.75], dtype=torch.float64)[GROUPS]
    expected, _ = verl_core().get_adv_estimator_fn("remax")(
        token_level_rewards=token_rewards, reward_baselines=greedy, response_mask=COLUMNS.double()
    )
    valid = torch.ones(len(REWARDS), dtype=torch.bool)
    found = group_advantages(REWARDS, GROUPS, valid, AdvantageConfig("remax"), SIZES, greedy_S=greedy)
    torch.testing.assert_close(found.double(), expected[:, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_optimal_token_baseline_of_verl(seed: int):
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (len(GROUPS),), generator=g)
    group = torch.cat([GROUPS, torch.tensor([4])])  # and a group of one
    lengths = torch.cat([sizes, torch.tensor([4])])
    columns = torch.arange(int(lengths.max())) < lengths[:, None]
    rewards = torch.rand(len(group), generator=g, dtype=torch.float64)
    pi, rest = torch.rand(2, *columns.shape, generator=g, dtype=torch.float64)
    probs = TokenProbs(pi.log().float(), (pi.square() + rest * (1 - pi).square()).float())
    token_rewards = torch.zeros(columns.shape, dtype=torch.float64)
    token_rewards[torch.arange(len(lengths)), lengths - 1] = rewards
    expected, _ = verl_core().get_adv_estimator_fn("optimal_token_baseline")(
        token_level_rewards=token_rewards,
        response_mask=columns.double(),
        index=group.numpy(),
        old_log_probs=probs.logprobs.double(),
        sum_pi_squared=probs.square_sums.double(),
    )
    config = AdvantageConfig("optimal_token_baseline", singleton="raw")
    of_tokens = TokenProbs(*(each[columns] for each in probs))
    valid = torch.ones(len(group), dtype=torch.bool)
    found = group_advantages(rewards, group, valid, config, lengths, token_probs=of_tokens)
    torch.testing.assert_close(found.double(), expected[columns], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.3, 2.0]])
def test_gdpo_of_verl(weights: list[float]):
    g = torch.Generator().manual_seed(1)
    parts = {name: torch.randint(3, (len(GROUPS),), generator=g).double() for name in ("format", "answer")}
    core = verl_core()
    prompt = 2
    attention = torch.cat([torch.ones(len(SIZES), prompt), COLUMNS.double()], 1)
    expected, _ = core.get_adv_estimator_fn("gdpo")(
        token_level_rewards=torch.zeros(COLUMNS.shape),
        response_mask=COLUMNS.double(),
        index=GROUPS.numpy(),
        config={"gdpo_reward_keys": [*parts], "gdpo_reward_weights": weights},
        non_tensor_batch={name: part.numpy() for name, part in parts.items()},
        batch={"prompts": torch.zeros(len(SIZES), prompt), "attention_mask": attention.long()},
    )
    valid = torch.ones(len(GROUPS), dtype=torch.bool)
    weighed = {name: (weight, part) for weight, (name, part) in zip(weights, parts.items(), strict=True)}
    found = group_advantages(REWARDS, GROUPS, valid, AdvantageConfig("gdpo"), SIZES, weighed)
    torch.testing.assert_close(found, expected[:, 0].float(), rtol=2e-6, atol=2e-6)  # verl computes in fp32


@pytest.mark.parametrize(("estimator", "theirs"), [("k1", "kl"), ("abs", "abs"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_rewards_less_the_kl_and_its_controller_are_those_of_verl(estimator: str, theirs: str):
    given = tensors()
    scores = torch.zeros(MASK.shape, dtype=torch.float64)
    scores[torch.arange(len(LENGTHS)), LENGTHS - 1] = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 0.2], dtype=torch.float64)
    batch: Any = {"response_mask": MASK.double(), "token_level_scores": scores}
    batch |= {"old_log_probs": given["old_logprob"], "ref_log_prob": given["ref_logprob"]}
    data = SimpleNamespace(batch=SizedBatch(batch))
    controller = verl_core().AdaptiveKLController(0.3, 0.05, 100)
    expected, metrics = verl_kl_penalty()(data, controller, theirs)
    settings = KlConfig(coef=0.3, in_reward=True, estimator=estimator, target=0.05, horizon=100)
    kl_R = build_kl(settings)(given["old_logprob"][MASK], given["ref_logprob"][MASK])
    kl_S = sequence_sum(kl_R, CU)[0]
    torch.testing.assert_close(scores.sum(-1) - 0.3 * kl_S, expected.batch["token_level_rewards"].sum(-1))
    mean = float((kl_S / LENGTHS).mean())
    assert mean == pytest.approx(metrics["actor/reward_kl_penalty"], rel=1e-7)
    for kl in (mean, 0.051, 0.01):
        assert adapt_kl(0.3, kl, 6, settings) == pytest.approx(updated(kl), rel=1e-12)
    assert adapt_kl(0.3, mean, 6, settings) == pytest.approx(controller.value, rel=1e-12)


def updated(kl: float) -> float:
    """Return the coefficient of verl's controller after a KL."""
    controller = verl_core().AdaptiveKLController(0.3, 0.05, 100)
    controller.update(kl, 6)
    return controller.value


class SizedBatch(dict[str, Any]):
    """Tensors by name, with the size that verl reads."""

    batch_size = (len(LENGTHS),)


def test_the_adaptive_entropy_of_trl():
    given, scales = tensors(spread=0.25), (0.5, 0.2, 0.2, 0.2, 0.2, 2.0, 2.0, 0.1, 0.1)
    inputs = {"completion_mask": MASK.to(torch.int64), "advantages": given["advantage"]}
    inputs["old_per_token_logps"] = given["old_logprob"]
    bounds = {"entropy_target": 0.2, "entropy_coef_delta": 0.04, "entropy_coef_min": 0.03, "entropy_coef_max": 0.14}
    algorithm = AlgorithmConfig(loss=LossConfig(**PLAIN), entropy_coef=0.05, **bounds)
    coefficients = initial_coefficients(algorithm)
    theirs = {"entropy_coef": 0.05, "_last_world_entropy": float("inf"), "_entropy_window_stats": None}
    seen = set()
    for scale in scales:
        logprob = given["logprob"].clone().requires_grad_()
        entropy = given["entropy"] * scale
        expected = trl_loss(logprob, entropy, inputs, theirs, loss_type="dapo", **bounds)
        found = ours(algorithm, given | {"entropy": entropy}, "token-mean", coefficients=coefficients)
        seen.add(round(coefficients.entropy_bonus, 6))
        assert_same(expected, logprob, found, atol=1e-7)
        coefficients.after_update(float(entropy[MASK].mean()))
        assert coefficients.entropy == pytest.approx(theirs["entropy_coef"], rel=1e-12)
    assert seen >= {0.0, 0.07, 0.11, 0.14}, "the bonus was off, rose, and met its bound"
