"""Process supervision against the formula of DeepSeekMath 4.1.3, written out as loops over tokens."""

import statistics
from itertools import chain

import pytest
import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.errors import ConfigError
from hwgrpo.step_rewards import StepRewards

GROUP = [0, 0, 1, 1, 1, 2]
LENGTHS = [5, 3, 4, 0, 2, 3]
STEPS = [[1.0, 0.0, 0.5], [0.25], [1.0, 2.0], [0.5], [3.0, 0.0], [1.0, 1.0]]
ENDS = [[0, 3, 4], [2], [1, 3], [-1], [1, 1], [0, 2]]
VALID = [True] * 6


def steps_of(rewards: list[list[float]], ends: list[list[int]]) -> StepRewards:
    counts = torch.tensor([0, *map(len, rewards)])
    return StepRewards(torch.tensor([*chain(*rewards)]).double(), torch.tensor([*chain(*ends)]), counts.cumsum(0))


def found(config: AdvantageConfig, valid: list[bool] = VALID, steps: StepRewards | None = None) -> list[float]:
    steps = steps_of(STEPS, ENDS) if steps is None else steps
    totals = torch.tensor([sum(each) for each in STEPS]).double()
    group, lengths = torch.tensor(GROUP), torch.tensor(LENGTHS)
    return group_advantages(totals, group, torch.tensor(valid), config, lengths, None, steps).tolist()


def expected(valid: list[bool] = VALID, std: str = "group", correction: int = 1) -> list[float]:
    """Loop over responses and tokens: the sum of normalised rewards of the steps that end at the token or after it."""
    everything = [r for steps, ok in zip(STEPS, valid, strict=True) if ok for r in steps]
    advantages = []
    for group, steps, ends, length, ok in zip(GROUP, STEPS, ENDS, LENGTHS, valid, strict=True):
        members = [s for s, g, v in zip(STEPS, GROUP, valid, strict=True) if g == group and v]
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


@pytest.mark.parametrize("valid", [VALID, [True, True, False, True, True, True]], ids=["all", "one invalid"])
@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_advantages_are_those_of_the_paper(std: str, correction: int, valid: list[bool]):
    config = AdvantageConfig("process", std=std, std_correction=correction)
    assert found(config, valid) == pytest.approx(expected(valid, std, correction), rel=1e-5, abs=1e-6)


def test_a_group_whose_steps_have_equal_rewards_gets_exactly_0():
    assert found(AdvantageConfig("process"))[-3:] == [0.0, 0.0, 0.0]
    rewards = [[0.1] * 3, [0.1], *STEPS[2:]]
    assert found(AdvantageConfig("process"), steps=steps_of(rewards, ENDS))[:8] == [0.0] * 8


def test_responses_of_one_step_have_the_advantages_of_grpo():
    totals, group, lengths = torch.tensor([1.0, 0.0, 0.5]).double(), torch.zeros(3).long(), torch.tensor([2, 1, 3])
    valid = torch.ones(3).bool()
    ours = group_advantages(totals, group, valid, AdvantageConfig("process"), lengths)
    outcome = group_advantages(totals, group, valid, AdvantageConfig("grpo"), lengths)
    assert torch.equal(ours, torch.repeat_interleave(outcome, lengths))


def test_it_needs_the_lengths():
    with pytest.raises(ConfigError, match="pass lengths_S"):
        group_advantages(
            torch.ones(2).double(), torch.zeros(2).long(), torch.ones(2).bool(), AdvantageConfig("process")
        )


def test_no_responses_have_no_advantages():
    nothing = torch.zeros(0)
    config = AdvantageConfig("process")
    assert group_advantages(nothing.double(), nothing.long(), nothing.bool(), config, nothing.long()).shape == (0,)
