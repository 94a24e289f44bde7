"""Rollout correction: golden weights, sequences, bounds, and the mismatch metrics."""

import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hwgrpo.algorithms.correction import (
    correction_weights,
    load_correction,
    mismatch_metrics,
    mismatch_sums,
    normalized_weights,
)
from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.algorithms.token_selection import UpdateTokens
from hwgrpo.catalog import CORRECTIONS
from hwgrpo.config.schema import AlgorithmConfig, CorrectionConfig
from hwgrpo.errors import ConfigError

LOG_RATIO = [0.5, -0.2, 1.2, 0.0]
BOUNDS = torch.tensor([0, 4])


def weights(name, log_ratio=LOG_RATIO, cu_seqlens=BOUNDS, **bounds):
    weight_N = correction_weights(
        torch.tensor(log_ratio, dtype=torch.float64), CorrectionConfig(name, **bounds), cu_seqlens
    )
    return weight_N.tolist()


RATIOS = [1.64872127, 0.81873075, 3.32011692, 1.0]


@pytest.mark.parametrize(
    ("name", "bounds", "expected"),
    [
        ("token_truncate", {"high": 2.0}, [1.64872127, 0.81873075, 2.0, 1.0]),
        ("token_truncate", {"low": 0.9, "high": None}, [1.64872127, 0.9, 3.32011692, 1.0]),
        ("token_mask", {"low": 0.5, "high": 5.0}, RATIOS),
        ("token_mask", {"low": 0.9, "high": 2.0}, [1.64872127, 0.0, 0.0, 1.0]),
        ("sequence_truncate", {"high": 5.0}, [4.48168907] * 4),
        ("sequence_truncate", {"high": 2.0}, [2.0] * 4),
        ("sequence_mask", {"high": 5.0}, [4.48168907] * 4),
        ("sequence_mask", {"high": 3.0}, [0.0] * 4),
        ("sequence_mask", {"low": 4.5, "high": None}, [0.0] * 4),
        ("geometric_truncate", {"high": 2.0}, [1.45499141] * 4),
        ("geometric_truncate", {"high": 1.4}, [1.4] * 4),
        ("geometric_mask", {"high": 1.4}, [0.0] * 4),
        ("geometric_mask", {"high": 1.5}, [1.45499141] * 4),
        ("token_truncate", {"high": 2.0, "reject": {"token_k1": [0.5, 2.0]}}, [1.64872127, 0.81873075, 0.0, 1.0]),
        ("none", {"reject": {"token_k1": [0.5, 1.1]}}, [1.0, 0.0, 0.0, 1.0]),
        ("none", {"reject": {"seq_mean_k1": [0.7, 1.0]}}, [0.0] * 4),  # the engine's are 0.687 times as likely
        ("none", {"reject": {"seq_mean_k1": [0.68, 1.0]}}, [1.0] * 4),
        ("none", {"reject": {"seq_sum_k1": [0.23, 1.0]}}, [0.0] * 4),  # 0.223
        ("none", {"reject": {"seq_sum_k1": [0.22, 1.0]}}, [1.0] * 4),
        ("none", {"reject": {"token_k2": 0.1}}, [0.0, 1.0, 0.0, 1.0]),
        ("none", {"reject": {"seq_max_k2": 0.7}}, [0.0] * 4),  # 0.72
        ("none", {"reject": {"seq_max_k2": 0.73}}, [1.0] * 4),
        ("none", {"reject": {"seq_sum_k3": 1.2}}, [0.0] * 4),  # 1.2876
        ("none", {"reject": {"seq_sum_k3": 1.3}}, [1.0] * 4),
        ("none", {"reject": {"veto": 0.83}}, [0.0] * 4),  # one token has 0.82 of its probability
        ("none", {"reject": {"veto": 0.81}}, [1.0] * 4),
        ("none", {"reject": {"token_k1": [0.5, 1.1], "token_k2": 0.1}}, [0.0, 0.0, 0.0, 1.0]),
    ],
)
def test_corrections_give_their_golden_weights(name, bounds, expected):
    assert weights(name, **bounds) == pytest.approx(expected, rel=0, abs=5e-9)


def test_what_is_rejected_by_sequence_is_that_sequence_and_the_scope_says_so():
    bounds = torch.tensor([0, 2, 2, 3])
    assert weights("none", [0.1, 3.0, 0.1], bounds, reject={"seq_max_k3": 1.0}) == [0.0, 0.0, 1.0]
    for reject, scope in (({"token_k3": 1.0}, "token"), ({"token_k3": 1.0, "veto": 0.1}, "sequence")):
        assert load_correction(CorrectionConfig(reject=reject)).scope == scope
    masks = CorrectionConfig("sequence_mask", reject={"token_k3": 1.0})
    assert load_correction(masks).scope == "sequence"


