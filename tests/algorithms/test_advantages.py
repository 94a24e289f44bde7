"""Advantage estimators: golden values, exact zeros, ragged and invalid groups, singletons."""

import itertools
import math
import statistics
from itertools import chain

import pytest
import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.algorithms.groups import group_statistics
from hwgrpo.algorithms.token_advantages import TokenProbs, is_token_level, mean_over_tokens
from hwgrpo.catalog import ADVANTAGES
from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.values import StepRewards
from tests.support.numbers.token_probs import token_probs


def one_group(rewards, estimator="grpo", lengths=None, **options):
    rewards_S = torch.tensor(rewards, dtype=torch.float64)
    return group_advantages(
        rewards_S,
        torch.zeros(len(rewards), dtype=torch.int64),
        torch.ones(len(rewards), dtype=torch.bool),
        AdvantageConfig(estimator, **options),
        None if lengths is None else torch.tensor(lengths),
    )


def assert_close(actual, expected, digits):
    """Compare with numbers printed with so many decimals; the results are fp32."""
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=1.2e-7, atol=0.5000001 * 10.0**-digits)


W, X, Y = [1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.1, 0.5, 0.9]


@pytest.mark.parametrize(
    ("rewards", "options", "expected", "digits"),
    [
        (W, {"eps": 1e-6}, [0.8660239, -0.8660239, -0.8660239, 0.8660239], 7),
        (W, {"eps": 1e-4}, [0.86587543, -0.86587543, -0.86587543, 0.86587543], 8),
        (W, {"eps": 1e-5}, [0.8660104, -0.8660104, -0.8660104, 0.8660104], 7),
        (W, {"eps": 1e-9}, [0.8660254, -0.8660254, -0.8660254, 0.8660254], 7),
        (W, {"std": "none"}, [0.5, -0.5, -0.5, 0.5], 8),
        (X, {"eps": 1e-6}, [1.499997, -0.499999, -0.499999, -0.499999], 6),
        (X, {"eps": 1e-4}, [1.49970006, -0.49990002, -0.49990002, -0.49990002], 8),
        (X, {"eps": 1e-5}, [1.49997, -0.49999, -0.49999, -0.49999], 5),
        (X, {"eps": 1e-9}, [1.5, -0.5, -0.5, -0.5], 7),
        (X, {"std": "none"}, [0.75, -0.25, -0.25, -0.25], 8),
        (Y, {"eps": 1e-6}, [-0.9999975, 0.0, 0.9999975], 7),
        (Y, {"eps": 1e-4}, [-0.99975006, 0.0, 0.99975006], 8),
        (Y, {"eps": 1e-5}, [-0.999975, 0.0, 0.999975], 6),
        (Y, {"eps": 1e-9}, [-1.0, 0.0, 1.0], 7),
        (Y, {"std": "none"}, [-0.4, 0.0, 0.4], 8),
    ],
)
def test_grpo_gives_the_golden_advantages_of_each_convention(rewards, options, expected, digits):
    assert_close(one_group(rewards, **options), expected, digits)


@pytest.mark.parametrize(
    ("estimator", "rewards", "lengths", "options", "expected", "digits"),
    [
        ("rloo", X, None, {}, [1.0, -1 / 3, -1 / 3, -1 / 3], 8),
        ("opo", X, [10, 20, 30, 40], {}, [0.9, -0.1, -0.1, -0.1], 8),
        ("gpg", W, None, {}, [1.0, -1.0, -1.0, 1.0], 8),
        ("grpo_passk", [1.0, 0.4, 0.0, 0.0], None, {"std": "none"}, [0.6, 0.0, 0.0, 0.0], 8),
        ("grpo_passk", [1.0, 0.4, 0.0, 0.0], None, {}, [1.2696194, 0.0, 0.0, 0.0], 7),
        ("max_rl", X, None, {}, [3.0, -1.0, -1.0, -1.0], 8),
        ("online_rft", [1.0, 0.5, 0.0, 0.7], None, {}, [1.0, 0.0, 0.0, 1.0], 8),
        ("online_rft", [1.0, 0.5, 0.0, 0.7], None, {"kwargs": {"threshold": 0.8}}, [1.0, 0.0, 0.0, 0.0], 8),
        ("grpo", X, None, {"std": "none", "clip": 0.6}, [0.6, -0.25, -0.25, -0.25], 8),
    ],
)
def test_other_estimators_give_their_golden_advantages(estimator, rewards, lengths, options, expected, digits):
    assert_close(one_group(rewards, estimator, lengths, **options), expected, digits)


