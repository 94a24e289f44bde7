"""The policy loss: golden values, and gradients against formulas written out independently in fp64."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.algorithms.scope import scoped
from hwgrpo.catalog import POLICY_LOSSES
from hwgrpo.config.schema import AlgorithmConfig, CorrectionConfig, KlConfig, LossConfig
from hwgrpo.errors import ConfigError

DAPO = {"clip_low": 0.2, "clip_high": 0.28}


def run(algorithm, logprob, *, entropy=None, cu_seqlens=None, **rows):
    """Run a loss; return (loss per row, metrics, d sum(loss) / d logprob, d sum(loss) / d entropy)."""
    lp = torch.as_tensor(logprob, dtype=torch.float64).clone().requires_grad_()
    ent = None if entropy is None else torch.as_tensor(entropy, dtype=torch.float64).clone().requires_grad_()
    rows = {name: torch.as_tensor(row, dtype=torch.float64) for name, row in rows.items()}
    rows.setdefault("weight", torch.ones_like(lp))
    stats = SimpleNamespace(logprob=lp, entropy=ent, cu_seqlens=cu_seqlens)
    loss, metrics = build_loss(algorithm)(stats, rows)
    wrt = [lp] if ent is None else [lp, ent]
    grads = torch.autograd.grad(loss.sum(), wrt, allow_unused=True)
    assert loss.shape == lp.shape
    for name, value in metrics.items():
        assert value.shape == lp.shape, name
        assert not value.requires_grad, name
    return loss.detach(), metrics, grads[0], grads[1] if ent is not None else None


def one(algorithm, advantage, d):
    loss, metrics, gradient, _ = run(algorithm, [-1.0], advantage=[advantage], old_logprob=[-1.0 - d])
    return loss.item(), {k: v.item() for k, v in metrics.items()}, gradient.item()


@pytest.mark.parametrize(
    ("advantage", "d", "dual_clip", "expected", "digits", "gradient"),
    [
        (1, 0.5, 3.0, -1.28, 8, 0.0),
        (1, -0.5, 3.0, -0.60653066, 8, -math.exp(-0.5)),
        (-1, 0.5, 3.0, 1.64872127, 8, math.exp(0.5)),
        (-1, -0.5, 3.0, 0.8, 8, 0.0),
        (-1, 1.5, None, 4.48168907, 8, math.exp(1.5)),
        (-1, 1.5, 3.0, 3.0, 8, 0.0),
        (-0.5, 1.5, 3.0, 1.5, 8, 0.0),
        (1, 0.2, 3.0, -math.exp(0.2), 8, -math.exp(0.2)),
    ],
)
def test_ppo_clip_gives_the_golden_losses_and_no_gradient_where_it_clips(
    advantage, d, dual_clip, expected, digits, gradient
):
    loss, _, actual = one(AlgorithmConfig(loss=LossConfig(**DAPO, dual_clip=dual_clip)), advantage, d)
    assert loss == pytest.approx(expected, rel=0, abs=0.5000001 * 10**-digits)
    assert actual == pytest.approx(gradient, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"), [(1, 1.0, -2.0), (1, 1.5, -2.48983732), (-1, 0.5, 1.41593833)]
)
def test_sapo_gives_the_golden_losses(advantage, ratio, expected):
    assert one(AlgorithmConfig(loss=LossConfig("sapo")), advantage, math.log(ratio))[0] == pytest.approx(
        expected, rel=0, abs=5.1e-9
    )


def test_sapo_temperatures_follow_the_sign_of_the_advantage():
    algorithm = AlgorithmConfig(loss=LossConfig("sapo", tau_pos=2.0, tau_neg=3.0))
    for advantage, tau in ((1.5, 2.0), (-1.5, 3.0)):
        gate = 1 / (1 + math.exp(-tau * 0.3))
        loss, _, gradient = one(algorithm, advantage, math.log(1.3))
        assert loss == pytest.approx(-advantage * gate * 4 / tau)
        assert gradient == pytest.approx(-advantage * 4 * gate * (1 - gate) * 1.3)


@pytest.mark.parametrize(
    ("advantage", "d", "clipfrac", "low", "high", "lower"),
    [
        (1, 0.5, 1, 0, 1, 0),
        (1, -0.5, 0, 0, 0, 0),
        (-1, -0.5, 1, 1, 0, 0),
        (-1, 0.5, 0, 0, 0, 0),
        (-1, 1.5, 0, 0, 0, 1),
        (0, 1.5, 0, 0, 0, 0),
    ],
)
def test_clip_metrics_have_the_meanings_of_verl_and_trl(advantage, d, clipfrac, low, high, lower):
    _, metrics, _ = one(AlgorithmConfig(loss=LossConfig(**DAPO)), advantage, d)
    assert metrics["pg_clipfrac"] == clipfrac
    assert metrics["clip_ratio/low"] == low
    assert metrics["clip_ratio/high"] == high
    assert metrics["pg_clipfrac_lower"] == lower
    assert metrics["ppo_kl"] == pytest.approx(-d)
    assert metrics["ratio"] == pytest.approx(math.exp(d))


def test_without_dual_clip_its_metric_is_absent():
    assert "pg_clipfrac_lower" not in one(AlgorithmConfig(loss=LossConfig(dual_clip=None)), -1, 1.5)[1]


def test_the_log_ratio_clamp_bounds_loss_and_gradient():
    loss, metrics, gradient = one(AlgorithmConfig(loss=LossConfig(dual_clip=None, log_ratio_clamp=2.0)), -1, 3.0)
    assert (loss, gradient) == (pytest.approx(math.exp(2.0)), 0.0)
    assert metrics["ppo_kl"] == -2.0
    loss, _, gradient = one(AlgorithmConfig(loss=LossConfig(dual_clip=None, log_ratio_clamp=None)), -1, 30.0)
    assert loss == pytest.approx(math.exp(30.0))
    assert gradient == pytest.approx(math.exp(30.0))


@pytest.mark.parametrize(
    ("clips", "d", "coefficient", "clipfrac"),
    [
        (DAPO, 0.5, 1.28, 1),
        (DAPO, -0.5, 0.8, 1),
        (DAPO, 0.1, math.exp(0.1), 0),
        # TRL's absolute cap of 5 without a lower bound.
        ({"clip_low": 1.0, "clip_high": 4.0}, 2.0, 5.0, 1),
        ({"clip_low": 1.0, "clip_high": 4.0}, -3.0, math.exp(-3.0), 0),
        ({"clip_low": 1.0, "clip_high": -0.8}, 0.0, 0.2, 1),
    ],
)
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_cispo_weighs_every_token_by_its_clipped_ratio(clips, d, coefficient, clipfrac, advantage):
    loss, metrics, gradient = one(AlgorithmConfig(loss=LossConfig("cispo", **clips)), advantage, d)
    assert loss == pytest.approx(coefficient * advantage)
    assert gradient == pytest.approx(-coefficient * advantage)
    assert metrics["pg_clipfrac"] == clipfrac


def test_gpg_ignores_the_ratio():
    loss, _, gradient = one(AlgorithmConfig(loss=LossConfig("gpg")), 2.0, 0.7)
    assert (loss, gradient) == (2.0, -2.0)


def of_sequence(algorithm, advantage, d):
    """Run a loss on one sequence of log-prob -1 with the log-ratios `d`; return (losses, gradients)."""
    old = [-1.0 - each for each in d]
    cu = torch.tensor([0, len(d)])
    loss, _, gradient, _ = run(
        algorithm, [-1.0] * len(d), advantage=[advantage] * len(d), old_logprob=old, cu_seqlens=cu
    )
    return loss.tolist(), gradient.tolist()


@pytest.mark.parametrize(
    ("advantage", "d", "value"),
    [(1.0, [0.5, -0.1, 0.05], -1.12374479), (-1.0, [-0.5, -0.1, 0.05], 0.86070798)],
)
def test_gmpo_gives_the_golden_losses_and_no_gradient_where_a_token_is_clipped(advantage, d, value):
    losses, gradients = of_sequence(AlgorithmConfig(loss=LossConfig("gmpo", clip_low=0.4, clip_high=0.4)), advantage, d)
    assert losses == pytest.approx([value] * 3, abs=5.1e-9)
    assert gradients == pytest.approx([0.0, value, value], abs=5.1e-9)


def test_gmpo_clips_in_the_direction_of_the_advantage_only():
    algorithm = AlgorithmConfig(loss=LossConfig("gmpo", clip_low=0.1, clip_high=0.3))
    for advantage, d in ((1.0, -2.0), (-1.0, 2.0)):
        losses, gradients = of_sequence(algorithm, advantage, [d])
        assert losses == gradients == pytest.approx([-advantage * math.exp(d)])


@pytest.mark.parametrize(
    ("log_w", "raised", "lowered"),
    [(0.0, 1.0, 1.0), (0.1, 0.89090921, 1.09380032), (-0.5, 1.19770595, 0.49014142), (1.0, 0.04264499, 0.64625336)],
)
def test_vespo_gives_the_golden_weights_of_the_ratio_of_the_sequence(log_w, raised, lowered):
    algorithm = AlgorithmConfig(loss=LossConfig("vespo"))
    for advantage, phi in ((2.0, raised), (0.0, raised), (-2.0, lowered)):
        losses, gradients = of_sequence(algorithm, advantage, [log_w - 0.3, 0.3])
        assert losses == pytest.approx([phi * advantage] * 2, abs=1.1e-8)  # log-probs are -1
        assert gradients == pytest.approx([-phi * advantage] * 2, abs=1.1e-8)
    other = AlgorithmConfig(loss=LossConfig("vespo", kwargs={"k_pos": 1.0, "lambda_pos": 0.5}))
    assert of_sequence(other, 1.0, [0.7])[0] == pytest.approx([math.exp(0.7 + 0.5 * (1 - math.exp(0.7)))])


@pytest.mark.parametrize(
    ("advantage", "d", "weight"), [(1, 0.5, 1.0), (1, -0.5, 1.0), (-1, 0.5, 1.0), (-1, -0.5, math.exp(-0.5))]
)
def test_topr_weighs_only_what_is_unlearned_and_never_by_more_than_1(advantage, d, weight):
    loss, _, gradient = one(AlgorithmConfig(loss=LossConfig("topr")), advantage, d)
    assert (loss, gradient) == (pytest.approx(weight * advantage), pytest.approx(-weight * advantage))


def test_dro_adds_a_quadratic_penalty():
    loss, metrics, gradient = one(AlgorithmConfig(loss=LossConfig("dro", kwargs={"beta": 0.4})), 2.0, 0.5)
    assert (loss, gradient) == (pytest.approx(2.0 + 0.2 * 0.25), pytest.approx(-2.0 + 0.4 * 0.5))
    assert set(metrics) == {"pg_loss", "ppo_kl"}


@pytest.mark.parametrize(
    ("advantage", "d", "clips", "kept"),
    [
        # the probability is e^-1 = 0.368 now, and was e^(-1 - d)
        (1, 0.5, (0.1, 0.15), True),  # up by 0.145
        (1, 0.5, (0.2, 0.14), False),
        (1, -0.5, (0.0, 0.0), True),
        (-1, -0.5, (0.24, 0.0), True),  # down by 0.239
        (-1, -0.5, (0.23, 0.5), False),
        (-1, 0.5, (0.0, 0.0), True),
    ],
)
def test_dppo_tv_leaves_out_tokens_whose_probability_has_moved_too_far(advantage, d, clips, kept):
    low, high = clips
    algorithm = AlgorithmConfig(loss=LossConfig("dppo_tv", clip_low=low, clip_high=high, kwargs={"cap": 1.5}))
    loss, metrics, gradient = one(algorithm, advantage, d)
    weight = min(math.exp(d), 1.5) * kept
    assert (loss, gradient) == (pytest.approx(weight * advantage), pytest.approx(-weight * advantage))
    assert metrics["pg_clipfrac"] == 1 - kept


@pytest.mark.parametrize(("advantage", "d"), [(1, 0.5), (-1, -0.5)])
def test_dppo_kl_measures_the_move_by_the_kl_of_the_token_and_the_rest(advantage, d):
    new, old = math.exp(-1), math.exp(-1 - d)
    kl = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
    for bound, kept in ((1.001 * kl, True), (0.999 * kl, False)):
        clips = {"clip_low": bound if advantage < 0 else 0.0, "clip_high": bound if advantage > 0 else 0.0}
        loss, _, _ = one(AlgorithmConfig(loss=LossConfig("dppo_kl", **clips)), advantage, d)
        assert loss == pytest.approx(math.exp(d) * advantage * kept)
        back, _, _ = one(AlgorithmConfig(loss=LossConfig("dppo_kl", **clips)), advantage, -d)
        assert back == pytest.approx(math.exp(-d) * advantage), "a move against the advantage is never left out"


def test_kl_cov_pulls_the_selected_tokens_back_and_clip_cov_leaves_them_alone():
    def losses(name: str, **kwargs: float) -> tuple[list[float], list[float]]:
        algorithm = AlgorithmConfig(loss=LossConfig(name, kwargs=kwargs))
        rows = {"advantage": [1.0, 1.0], "old_logprob": [-1.3, -1.3], "selected": [1.0, 0.0]}
        loss, metrics, gradient, _ = run(algorithm, [-1.0, -1.0], **rows)
        assert metrics["selected_tokens"].tolist() == [1.0, 0.0]
        return loss.tolist(), gradient.tolist()

    ratio = math.exp(0.3)
    loss, gradient = losses("kl_cov", coef=0.5)
    assert loss == pytest.approx([-ratio + 0.5 * 0.3, -ratio])
    assert gradient == pytest.approx([-ratio + 0.5, -ratio])
    assert losses("clip_cov") == (pytest.approx([0.0, -1.2]), [0.0, 0.0])


def test_the_policy_loss_is_limited_to_what_a_mask_selected_and_the_kl_is_not():
    algorithm = AlgorithmConfig(kl=KlConfig(coef=1.0, estimator="k2"), m2po_threshold=1.0, top_entropy_share=0.5)
    rows = {"advantage": [1.0] * 3, "ref_logprob": [-2.0] * 3}
    loss, metrics, _, _ = run(algorithm, [-1.0] * 3, **rows, trusted=[1.0, 1.0, 0.0], uncertain=[1.0, 0.0, 1.0])
    assert loss.tolist() == [-1.0 + 0.5, 0.5, 0.5]
    assert metrics["trusted_tokens"].tolist() == [1.0, 1.0, 0.0]
    assert metrics["uncertain_tokens"].tolist() == [1.0, 0.0, 1.0]


def test_the_entropy_bonus_is_limited_to_the_tokens_of_high_entropy_and_not_by_other_masks():
    algorithm = AlgorithmConfig(entropy_coef=0.5, m2po_threshold=1.0, top_entropy_share=0.5)
    masks = {"trusted": [0.0, 1.0, 0.0], "uncertain": [1.0, 0.0, 1.0], "bonus": [1.5, 0.0, 1.5]}
    _, _, _, gradient = run(algorithm, [-1.0] * 3, entropy=[0.4, 0.1, 0.6], advantage=[1.0] * 3, **masks)
    assert gradient.tolist() == [-0.75, 0.0, -0.75]


def test_delta_caps_a_ratio_that_is_not_clipped():
    for delta, expected, slope in ((None, 4.48168907, 4.48168907), (2.0, 2.0, 0.0)):
        loss, _, gradient = one(AlgorithmConfig(loss=LossConfig(dual_clip=None, delta=delta)), -1, 1.5)
        assert (loss, gradient) == (pytest.approx(expected), pytest.approx(slope))
    assert one(AlgorithmConfig(loss=LossConfig(delta=1.1)), 1, 0.5)[0] == -1.1, "below the upper clip it binds first"


CU = torch.tensor([0, 3, 3, 5, 9])
SEQUENCES = [range(3), range(3, 5), range(5, 9)]
ADVANTAGE = [1.0] * 3 + [-1.5] * 2 + [0.5] * 4


def test_gspo_has_the_value_and_gradient_of_the_sequence_mean_ratio():
    generator = torch.Generator().manual_seed(5)
    old = -torch.rand(9, generator=generator, dtype=torch.float64) - 0.2
    shift = torch.tensor([0.3] * 3 + [0.0] * 2 + [-0.3] * 4)
    d = shift + 0.05 * torch.randn(9, generator=generator, dtype=torch.float64)
    algorithm = AlgorithmConfig(loss=LossConfig("gspo", clip_low=0.1, clip_high=0.1))
    weight = [1 / 3] * 3 + [1 / 2] * 2 + [1 / 4] * 4
    rows = {"old_logprob": old, "advantage": ADVANTAGE, "weight": weight}
    loss, metrics, gradient, _ = run(algorithm, old + d, **rows, cu_seqlens=CU)
    lp = (old + d).requires_grad_()
    expected, clipped = [], []
    for rows in SEQUENCES:
        at, advantage = list(rows), ADVANTAGE[rows[0]]
        ratio = (lp[at] - old[at]).mean().exp()
        expected.append(-torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage))
        clipped += [float((ratio < 0.9 and advantage < 0) or (ratio > 1.1 and advantage > 0))] * len(at)
    (expected_gradient,) = torch.autograd.grad(torch.stack(expected).sum(), lp)
    assert 0 < sum(clipped) < 9
    torch.testing.assert_close(loss.sum(), torch.stack(expected).sum().detach())
    torch.testing.assert_close(gradient, expected_gradient)
    assert metrics["pg_clipfrac"].tolist() == clipped
    torch.testing.assert_close(metrics["ppo_kl"], -d)


def test_gspo_bounds_its_log_ratio_at_ten():
    loss, _, gradient, _ = run(
        AlgorithmConfig(loss=LossConfig("gspo")),
        [-1.0, -1.0],
        old_logprob=[-31.0, -1.0],
        advantage=[-1.0] * 2,
        cu_seqlens=torch.tensor([0, 2]),
    )
    assert loss.tolist() == pytest.approx([math.exp(10.0)] * 2)
    assert gradient.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("policy", "clips", "expected_loss", "slope"),
    [
        ("ppo_clip", {}, -1.0, -1.0),
        ("gspo", {}, -1.0, -1.0),
        ("sapo", {"tau_pos": 2.0, "tau_neg": 2.0}, -1.0, -1.0),
        ("gpg", {}, 0.7, -1.0),
        ("gmpo", {}, -1.0, -1.0),
        ("vespo", {}, 0.7, -1.0),
        ("topr", {}, 0.7, -1.0),
        ("dppo_tv", {}, 0.7, -1.0),
        ("dppo_kl", {}, 0.7, -1.0),
        ("dro", {}, 0.7, -1.0),
        ("cispo", {}, 0.7, -1.0),
        ("cispo", {"clip_low": 1.0, "clip_high": -0.8}, 0.14, -0.2),
    ],
)
def test_on_policy_every_loss_has_the_policy_gradient_and_metrics_of_a_cap_alone(policy, clips, expected_loss, slope):
    """Loss and slope are per unit of advantage."""
    advantage = torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64)
    algorithm = AlgorithmConfig(loss=LossConfig(policy, **clips))
    loss, metrics, gradient, _ = run(algorithm, [-0.7] * 3, advantage=advantage)
    torch.testing.assert_close(loss, expected_loss * advantage)
    torch.testing.assert_close(gradient, slope * advantage)
    capped = {"pg_clipfrac": [1.0] * 3, "clip_ratio/capped": [1.0, 0.0, 0.0]} if clips.get("clip_high", 0) < 0 else {}
    assert {name: values.tolist() for name, values in metrics.items() if name != "pg_loss"} == capped
    same_loss, _, same_gradient, _ = run(
        algorithm, [-0.7] * 3, advantage=advantage, old_logprob=[-0.7] * 3, cu_seqlens=torch.tensor([0, 2, 3])
    )
    torch.testing.assert_close(same_loss, loss)
    torch.testing.assert_close(same_gradient, gradient)


def batch(n=40):
    g = torch.Generator().manual_seed(11)
    old = -3 * torch.rand(n, generator=g, dtype=torch.float64) - 0.05
    return {
        "logprob": old + 0.5 * torch.randn(n, generator=g, dtype=torch.float64),
        "old_logprob": old,
        "ref_logprob": old + 0.8 * torch.randn(n, generator=g, dtype=torch.float64),
        "rollout_logprob": old + 0.4 * torch.randn(n, generator=g, dtype=torch.float64),
        "advantage": torch.randn(n, generator=g, dtype=torch.float64),
        "weight": torch.rand(n, generator=g, dtype=torch.float64),
        "entropy": torch.rand(n, generator=g, dtype=torch.float64),
        "selected": (torch.rand(n, generator=g) < 0.5).double(),
    }


def plain_total(b, lp, entropy, *, kl_coef, entropy_coef, kl_times_ratio, high):
    """PPO clip with dual clip, TIS, KL and entropy, token by token, as one would write it on paper."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(lp)):
        advantage, ratio = b["advantage"][i], torch.exp(lp[i] - b["old_logprob"][i])
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        if advantage < 0 and surrogate < 3 * advantage:
            surrogate = 3 * advantage
        importance = min(math.exp(b["old_logprob"][i] - b["rollout_logprob"][i]), high)
        x = b["ref_logprob"][i] - lp[i]
        kl = torch.exp(x) - 1 - x
        if kl_times_ratio:
            kl = kl * ratio
        total = total + b["weight"][i] * (-surrogate * importance + kl_coef * kl - entropy_coef * entropy[i])
    return total