def test_a_veto_below_the_clamp_of_other_statistics_rejects_too():
    bounds = torch.tensor([0, 2, 3])
    for log_ratio, kept in ((-27.0, [1.0, 1.0, 1.0]), (-28.0, [0.0, 0.0, 1.0])):  # 1e-12 is e^-27.6
        assert weights("none", [log_ratio, 0.1, -0.1], bounds, reject={"veto": 1e-12}) == kept


def test_the_name_none_gives_no_weights():
    assert correction_weights(torch.zeros(3), CorrectionConfig()) is None


def test_sequence_weights_stay_within_their_sequence_and_pass_over_empty_ones():
    actual = weights(
        "sequence_truncate", [0.1, 0.2, -0.3, 0.4, -0.1, -0.1], torch.tensor([0, 2, 2, 3, 6, 6]), high=50.0
    )
    expected = [math.exp(s) for s in (0.3, 0.3, -0.3, 0.2, 0.2, 0.2)]
    assert actual == pytest.approx(expected, rel=1e-12)


def test_weights_carry_no_gradient_and_do_not_overflow():
    log_ratio = torch.tensor([5000.0, -5000.0], requires_grad=True)
    weight_N = correction_weights(log_ratio, CorrectionConfig("token_truncate", low=1e-30, high=1e30))
    assert not weight_N.requires_grad
    assert weight_N.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)


def test_scopes_say_which_corrections_need_whole_sequences():
    assert {name: CORRECTIONS.load(name).scope for name in CORRECTIONS.names()} == {
        "none": "token",
        "token_truncate": "token",
        "token_mask": "token",
        "sequence_truncate": "sequence",
        "sequence_mask": "sequence",
        "geometric_truncate": "sequence",
        "geometric_mask": "sequence",
    }


def test_an_unknown_correction_is_refused_with_a_near_one():
    with pytest.raises(ConfigError, match=r"'token_trunc'.*'token_truncate'"):
        correction_weights(torch.zeros(3), CorrectionConfig("token_trunc"))


OLD = torch.tensor([-1.0, -2.0, -0.5, -0.3, -0.7, -1.1])
ROLLOUT = torch.tensor([-1.2, -1.9, -0.6, -0.3, -0.9, -1.0])
CU = torch.tensor([0, 2, 2, 5, 6])
SEQUENCES = [slice(0, 2), slice(2, 5), slice(5, 6)]


def metrics(*args):
    return mismatch_metrics(mismatch_sums(*args))


def test_mismatch_metrics_follow_their_definitions():
    lr = (OLD.double() - ROLLOUT.double()).tolist()
    n, s = len(lr), len(SEQUENCES)
    per_sequence = [lr[at] for at in SEQUENCES]
    old, rollout = [OLD.double()[at] for at in SEQUENCES], [ROLLOUT.double()[at] for at in SEQUENCES]
    expected = {
        "kl": -sum(lr) / n,
        "k3_kl": sum(math.exp(v) - v - 1 for v in lr) / n,
        "chi2_token": sum(math.exp(2 * v) for v in lr) / n - 1,
        "chi2_seq": sum(math.exp(2 * sum(v)) for v in per_sequence) / s - 1,
        "training_ppl": sum(math.exp(-v.mean()) for v in old) / s,
        "rollout_ppl": sum(math.exp(-v.mean()) for v in rollout) / s,
        "ppl_ratio": sum(math.exp(-sum(v) / len(v)) for v in per_sequence) / s,
        "rollout_is_eff_sample_size": sum(math.exp(v) for v in lr) ** 2 / n / sum(math.exp(2 * v) for v in lr),
        "log_ratio_slope": statistics.linear_regression(ROLLOUT.double().tolist(), lr).slope,
        "log_ratio_r2": statistics.correlation(ROLLOUT.double().tolist(), lr) ** 2,
    }
    assert metrics(OLD, ROLLOUT, CU) == pytest.approx({f"rollout_corr/{k}": v for k, v in expected.items()}, rel=1e-12)


def test_k3_is_not_clamped_where_importance_weights_are():
    old, rollout = torch.tensor([0.0, -30.0]), torch.tensor([-30.0, 0.0])
    values = metrics(old, rollout, torch.tensor([0, 1, 2]))
    assert values["rollout_corr/k3_kl"] == pytest.approx((math.exp(30) - 31 + math.exp(-30) + 29) / 2, rel=1e-12)
    assert values["rollout_corr/chi2_token"] == pytest.approx((math.exp(40) + math.exp(-40)) / 2 - 1, rel=1e-12)


def test_mismatch_sums_of_parts_add_up():
    parts = mismatch_sums(OLD[:2], ROLLOUT[:2], CU[:3]) + mismatch_sums(OLD[2:], ROLLOUT[2:], CU[2:] - 2)
    torch.testing.assert_close(parts, mismatch_sums(OLD, ROLLOUT, CU), rtol=1e-14, atol=1e-14)