def test_population_std_divides_by_n():
    assert_close(one_group(W, eps=0.0, std_correction=0), [1.0, -1.0, -1.0, 1.0], 8)


LENGTHS = torch.tensor([3, 1, 2, 5, 4, 7, 2])
GROUPS = torch.tensor([4, 9, 4, 4, 9, 4, 9])
VALID = torch.tensor([True, True, False, True, True, True, True])
REWARDS = torch.tensor([1.0, 0.25, float("nan"), 0.0, 0.5, 0.2, 2.0], dtype=torch.float64)


def by_sequence(advantages, lengths, config):
    """Return [S], the means over tokens where there is an advantage for each."""
    return mean_over_tokens(advantages, lengths) if is_token_level(config, kl_in_reward=False) else advantages


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES.names()))
@pytest.mark.parametrize("std", ["group", "none", "batch"])
def test_ragged_interleaved_groups_agree_with_the_valid_members_alone(estimator, std):
    config = AdvantageConfig(estimator, std=std)
    probs = token_probs(LENGTHS)
    mixed = group_advantages(REWARDS, GROUPS, VALID, config, LENGTHS, token_probs=probs)
    mixed = by_sequence(mixed, LENGTHS, config)
    assert mixed[2] == 0
    keep = VALID.nonzero()[:, 0]
    order = keep[GROUPS[keep].argsort(stable=True)]
    everyone = torch.ones(len(order), dtype=torch.bool)
    ordered = REWARDS[order], GROUPS[order], everyone, config, LENGTHS[order]
    alone = group_advantages(*ordered, token_probs=token_probs(LENGTHS[order]))
    alone = by_sequence(alone, LENGTHS[order], config)
    assert alone.count_nonzero() >= 2
    torch.testing.assert_close(mixed[order], alone)


def test_batch_std_is_that_of_all_valid_rewards():
    actual = group_advantages(REWARDS, GROUPS, VALID, AdvantageConfig(std="batch", eps=1e-4))
    std = REWARDS[VALID].std() + 1e-4
    for group in (4, 9):
        members = VALID & (group == GROUPS)
        expected = (REWARDS[members] - REWARDS[members].mean()) / std
        torch.testing.assert_close(actual[members], expected.float())


def test_reinforce_plus_plus_baseline_whitens_over_tokens():
    everyone = torch.ones(4, dtype=torch.bool)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.1], dtype=torch.float64)
    lengths = torch.tensor([3, 1, 2, 4])
    actual = group_advantages(
        rewards,
        torch.tensor([0, 0, 1, 1]),
        everyone,
        AdvantageConfig("reinforce_plus_plus_baseline"),
        lengths,
    )
    tokens = torch.tensor([0.5, -0.5, 0.2, -0.2], dtype=torch.float64).repeat_interleave(lengths)
    white = (tokens - tokens.mean()) * torch.rsqrt(tokens.var() + 1e-8)
    torch.testing.assert_close(actual, white[[0, 3, 4, 6]].float())


def test_batch_statistics_of_reinforce_plus_plus_baseline_include_silent_groups():
    everyone = torch.ones(4, dtype=torch.bool)
    actual = group_advantages(
        torch.tensor([1.0, 0.0, 0.3, 0.3], dtype=torch.float64),
        torch.tensor([0, 0, 1, 1]),
        everyone,
        AdvantageConfig("reinforce_plus_plus_baseline"),
        torch.tensor([1, 1, 2, 2]),
    )
    scale = torch.tensor([0.5, -0.5, 0, 0, 0, 0], dtype=torch.float64).std().item()
    assert_close(actual, [0.5 / scale, -0.5 / scale, 0.0, 0.0], 6)


