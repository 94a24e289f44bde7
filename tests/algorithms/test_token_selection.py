"""Tokens selected of a whole update: golden values, bounds, ties, and no tokens at all."""

import pytest
import torch

from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.algorithms.token_selection import (
    UpdateTokens,
    covariances,
    entropy_weights,
    highest_entropies,
    largest_covariances,
    some_covariances,
    trusted_second_moment,
)
from hwgrpo.config.schema import AlgorithmConfig, LossConfig


def tokens(**given: list[float]) -> UpdateTokens:
    size = len(next(iter(given.values())))
    names = ("logprob_R", "old_logprob_R", "rollout_logprob_R", "entropy_R", "advantage_R")
    values = {name: torch.tensor(given.get(name[:-2], [0.0] * size), dtype=torch.float64) for name in names}
    return UpdateTokens(**values, order_R=torch.arange(size).flip(0), lengths_S=torch.tensor([size]))


def chosen(selected: torch.Tensor) -> list[int]:
    return selected.nonzero()[:, 0].tolist()


def test_m2po_leaves_out_the_largest_until_the_rest_may_stay():
    given = tokens(old_logprob=[0.1, 0.2, 1.0, 0.05])
    assert chosen(trusted_second_moment(given, threshold=0.04)) == [0, 1, 3]  # means 0.263125, then 0.0175
    assert chosen(trusted_second_moment(given, threshold=0.27)) == [0, 1, 2, 3]
    assert chosen(trusted_second_moment(given, threshold=1e-9)) == [3], "one stays in any case"


def test_entropies_are_compared_with_a_quantile_between_two_of_them():
    given = tokens(entropy=[0.1, 0.4, 0.2, 0.3, 0.5])
    assert chosen(highest_entropies(given, share=0.5)) == [1, 3, 4]  # at least the median
    assert chosen(highest_entropies(given, share=0.3)) == [1, 4]  # at least 0.38
    assert chosen(highest_entropies(given, share=1.0)) == [0, 1, 2, 3, 4]


def test_entropies_that_differ_by_rounding_are_selected_together():
    given = tokens(entropy=[0.5, 0.3, 0.3 + 1e-7, 0.1])
    assert chosen(highest_entropies(given, share=2 / 3)) == [0, 1, 2]
    assert chosen(highest_entropies(given, share=0.5)) == [0, 1, 2]


COVARYING = {"logprob": [-1.0, -2.0, -3.0, -4.0], "advantage": [1.0, 1.0, -1.0, -1.0]}


def test_covariances_are_those_of_advantage_and_log_prob_over_the_update():
    assert covariances(tokens(**COVARYING)).tolist() == [1.5, 0.5, 0.5, 1.5]


def test_the_share_of_largest_covariances_is_at_least_one_token_and_the_first_of_equal_ones():
    for share, expected in ((0.5, [0, 3]), (0.25, [0]), (1e-4, [0]), (0.75, [0, 1, 3])):
        assert chosen(largest_covariances(tokens(**COVARYING), LossConfig(), share=share)) == expected


def test_of_covariances_between_the_bounds_chance_selects_and_clipped_tokens_are_left_alone():
    config, given = LossConfig(), tokens(**COVARYING, old_logprob=COVARYING["logprob"])
    for bounds, share, expected in (((0.4, 1.0), 1.0, [1, 2]), ((0.4, 1.0), 0.25, [2]), ((1.6, 5.0), 1.0, [])):
        found = some_covariances(given, config, share=share, low=bounds[0], high=bounds[1])
        assert chosen(found) == expected, "the permutation is the reverse order"
    clipped = tokens(**COVARYING, old_logprob=[-2.0, -2.0, -3.0, -4.0])  # the first has a ratio of e
    assert chosen(some_covariances(clipped, config, share=1.0, low=0.0, high=5.0)) == [1, 2, 3]


@pytest.mark.parametrize(
    "select",
    [
        lambda none: trusted_second_moment(none, threshold=1.0),
        lambda none: highest_entropies(none, share=0.5),
        lambda none: entropy_weights(none, share=0.5),
        lambda none: largest_covariances(none, LossConfig(), share=0.5),
        lambda none: some_covariances(none, LossConfig(), share=0.5, low=0.0, high=1.0),
    ],
)
def test_of_no_tokens_none_is_selected(select):
    assert select(tokens(logprob=[])).tolist() == []


def test_the_settings_say_what_is_selected_and_a_losss_arguments_reach_its_selection():
    assert build_loss(AlgorithmConfig()).selections == {}
    both = build_loss(AlgorithmConfig(m2po_threshold=0.04, top_entropy_share=0.2)).selections
    assert sorted(both) == ["trusted", "uncertain"]
    for entropy in (AlgorithmConfig(entropy_coef=0.1), AlgorithmConfig(entropy_target=1.0)):
        entropy.top_entropy_share = 0.5
        found = build_loss(entropy).selections["bonus"](tokens(logprob=[-1.0] * 4, entropy=[0.1, 0.9, 0.2, 0.8]))
        assert found.tolist() == [0.0, 2.0, 0.0, 2.0]  # a mean over the selected tokens
    for share, count in ((0.5, 2), (0.75, 3)):
        loss = build_loss(AlgorithmConfig(loss=LossConfig("kl_cov", kwargs={"share": share})))
        assert int(loss.selections["selected"](tokens(**COVARYING)).sum()) == count