@pytest.mark.parametrize("kl_times_ratio", [False, True])
def test_the_whole_loss_and_its_gradients_equal_the_formula_on_paper(kl_times_ratio):
    b = batch()
    algorithm = AlgorithmConfig(
        loss=LossConfig(**DAPO),
        kl=KlConfig(coef=0.07, times_ratio=kl_times_ratio),
        entropy_coef=0.03,
        correction=CorrectionConfig("token_truncate", high=1.2),
    )
    loss, metrics, gradient, entropy_gradient = run(algorithm, **b)
    lp, entropy = b["logprob"].clone().requires_grad_(), b["entropy"].clone().requires_grad_()
    total = plain_total(b, lp, entropy, kl_coef=0.07, entropy_coef=0.03, kl_times_ratio=kl_times_ratio, high=1.2)
    expected, expected_entropy = torch.autograd.grad(total, (lp, entropy))
    torch.testing.assert_close(loss.sum(), total.detach())
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(entropy_gradient, expected_entropy)
    assert metrics["pg_clipfrac"].sum() > 0
    assert {"pg_loss", "kl", "entropy", "ratio"} <= set(metrics)
    torch.testing.assert_close(metrics["entropy"], b["entropy"])
    torch.testing.assert_close(
        loss,
        b["weight"]
        * (
            metrics["pg_loss"]
            + 0.07 * metrics["kl"] * (metrics["ratio"] if kl_times_ratio else 1)
            - 0.03 * b["entropy"]
        ),
    )