@pytest.mark.parametrize("estimator", sorted({*ADVANTAGES.names()} - {"reinforce_plus_plus", "online_rft"}))
@pytest.mark.parametrize("std", ["group", "none", "batch"])
@pytest.mark.parametrize(("reward", "n"), [(0.3, 8), (0.1, 3), (0.7, 7), (1e8 + 0.1, 6), (0.0, 4)])
def test_equal_rewards_give_exactly_zero(estimator, std, reward, n):
    """The mean of n copies of 0.1 is not 0.1 in floating point; another group keeps the batch statistics alive."""
    rewards = torch.tensor([reward] * n + [1.0, 0.0, 0.2], dtype=torch.float64)
    groups = torch.tensor([0] * n + [1] * 3)
    advantages = group_advantages(
        rewards,
        groups,
        torch.ones(n + 3, dtype=torch.bool),
        AdvantageConfig(estimator, std=std, eps=0.0),
        torch.arange(1, n + 4),
        token_probs=token_probs(torch.arange(1, n + 4)),
    )
    assert torch.equal(advantages[:n], torch.zeros(n))
    assert advantages[n:].count_nonzero() >= 1


def test_rewards_that_differ_in_the_last_bit_still_have_a_signal():
    rewards = torch.tensor([0.3, math.nextafter(0.3, 1)], dtype=torch.float64)
    assert group_statistics(rewards, torch.zeros(2).long(), torch.ones(2).bool())[:2] == (0, 1)


@pytest.mark.parametrize(
    ("estimator", "options", "expected"),
    [
        ("grpo", {}, 0.7 / (1 + 1e-6)),
        ("grpo", {"std": "none"}, 0.7),
        ("rloo", {}, 0.7),
        ("opo", {}, 0.7),
    ],
)
def test_a_group_of_one_is_worth_zero_or_its_raw_reward(estimator, options, expected):
    rewards = torch.tensor([0.7, 1.0, 0.0], dtype=torch.float64)
    groups = torch.tensor([0, 1, 1])
    valid = torch.ones(3, dtype=torch.bool)
    lengths = torch.tensor([2, 3, 4])
    for singleton, value in (("zero", 0.0), ("raw", expected)):
        config = AdvantageConfig(estimator, singleton=singleton, **options)
        actual = group_advantages(rewards, groups, valid, config, lengths)
        assert actual[0].item() == pytest.approx(value, rel=1e-7, abs=0)
        assert actual[1] > 0 > actual[2]


def test_a_group_with_one_valid_member_is_a_group_of_one():
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    valid = torch.tensor([True, False])
    assert group_advantages(rewards, torch.zeros(2).long(), valid, AdvantageConfig()).tolist() == [0.0, 0.0]
    with pytest.raises(DataError, match=r"prompt 5 has one valid sequence.*rollout.n"):
        group_advantages(rewards, torch.full((2,), 5).long(), valid, AdvantageConfig(singleton="error"))


def test_a_group_without_valid_members_gets_zeros():
    rewards = torch.tensor([float("nan"), 0.5, 1.0], dtype=torch.float64)
    valid = torch.tensor([False, True, True])
    advantages = group_advantages(rewards, torch.tensor([0, 1, 1]), valid, AdvantageConfig(singleton="error"))
    assert advantages[0] == 0
    assert advantages[1] < 0 < advantages[2]


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES.names()))
def test_no_sequences_give_no_advantages(estimator):
    empty = torch.zeros(0, dtype=torch.int64)
    nothing = empty.double(), empty, empty.bool(), AdvantageConfig(estimator), empty
    assert group_advantages(*nothing, token_probs=token_probs(empty)).shape == (0,)


def test_passk_ties_for_the_best_have_no_lead():
    assert one_group([1.0, 1.0, 0.5, 0.0], "grpo_passk").tolist() == [0.0] * 4


