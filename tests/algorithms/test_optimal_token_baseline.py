"""The optimal token baseline against its golden numbers, its formula as loops, and what a group's size changes."""

import pytest
import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.algorithms.token_advantages import TokenProbs
from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.errors import ConfigError, DataError

GROUP = [3, 1, 3, 1, 3, 2, 1]
LENGTHS = [4, 2, 6, 0, 3, 5, 7]
REWARDS = [1.0, 0.25, 0.0, 0.5, -0.5, 1.0, 2.0]
VALID = [True] * 7


def probs_of(pi: torch.Tensor, squares: torch.Tensor) -> TokenProbs:
    return TokenProbs(pi.log().float(), squares.float())


def some_probs() -> TokenProbs:
    pi, rest = torch.rand(2, sum(LENGTHS), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return probs_of(pi, pi.square() + rest * (1 - pi).square())


def found(probs: TokenProbs, valid: list[bool] = VALID, singleton: str = "zero", **more: list) -> list[float]:
    rewards = torch.tensor(more.get("rewards", REWARDS), dtype=torch.float64)
    group, lengths = (torch.tensor(more.get(n, d)) for n, d in (("group", GROUP), ("lengths", LENGTHS)))
    config = AdvantageConfig("optimal_token_baseline", singleton=singleton)
    return group_advantages(rewards, group, torch.tensor(valid), config, lengths, token_probs=probs).tolist()


def expected(probs: TokenProbs, valid: list[bool] = VALID, singleton: str = "zero") -> list[float]:
    """Loop over responses and tokens."""
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    weights: list[list[float]] = []
    for start, length in zip(starts, LENGTHS, strict=True):
        total, row = 0.0, []
        for k in range(start, start + length):
            total += 1 - 2 * float(probs.logprobs[k].double().exp()) + float(probs.square_sums[k])
            row.append(total)
        weights.append(row)
    advantages = []
    for i, length in enumerate(LENGTHS):
        group = [j for j in range(len(LENGTHS)) if GROUP[j] == GROUP[i] and valid[j]]
        silent = len({REWARDS[j] for j in group}) < 2 and not (len(group) == 1 and singleton == "raw")
        for t in range(length):
            there = [j for j in group if LENGTHS[j] > t]
            baseline = 0.0
            if len(there) > 1:
                above = sum(weights[j][t] * REWARDS[j] for j in there)
                baseline = above / (sum(weights[j][t] for j in there) + 1e-8)
            advantages.append(0.0 if silent or not valid[i] else REWARDS[i] - baseline)
    return advantages


def test_golden():
    probs = probs_of(torch.tensor([0.9, 0.5, 0.8, 0.6, 0.7, 0.9]), torch.tensor([0.82, 0.4, 0.7, 0.5, 0.55, 0.82]))
    given = found(probs, [True, True], rewards=[1.0, 0.0], group=[0, 0], lengths=[3, 3])
    baselines = [0.0625, 0.48275862, 0.52525253]
    # the first norm is 0.02, a difference of numbers near 1 that come in fp32
    assert given == pytest.approx([1 - b for b in baselines] + [-b for b in baselines], abs=1e-6)


@pytest.mark.parametrize(
    "valid",
    [VALID, [True, True, False, True, True, True, True], [True, True, True, True, False, False, False]],
    ids=["all", "the longest invalid", "groups of one and none"],
)
@pytest.mark.parametrize("singleton", ["zero", "raw"])
def test_advantages_are_those_of_the_formula(singleton: str, valid: list[bool]):
    given = found(some_probs(), valid, singleton)
    assert given == pytest.approx(expected(some_probs(), valid, singleton), rel=1e-6, abs=1e-7)
    assert any(given)


def test_where_one_response_is_left_it_has_no_baseline():
    first = sum(LENGTHS[:2])
    given = found(some_probs())
    assert given[first + 4 : first + 6] == [0.0, 0.0], "its reward, at the two tokens after the second longest"
    assert given[first + 3] != 0
    assert given[-5:] == [2.0] * 5


def test_a_group_of_equal_rewards_gets_exactly_0_in_its_tail_too():
    given = found(some_probs(), rewards=[0.3, 0.25, 0.3, 0.5, 0.3, 1.0, 2.0])
    assert given[:4] == [0.0] * 4
    assert given[6:15] == [0.0] * 9
    assert any(given[-7:])


def test_a_group_of_one_may_be_an_error():
    with pytest.raises(DataError, match=r"prompt 2 has one valid sequence"):
        found(some_probs(), singleton="error")


def test_certain_tokens_weigh_nothing_however_their_probabilities_are_rounded():
    pi = torch.tensor([1.0, 0.5, 1.0, 0.5])
    squares = torch.tensor([1 - 1.2e-7, 0.5, 1 + 1.2e-7, 0.5])  # 1 - 2 + squares is once below 0
    given = found(probs_of(pi, squares), [True, True], rewards=[1.0, 0.0], group=[0, 0], lengths=[2, 2])
    assert given == pytest.approx([1.0, 0.5, 0.0, -0.5], abs=1e-6)


def test_probabilities_and_lengths_are_needed():
    nothing, config = torch.zeros(0), AdvantageConfig("optimal_token_baseline")
    given = nothing.double(), nothing.long(), nothing.bool(), config
    with pytest.raises(ConfigError, match=r"'optimal_token_baseline' reads the probabilities of response tokens: pass"):
        group_advantages(*given, nothing.long())
    with pytest.raises(ConfigError, match="one advantage per token: pass lengths_S"):
        group_advantages(*given, token_probs=TokenProbs(nothing, nothing))