def test_equal_policies_have_no_mismatch():
    values = metrics(OLD, OLD, CU)
    zeros = [values[f"rollout_corr/{name}"] for name in ("kl", "k3_kl", "chi2_token", "chi2_seq")]
    assert zeros == [0, 0, 0, 0]
    assert values["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1, rel=1e-15)


@pytest.mark.parametrize(("kept", "expected"), [([2.0, 2.0, 0.0, 0.0, 0.0, 0.0], 1 / 3), ([0.0] * 6, 0.0)])
def test_effective_sample_size_is_that_of_the_applied_weights(kept, expected):
    actual = metrics(OLD, ROLLOUT, CU, torch.tensor(kept))["rollout_corr/rollout_is_eff_sample_size"]
    assert actual == pytest.approx(expected)


@pytest.mark.parametrize(
    ("log_ratio", "slope", "r2"),
    [(0.5 * ROLLOUT, 0.5, 1.0), (0.1 - 0.2 * ROLLOUT, -0.2, 1.0), (1e-6 * ROLLOUT, 1e-6, 0.0), (0 * ROLLOUT, 0, 0)],
    ids=["a higher temperature", "a lower one", "rounding", "equal"],
)
def test_the_log_ratios_of_another_temperature_lie_on_a_line(log_ratio, slope, r2):
    values = metrics(ROLLOUT.double() + log_ratio.double(), ROLLOUT, CU)
    assert values["rollout_corr/log_ratio_slope"] == pytest.approx(slope, rel=1e-6, abs=1e-15)
    assert values["rollout_corr/log_ratio_r2"] == pytest.approx(r2, rel=1e-6)


def test_tokens_of_one_log_prob_have_no_line():
    values = metrics(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0]), torch.tensor([0, 2]))
    assert (values["rollout_corr/log_ratio_slope"], values["rollout_corr/log_ratio_r2"]) == (0, 0)


def test_no_tokens_have_no_mismatch_metrics():
    assert metrics(torch.zeros(0), torch.zeros(0), torch.tensor([0, 0])) == {}


def test_normalized_weights_have_mean_one_over_the_update_and_nothing_is_left_of_what_is_rejected():
    log_ratio = torch.tensor([0.5, -0.5, 0.2, 3.0], dtype=torch.float64)
    nothing = torch.zeros(4)
    tokens = UpdateTokens(nothing, log_ratio, torch.zeros(4), nothing, nothing, nothing, torch.tensor([1, 0, 3]))
    config = CorrectionConfig("token_truncate", normalize=True)
    found = normalized_weights(tokens, config)
    assert float(found.mean()) == pytest.approx(1)
    plain = correction_weights(log_ratio, config)
    assert plain is not None
    torch.testing.assert_close(found, plain / plain.mean())
    assert normalized_weights(tokens, replace(config, reject={"token_k2": 1.0})).tolist() == [*found.tolist()[:3], 0]
    sequences = normalized_weights(tokens, CorrectionConfig("sequence_truncate", high=100.0, normalize=True))
    assert float(sequences[[0, 1]].mean()) == pytest.approx(1)
    assert float(sequences.mean()) > 1.1  # over tokens
    no_weight = CorrectionConfig("token_mask", low=50.0, high=60.0, normalize=True)
    assert normalized_weights(tokens, no_weight).tolist() == [0] * 4


def test_weights_of_sequences_are_the_geometric_means_of_their_tokens():
    ratio = torch.tensor([0.5, -0.25, 0.1, 3.0, 0.2]).double()
    config, bounds = CorrectionConfig("token_truncate", high=math.e), torch.tensor([0, 2, 2, 5])
    found = load_correction(config, weighs_sequences=True)
    assert found.scope == "sequence"
    expected = [math.exp(0.125)] * 2 + [math.exp(1.3 / 3)] * 3
    assert found(ratio, config, bounds).tolist() == pytest.approx(expected)
    rejecting = replace(config, reject={"token_k2": 1.0})
    kept = load_correction(rejecting, weighs_sequences=True)(ratio, rejecting, bounds)
    assert kept.tolist() == pytest.approx([*expected[:3], 0, expected[4]])
    assert load_correction(CorrectionConfig(), weighs_sequences=True)(ratio, CorrectionConfig(), bounds) is None


def test_a_loss_takes_normalized_weights_from_the_update():
    loss = build_loss(AlgorithmConfig(correction=CorrectionConfig("token_truncate", normalize=True)))
    assert [*loss.selections] == ["correction"]
    rows = {"advantage": torch.ones(3), "weight": torch.ones(3), "rollout_logprob": torch.zeros(3)}
    stats = SimpleNamespace(logprob=torch.tensor([-1.0, -2.0, -3.0]), entropy=None, cu_seqlens=None)
    weighted, _ = loss(stats, {**rows, "correction": torch.tensor([1.0, 0.5, 0.0])})
    torch.testing.assert_close(weighted, torch.tensor([-1.0, -0.5, 0.0]))