def test_passk_never_takes_an_invalid_sequence_for_the_second_best():
    rewards = torch.tensor([-1.0, -3.0, float("nan")], dtype=torch.float64)
    valid = torch.tensor([True, True, False])
    actual = group_advantages(rewards, torch.zeros(3).long(), valid, AdvantageConfig("grpo_passk", std="none"))
    assert actual.tolist() == [2.0, 0.0, 0.0]


def test_passk_without_std_raises_the_best_of_a_group_in_expectation_and_may_lower_the_mean():
    rewards = torch.tensor([0.0, 0.22, 0.9, 1.0], dtype=torch.float64)
    logits = torch.tensor([2.3, 2.7, 10.0, 0.5], dtype=torch.float64, requires_grad=True)
    probabilities = logits.softmax(-1)
    found, best = torch.zeros_like(rewards), torch.zeros((), dtype=torch.float64)
    for group in itertools.product(range(4), repeat=4):
        drawn = torch.tensor(group)
        weight = probabilities[drawn].prod()
        advantages = one_group(rewards[drawn].tolist(), "grpo_passk", std="none")
        score = (torch.as_tensor(advantages, dtype=torch.float64) * probabilities[drawn].log()).sum()
        found += weight.detach() * torch.autograd.grad(score, logits, retain_graph=True)[0]
        best = best + weight * rewards[drawn].max()
    expected = torch.autograd.grad(best, logits, retain_graph=True)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    mean = torch.autograd.grad((probabilities * rewards).sum(), logits)[0]
    assert float(found @ mean / found.norm() / mean.norm()) < -0.5


def test_passk_refuses_a_raw_group_of_one():
    assert one_group([1.0, 0.0], "grpo_passk", std="none", singleton="raw").tolist() == [1.0, 0.0]
    with pytest.raises(ConfigError, match="second best"):
        one_group([1.0], "grpo_passk", singleton="raw")


def test_group_statistics_count_groups_of_equal_valid_rewards():
    rewards = torch.tensor([0.3, 0.3, 1.0, 0.0, 0.5, 0.5, 9.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1, 2, 3, 3])
    valid = torch.tensor([True, True, True, True, False, True, False])
    assert group_statistics(rewards, groups, valid)[:2] == (2, 3)