@pytest.mark.parametrize(
    "policy", ["ppo_clip", "cispo", "sapo", "gpg", "topr", "dppo_tv", "dppo_kl", "dro", "kl_cov", "clip_cov"]
)
def test_a_token_loss_does_not_depend_on_how_rows_are_cut(policy):
    b = batch(30)
    algorithm = AlgorithmConfig(
        loss=LossConfig(policy),
        kl=KlConfig(coef=0.1),
        entropy_coef=0.1,
        correction=CorrectionConfig("token_mask", 0.5, 1.5),
    )
    assert build_loss(algorithm).scope == "token"
    whole = run(algorithm, **b)
    for cut in ([0, 30], [0, 1, 30], [0, 7, 7, 19, 30]):
        parts = [run(algorithm, **{k: v[i:j] for k, v in b.items()}) for i, j in itertools.pairwise(cut)]
        for at in (0, 2, 3):
            torch.testing.assert_close(torch.cat([p[at] for p in parts]), whole[at], rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("policy", "correction", "scope"),
    [
        ("ppo_clip", "none", "token"),
        ("ppo_clip", "token_truncate", "token"),
        ("ppo_clip", "sequence_mask", "sequence"),
        ("gspo", "none", "sequence"),
        ("gmpo", "none", "sequence"),
        ("vespo", "token_truncate", "sequence"),
    ],
)
def test_the_scope_covers_policy_loss_and_correction(policy, correction, scope):
    assert build_loss(AlgorithmConfig(loss=LossConfig(policy), correction=CorrectionConfig(correction))).scope == scope


