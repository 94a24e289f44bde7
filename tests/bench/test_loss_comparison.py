"""Losses beside ppo_clip: which are compared, at which scope, and how their ratio is formed."""

from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.bench.loss_comparison import LIMIT, LIMIT_WITH_SCORING, MASKS, LossBench, algorithm_with, known_names, table
from hwgrpo.bench.times import Times
from hwgrpo.catalog import POLICY_LOSSES
from hwgrpo.config.schema import AlgorithmConfig


def test_every_loss_and_every_mask_that_needs_a_scoring_pass_is_compared():
    assert set(known_names()) == {*POLICY_LOSSES.names(), *MASKS}
    scored = [name for name in known_names() if build_loss(algorithm_with(AlgorithmConfig(), name)).selections]
    assert sorted(scored) == ["clip_cov", "kl_cov", "m2po_threshold", "top_entropy_share"]


def test_a_recipes_own_masks_are_on_neither_side():
    masked = AlgorithmConfig(top_entropy_share=0.5, m2po_threshold=0.1)
    of = {name: set(build_loss(algorithm_with(masked, name)).selections) for name in ("ppo_clip", "gspo", *MASKS)}
    assert of == {"ppo_clip": set(), "gspo": set(), "top_entropy_share": {"uncertain"}, "m2po_threshold": {"trusted"}}


def test_a_ratio_is_the_median_over_rounds_of_neighbours():
    bench = LossBench(
        "gspo", "sequence", False, Times([2.0, 9.0, 3.0], [1.0, 1.0, 4.0]), Times([1.0, 3.0, 2.0], [1.0, 2.0, 2.0])
    )
    assert bench.ratios == (2.0, 1.0)
    assert (bench.limit, LossBench("kl_cov", "token", True).limit) == (LIMIT, LIMIT_WITH_SCORING)
    assert table([bench])[-1] == "| gspo | sequence |  | 1000.0 | 1.000 | 2.000 | 1.05 |"