def test_reinforce_plus_plus_compares_with_the_batch_and_not_with_the_group():
    rewards = torch.tensor([1.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    lengths, everyone = torch.tensor([3, 1, 2, 4]), torch.ones(4, dtype=torch.bool)
    config = AdvantageConfig("reinforce_plus_plus")
    actual = group_advantages(rewards, torch.tensor([0, 0, 1, 1]), everyone, config, lengths)
    tokens = rewards.repeat_interleave(lengths)
    white = (tokens - tokens.mean()) * torch.rsqrt(tokens.var() + 1e-8)
    torch.testing.assert_close(actual, white[[0, 3, 4, 6]].float())
    same = group_advantages(torch.full_like(rewards, 0.3), torch.tensor([0, 0, 1, 1]), everyone, config, lengths)
    assert torch.equal(same, torch.zeros(4))


def test_max_rl_refuses_negative_rewards_and_a_group_without_success_is_0():
    with pytest.raises(DataError, match=r"max_rl and a reward of -0.5: .*must not be negative; shift them"):
        one_group([1.0, -0.5], "max_rl")
    assert one_group([0.0, 0.0], "max_rl").tolist() == [0.0, 0.0]


def test_gdpo_gives_rewards_the_say_of_their_weights_and_leaves_out_what_is_missing():
    nan = float("nan")
    rewards = torch.zeros(4, dtype=torch.float64)
    parts = {
        "small": (1.0, torch.tensor([1e-3, 0.0, 1e-3, 0.0], dtype=torch.float64)),
        "large": (0.5, torch.tensor([0.0, 0.0, 1e3, nan], dtype=torch.float64)),
    }
    everyone = torch.ones(4, dtype=torch.bool)
    found = group_advantages(
        rewards, torch.zeros(4).long(), everyone, AdvantageConfig("gdpo", eps=0), torch.ones(4), parts
    )
    small = torch.tensor([0.75**0.5, -(0.75**0.5), 0.75**0.5, -(0.75**0.5)], dtype=torch.float64)
    large = torch.tensor([-(3**-0.5), -(3**-0.5), 2 * 3**-0.5, 0], dtype=torch.float64)
    both = small + 0.5 * large
    torch.testing.assert_close(found, ((both - both.mean()) / (both.var() + 1e-8).sqrt()).float())


def test_remax_compares_with_the_greedy_response_and_without_one_with_the_group():
    rewards = torch.tensor([1.0, 1.0, 0.2, 9.0, 0.5, 0.1, 0.3], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1, 2, 3, 3])
    valid = torch.tensor([True, True, True, False, True, True, True])
    greedy = torch.tensor([0.25, 0.25, 0.7, 0.7, 0.5, math.nan, math.nan], dtype=torch.float64)
    found = group_advantages(rewards, groups, valid, AdvantageConfig("remax", singleton="error"), greedy_S=greedy)
    assert_close(found, [0.75, 0.75, -0.5, 0.0, 0.0, -0.1, 0.1], 7)


def test_remax_gives_a_token_the_kl_from_itself_on():
    valid, lengths = torch.tensor([True, True, False, True, True]), torch.tensor([2, 3, 2, 1, 2])
    kl = torch.tensor([0.5, -1.0, 0.0, 1.0, 2.0, 9.0, 9.0, 0.25, 0.1, 0.2]).double()
    rewards = torch.tensor([1.0, 0.5, 7.0, 0.0, 3.0]).double() - torch.tensor([-0.5, 3.0, 18.0, 0.25, 0.3]).double()
    groups, greedy = torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0.25, 0.25, 0.25, torch.nan, 2.0]).double()
    found = group_advantages(rewards, groups, valid, AdvantageConfig("remax"), lengths, greedy_S=greedy, kl_R=kl)
    # r - g less the KL from the token on; 0 where invalid, and for a group of one without a baseline
    expected = [1.25, 1.75, -2.75, -2.75, -1.75, 0, 0, 0, 0.7, 0.8]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_reinforce_plus_plus_whitens_the_reward_less_the_kl_from_a_token_on():
    valid, lengths = torch.tensor([True, False, True, True]), torch.tensor([2, 1, 0, 3])
    kl = torch.tensor([0.5, -1.0, 9.0, 0.0, 1.0, 2.0]).double()
    rewards = torch.tensor([1.0, 7.0, 4.0, 0.5]).double() - torch.tensor([-0.5, 9.0, 0.0, 3.0]).double()
    config, group = AdvantageConfig("reinforce_plus_plus"), torch.zeros(4, dtype=torch.int64)
    found = group_advantages(rewards, group, valid, config, lengths, kl_R=kl)
    to_go = torch.tensor([1.5, 2.0, -2.5, -2.5, -1.5]).double()
    whitened = ((to_go - to_go.mean()) / to_go.std()).tolist()
    assert found.tolist() == pytest.approx([*whitened[:2], 0, *whitened[2:]], abs=1e-6)
    equal = group_advantages(rewards * 0 + 0.1, group, valid, config, lengths, kl_R=kl * 0)
    assert equal.tolist() == [0.0] * 6, "all tokens have the same, and rounding is no signal"