def test_a_sequence_correction_weighs_whole_sequences():
    b = batch(9)
    algorithm = AlgorithmConfig(correction=CorrectionConfig("sequence_truncate", high=1.1))
    loss = run(algorithm, **b, cu_seqlens=CU)[0]
    plain = run(AlgorithmConfig(), **b)[0]
    for rows in SEQUENCES:
        at = list(rows)
        weight = min(math.exp((b["old_logprob"][at] - b["rollout_logprob"][at]).sum()), 1.1)
        torch.testing.assert_close(loss[at], plain[at] * weight)


def test_on_policy_the_current_log_prob_stands_in_for_the_old_one_in_a_correction():
    algorithm = AlgorithmConfig(correction=CorrectionConfig("token_truncate", high=1.3))
    loss, metrics, gradient, _ = run(algorithm, [-1.0, -1.0], rollout_logprob=[-1.1, -2.0], advantage=[1.0, -2.0])
    weight = torch.tensor([math.exp(0.1), 1.3], dtype=torch.float64)
    expected = weight * torch.tensor([-1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(metrics["pg_loss"], expected)


def test_sequences_with_a_negative_advantage_that_the_policy_has_moved_away_from_are_left_out():
    rollout = torch.tensor([-1.0] * 9, dtype=torch.float64)
    gap = torch.tensor([0.5, 0.3, 0.4, 0.19, 0.2, 0.3, 0.3, 0.1, 0.3], dtype=torch.float64)
    advantage = [1.0] * 3 + [-1.0] * 2 + [-1.0] * 4
    rows = {"rollout_logprob": rollout, "advantage": advantage, "ref_logprob": [-2.0] * 9, "cu_seqlens": CU}
    algorithm = AlgorithmConfig(off_policy_threshold=0.2, kl=KlConfig(coef=1.0))
    loss, metrics, gradient, _ = run(algorithm, rollout - gap, **rows)
    assert build_loss(algorithm).scope == "sequence"
    assert build_loss(algorithm).needs_rollout
    assert metrics["off_policy_masked"].tolist() == [0.0] * 5 + [1.0] * 4
    whole, _, whole_gradient, _ = run(replace(algorithm, off_policy_threshold=None), rollout - gap, **rows)
    torch.testing.assert_close(loss[:5], whole[:5])
    torch.testing.assert_close(gradient[:5], whole_gradient[:5])
    torch.testing.assert_close(loss[5:], metrics["kl"][5:])


def test_finished_correction_weights_are_used_as_they_are():
    loss = run(AlgorithmConfig(), [-1.0, -1.0], advantage=[1.0, 1.0], correction=[0.5, 0.0])[0]
    assert loss.tolist() == [-0.5, 0.0]


def test_the_correction_leaves_kl_and_entropy_alone():
    algorithm = AlgorithmConfig(kl=KlConfig(coef=1.0, estimator="k2"), entropy_coef=1.0)
    loss = run(algorithm, [-1.0], advantage=[1.0], ref_logprob=[-3.0], entropy=[0.25], correction=[0.0])[0]
    assert loss.item() == 2.0 - 0.25


def test_without_a_kl_coefficient_the_kl_is_measured_but_has_no_gradient():
    loss, metrics, gradient, _ = run(AlgorithmConfig(), [-1.0], advantage=[0.0], ref_logprob=[-1.5])
    assert metrics["kl"].item() == pytest.approx(0.1065306597, abs=6e-11)
    assert (loss.item(), gradient.item()) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("clamps", "expected"), [({}, 10.0), ({"output_clamp": None}, 12.6446468), ({"output_clamp": 3.0}, 3.0)]
)
def test_kl_clamps_reach_the_estimator(clamps, expected):
    algorithm = AlgorithmConfig(kl=KlConfig(coef=1.0, **clamps))
    assert run(algorithm, [-3.0], advantage=[0.0], ref_logprob=[-0.2])[0].item() == pytest.approx(expected, abs=5e-8)


def test_a_loss_keeps_the_precision_of_its_rows():
    stats = SimpleNamespace(logprob=torch.tensor([-1.0, -2.0], requires_grad=True), entropy=None, cu_seqlens=None)
    rows = {
        name: torch.tensor(row)
        for name, row in {"advantage": [1.0, -1.0], "weight": [0.5, 0.5], "old_logprob": [-1.1, -2.3]}.items()
    }
    for policy in ("ppo_clip", "cispo", "sapo", "gpg", "topr", "dppo_tv", "dppo_kl", "dro"):
        loss, metrics = build_loss(AlgorithmConfig(loss=LossConfig(policy)))(stats, rows)
        assert {loss.dtype} | {v.dtype for v in metrics.values()} == {torch.float32}


@pytest.mark.parametrize("policy", POLICY_LOSSES.names())
def test_no_rows_give_no_loss(policy):
    algorithm = AlgorithmConfig(loss=LossConfig(policy), kl=KlConfig(coef=0.1))
    b = {name: value[:0] for name, value in batch(1).items()}
    assert run(algorithm, **b, cu_seqlens=torch.tensor([0, 0]))[0].shape == (0,)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (AlgorithmConfig(loss=LossConfig("ppo-clip")), "policy loss='ppo-clip'.*'ppo_clip'"),
        (AlgorithmConfig(kl=KlConfig(estimator="k33")), "KL estimator='k33'.*'k3'"),
        (AlgorithmConfig(correction=CorrectionConfig("token_trunc")), "rollout correction='token_trunc'.*'token_tru"),
    ],
)
def test_unknown_names_are_refused_with_a_near_one(algorithm, message):
    with pytest.raises(ConfigError, match=message):
        build_loss(algorithm)