def test_gdpo_per_response_whitens_without_their_lengths():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5, 0.25, 1.0], dtype=torch.float64)
    groups, everyone = torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6, dtype=torch.bool)
    config = AdvantageConfig("gdpo", eps=0.25, kwargs={"per_response": 1})
    normalized = torch.cat([(part - part.mean()) / (part.std() + 0.25) for part in rewards.split(3)])
    expected = (normalized - normalized.mean()) / (normalized.std() + 0.25)
    for lengths in (torch.ones(6), torch.tensor([1, 9, 2, 5, 1, 30])):
        found = group_advantages(rewards, groups, everyone, config, lengths)
        torch.testing.assert_close(found, expected.float())


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_gdpo_per_response_is_0_where_responses_do_not_differ_and_never_no_number(eps):
    config = AdvantageConfig("gdpo", eps=eps, singleton="raw", kwargs={"per_response": 1})
    for rewards, valid in (([0.7], [True]), ([0.7, 0.1], [True, False]), ([0.3, 0.3], [True, True]), ([0.3], [False])):
        rewards, valid = torch.tensor(rewards, dtype=torch.float64), torch.tensor(valid)
        found = group_advantages(rewards, torch.arange(len(rewards)), valid, config, torch.ones(len(rewards)))
        assert found.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("estimator", ["opo", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "gdpo"])
def test_estimators_that_weigh_by_tokens_ask_for_lengths(estimator):
    with pytest.raises(ConfigError, match=f"{estimator}.*lengths_S"):
        one_group(X, estimator)


def test_half_precision_rewards_are_refused():
    with pytest.raises(DataError, match=r"torch.bfloat16.*float64"):
        group_advantages(torch.zeros(2).bfloat16(), torch.zeros(2).long(), torch.ones(2).bool(), AdvantageConfig())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_valid_sequence_with_a_non_finite_reward_is_refused(bad):
    with pytest.raises(DataError, match=f"reward {bad} of sequence 1"):
        one_group([0.0, bad, 1.0])


def test_an_unknown_estimator_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"advantage estimator='rlo'.*'rloo'"):
        one_group(X, "rlo")


# Process supervision, against the formula of DeepSeekMath 4.1.3 written out as loops over tokens

STEP_GROUP = [0, 0, 1, 1, 1, 2]
STEP_LENGTHS = [5, 3, 4, 0, 2, 3]
STEPS = [[1.0, 0.0, 0.5], [0.25], [1.0, 2.0], [0.5], [3.0, 0.0], [1.0, 1.0]]
STEP_ENDS = [[0, 3, 4], [2], [1, 3], [-1], [1, 1], [0, 2]]
ALL_VALID = [True] * 6


def steps_of(rewards: list[list[float]], ends: list[list[int]]) -> StepRewards:
    counts = torch.tensor([0, *map(len, rewards)])
    return StepRewards(torch.tensor([*chain(*rewards)]).double(), torch.tensor([*chain(*ends)]), counts.cumsum(0))


def process_advantages(
    config: AdvantageConfig, valid: list[bool] = ALL_VALID, steps: StepRewards | None = None
) -> list[float]:
    steps = steps_of(STEPS, STEP_ENDS) if steps is None else steps
    totals = torch.tensor([sum(each) for each in STEPS]).double()
    group, lengths = torch.tensor(STEP_GROUP), torch.tensor(STEP_LENGTHS)
    return group_advantages(totals, group, torch.tensor(valid), config, lengths, None, steps).tolist()


def paper_advantages(valid: list[bool] = ALL_VALID, std: str = "group", correction: int = 1) -> list[float]:
    """Loop over responses and tokens: the sum of normalised rewards of the steps that end at the token or after it."""
    everything = [r for steps, ok in zip(STEPS, valid, strict=True) if ok for r in steps]
    advantages = []
    for group, steps, ends, length, ok in zip(STEP_GROUP, STEPS, STEP_ENDS, STEP_LENGTHS, valid, strict=True):
        members = [s for s, g, v in zip(STEPS, STEP_GROUP, valid, strict=True) if g == group and v]
        rewards = [r for each in members for r in each]
        if not ok or len(set(rewards)) < 2:
            advantages += [0.0] * length
            continue
        deviation = statistics.stdev if correction else statistics.pstdev
        scale = 1.0 if std == "none" else deviation(rewards if std == "group" else everything) + 1e-6
        normalised = [(r - statistics.mean(rewards)) / scale for r in steps]
        for token in range(length):
            advantages.append(sum(r for r, end in zip(normalised, ends, strict=True) if end >= token))
    return advantages


@pytest.mark.parametrize("valid", [ALL_VALID, [True, True, False, True, True, True]], ids=["all", "one invalid"])
@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_process_supervision_is_that_of_the_paper(std: str, correction: int, valid: list[bool]):
    config = AdvantageConfig("process", std=std, std_correction=correction)
    assert process_advantages(config, valid) == pytest.approx(
        paper_advantages(valid, std, correction), rel=1e-5, abs=1e-6
    )


def test_a_group_whose_steps_have_equal_rewards_gets_exactly_0():
    assert process_advantages(AdvantageConfig("process"))[-3:] == [0.0, 0.0, 0.0]
    rewards = [[0.1] * 3, [0.1], *STEPS[2:]]
    assert process_advantages(AdvantageConfig("process"), steps=steps_of(rewards, STEP_ENDS))[:8] == [0.0] * 8


def test_responses_of_one_step_have_the_advantages_of_grpo():
    totals, group, lengths = torch.tensor([1.0, 0.0, 0.5]).double(), torch.zeros(3).long(), torch.tensor([2, 1, 3])
    valid = torch.ones(3).bool()
    ours = group_advantages(totals, group, valid, AdvantageConfig("process"), lengths)
    outcome = group_advantages(totals, group, valid, AdvantageConfig("grpo"), lengths)
    assert torch.equal(ours, torch.repeat_interleave(outcome, lengths))


def test_process_supervision_needs_the_lengths():
    with pytest.raises(ConfigError, match="pass lengths_S"):
        group_advantages(
            torch.ones(2).double(), torch.zeros(2).long(), torch.ones(2).bool(), AdvantageConfig("process")
        )


def test_no_responses_have_no_advantages_of_steps():
    nothing = torch.zeros(0)
    config = AdvantageConfig("process")
    assert group_advantages(nothing.double(), nothing.long(), nothing.bool(), config, nothing.long()).shape == (0,)


# The optimal token baseline, against its formula as loops

TOKEN_GROUP = [3, 1, 3, 1, 3, 2, 1]
TOKEN_LENGTHS = [4, 2, 6, 0, 3, 5, 7]
TOKEN_REWARDS = [1.0, 0.25, 0.0, 0.5, -0.5, 1.0, 2.0]
SEVEN_VALID = [True] * 7


def probs_of(pi: torch.Tensor, squares: torch.Tensor) -> TokenProbs:
    return TokenProbs(pi.log().float(), squares.float())