def test_a_further_loss_can_be_added_by_name(monkeypatch):
    monkeypatch.setattr(POLICY_LOSSES, "_entries", dict(POLICY_LOSSES._entries))

    @POLICY_LOSSES.register("plain")
    @scoped("batch")
    def plain(x, config):
        return -x.advantage * x.logprob * config.clip_high, {}

    algorithm = AlgorithmConfig(loss=LossConfig("plain", clip_high=0.5))
    assert build_loss(algorithm).scope == "batch"
    assert build_loss(replace(algorithm, correction=CorrectionConfig("sequence_mask"))).scope == "batch"
    assert run(algorithm, [-1.0], advantage=[4.0])[0].tolist() == [2.0]


@pytest.mark.parametrize("name", ["kl", "entropy", "loss", "trained"])
def test_a_metric_under_a_name_that_is_in_use_is_refused(monkeypatch, name):
    monkeypatch.setattr(POLICY_LOSSES, "_entries", dict(POLICY_LOSSES._entries))
    POLICY_LOSSES.register("mine")(scoped("token")(lambda x, config: (-x.logprob, {name: x.logprob})))
    with pytest.raises(ConfigError, match=f"algorithm.loss.name='mine' returns the metric '{name}'.*rename it"):
        run(AlgorithmConfig(loss=LossConfig("mine")), [-1.0], advantage=[4.0])