def some_probs() -> TokenProbs:
    pi, rest = torch.rand(2, sum(TOKEN_LENGTHS), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return probs_of(pi, pi.square() + rest * (1 - pi).square())


def baseline_advantages(
    probs: TokenProbs, valid: list[bool] = SEVEN_VALID, singleton: str = "zero", **more: list
) -> list[float]:
    rewards = torch.tensor(more.get("rewards", TOKEN_REWARDS), dtype=torch.float64)
    group, lengths = (torch.tensor(more.get(n, d)) for n, d in (("group", TOKEN_GROUP), ("lengths", TOKEN_LENGTHS)))
    config = AdvantageConfig("optimal_token_baseline", singleton=singleton)
    return group_advantages(rewards, group, torch.tensor(valid), config, lengths, token_probs=probs).tolist()


def formula_advantages(probs: TokenProbs, valid: list[bool] = SEVEN_VALID, singleton: str = "zero") -> list[float]:
    """Loop over responses and tokens."""
    starts = [sum(TOKEN_LENGTHS[:i]) for i in range(len(TOKEN_LENGTHS))]
    weights: list[list[float]] = []
    for start, length in zip(starts, TOKEN_LENGTHS, strict=True):
        total, row = 0.0, []
        for k in range(start, start + length):
            total += 1 - 2 * float(probs.logprobs[k].double().exp()) + float(probs.square_sums[k])
            row.append(total)
        weights.append(row)
    advantages = []
    for i, length in enumerate(TOKEN_LENGTHS):
        group = [j for j in range(len(TOKEN_LENGTHS)) if TOKEN_GROUP[j] == TOKEN_GROUP[i] and valid[j]]
        silent = len({TOKEN_REWARDS[j] for j in group}) < 2 and not (len(group) == 1 and singleton == "raw")
        for t in range(length):
            there = [j for j in group if TOKEN_LENGTHS[j] > t]
            baseline = 0.0
            if len(there) > 1:
                above = sum(weights[j][t] * TOKEN_REWARDS[j] for j in there)
                baseline = above / (sum(weights[j][t] for j in there) + 1e-8)
            advantages.append(0.0 if silent or not valid[i] else TOKEN_REWARDS[i] - baseline)
    return advantages


def test_the_optimal_token_baseline_gives_the_golden_advantages():
    probs = probs_of(torch.tensor([0.9, 0.5, 0.8, 0.6, 0.7, 0.9]), torch.tensor([0.82, 0.4, 0.7, 0.5, 0.55, 0.82]))
    given = baseline_advantages(probs, [True, True], rewards=[1.0, 0.0], group=[0, 0], lengths=[3, 3])
    baselines = [0.0625, 0.48275862, 0.52525253]
    # the first norm is 0.02, a difference of numbers near 1 that come in fp32
    assert given == pytest.approx([1 - b for b in baselines] + [-b for b in baselines], abs=1e-6)


@pytest.mark.parametrize(
    "valid",
    [SEVEN_VALID, [True, True, False, True, True, True, True], [True, True, True, True, False, False, False]],
    ids=["all", "the longest invalid", "groups of one and none"],
)
@pytest.mark.parametrize("singleton", ["zero", "raw"])
def test_the_optimal_token_baseline_is_that_of_the_formula(singleton: str, valid: list[bool]):
    given = baseline_advantages(some_probs(), valid, singleton)
    assert given == pytest.approx(formula_advantages(some_probs(), valid, singleton), rel=1e-6, abs=1e-7)
    assert any(given)


def test_a_token_that_one_response_has_has_no_baseline():
    first = sum(TOKEN_LENGTHS[:2])
    given = baseline_advantages(some_probs())
    assert given[first + 4 : first + 6] == [0.0, 0.0], "its reward, at the two tokens after the second longest"
    assert given[first + 3] != 0
    assert given[-5:] == [2.0] * 5


def test_a_group_of_equal_rewards_gets_exactly_0_at_every_token():
    given = baseline_advantages(some_probs(), rewards=[0.3, 0.25, 0.3, 0.5, 0.3, 1.0, 2.0])
    assert given[:4] == [0.0] * 4
    assert given[6:15] == [0.0] * 9
    assert any(given[-7:])


def test_a_group_of_one_may_be_an_error_for_the_optimal_token_baseline():
    with pytest.raises(DataError, match=r"prompt 2 has one valid sequence"):
        baseline_advantages(some_probs(), singleton="error")


def test_certain_tokens_weigh_nothing_however_their_probabilities_are_rounded():
    pi = torch.tensor([1.0, 0.5, 1.0, 0.5])
    squares = torch.tensor([1 - 1.2e-7, 0.5, 1 + 1.2e-7, 0.5])  # 1 - 2 + squares is once below 0
    given = baseline_advantages(probs_of(pi, squares), [True, True], rewards=[1.0, 0.0], group=[0, 0], lengths=[2, 2])
    assert given == pytest.approx([1.0, 0.5, 0.0, -0.5], abs=1e-6)


def test_the_optimal_token_baseline_needs_probabilities_and_lengths():
    nothing, config = torch.zeros(0), AdvantageConfig("optimal_token_baseline")
    given = nothing.double(), nothing.long(), nothing.bool(), config
    with pytest.raises(ConfigError, match=r"'optimal_token_baseline' reads the probabilities of response tokens: pass"):
        group_advantages(*given, nothing.long())
    with pytest.raises(ConfigError, match="one advantage per token: pass lengths_S"):
        group_advantages(*given, token_probs=TokenProbs(nothing, nothing))
