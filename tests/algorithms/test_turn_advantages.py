"""GiGPO: golden numbers, the formula in plain Python, exact zeros, and what is no state."""

import itertools
import math
import random

import pytest
import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.algorithms.turn_advantages import discounted_returns
from hwgrpo.config.bound_arguments import check_arguments
from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.errors import ConfigError
from hwgrpo.rewards.trajectory_outcomes import state_number
from hwgrpo.values import StepRewards


def turns(rewards: list[list[float]], states: list[list[str | None]] | None, tokens: int = 2) -> StepRewards:
    """Return the rewards of turns of `tokens` tokens each."""
    counts = torch.tensor([0, *map(len, rewards)])
    ends = [tokens * (turn + 1) - 1 for each in rewards for turn in range(len(each))]
    numbers = None if states is None else torch.tensor([state_number(s) for each in states for s in each])
    return StepRewards(
        torch.tensor([*itertools.chain(*rewards)]).double(), torch.tensor(ends), counts.cumsum(0), numbers
    )


def gigpo(
    rewards: list[list[float]],
    states: list[list[str | None]] | None,
    groups: list[int] | None = None,
    valid: list[bool] | None = None,
    **options,
) -> list[list[float]]:
    """Return the advantage of each turn, of which both tokens must have it."""
    totals = torch.tensor([sum(each) for each in rewards]).double()
    group_S = torch.tensor(groups or [0] * len(rewards))
    valid_S = torch.tensor([True] * len(rewards) if valid is None else valid)
    lengths_S = torch.tensor([2 * len(each) for each in rewards])
    config = AdvantageConfig("gigpo", **options)
    of_tokens = group_advantages(totals, group_S, valid_S, config, lengths_S, None, turns(rewards, states))
    first, second = of_tokens[::2], of_tokens[1::2]
    assert torch.equal(first, second)
    return [each.tolist() for each in first.split([len(each) for each in rewards])]


def assert_close(found: list[list[float]], expected: list[list[float]], digits: int = 6) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-6, abs=10.0**-digits)


def test_golden_advantages_without_a_deviation():
    """By hand. Returns with gamma 0.9: .81, .9, 1; 0, 0; 1. State a: .81, 0, 1, mean .603333; b: .9, 0; c is alone."""
    found = gigpo(
        [[0, 0, 1], [0, 0], [1]],
        [["a", "b", "c"], ["a", "b"], ["a"]],
        std="none",
        kwargs={"gamma": 0.9, "step_weight": 2.0},
    )
    assert_close(found, [[0.746667, 1.233333, 0.333333], [-1.873333, -1.566667], [1.126667]])


def test_golden_advantages_divided_by_deviations():
    """By hand. Of two values each is half their difference from the mean, and the deviation is it times sqrt(1/2)."""
    found = gigpo([[0, 1], [0, 0]], [["a", "b"], ["a", "b"]], eps=0.0, kwargs={"gamma": 0.5})
    assert_close(found, [[math.sqrt(2)] * 2, [-math.sqrt(2)] * 2])


def test_the_weights_scale_their_terms():
    rewards, states = [[0, 1], [0, 0]], [["a", "b"], ["a", "a"]]
    options = {"std": "none"}
    episode = gigpo(rewards, states, kwargs={"step_weight": 0}, **options)
    step = gigpo(rewards, states, kwargs={"episode_weight": 0}, **options)
    assert_close(episode, [[0.5, 0.5], [-0.5, -0.5]])
    assert_close(step, [[0.95 * 2 / 3, 0.0], [-0.95 / 3, -0.95 / 3]])  # state a: .95, 0, 0; b is alone
    both = gigpo(rewards, states, kwargs={"episode_weight": 3, "step_weight": 5}, **options)
    assert_close(
        both, [[3 * e + 5 * s for e, s in zip(*pair, strict=True)] for pair in zip(episode, step, strict=True)]
    )


def paper(rewards, states, groups, valid, gamma: float, std: str) -> list[list[float]]:
    """GiGPO's equations as loops: sums of powers, and lists of members."""
    everyone = [i for i in range(len(rewards)) if valid[i]]
    returns = [
        [sum(gamma ** (k - t) * each[k] for k in range(t, len(each))) for t in range(len(each))] for each in rewards
    ]
    all_returns = [returns[i][t] for i in everyone for t, s in enumerate(states[i]) if s is not None]

    def norm(value: float, members: list[float], everything: list[float]) -> float:
        if max(members) - min(members) < 1e-12:
            return 0.0
        mean = math.fsum(members) / len(members)
        over = members if std == "group" else everything
        center = math.fsum(over) / len(over)
        deviation = math.sqrt(math.fsum((each - center) ** 2 for each in over) / (len(over) - 1))
        return (value - mean) / (1.0 if std == "none" else deviation + 1e-6)

    found = []
    for i, each in enumerate(rewards):
        if not valid[i]:
            found.append([0.0] * len(each))
            continue
        members = [j for j in everyone if groups[j] == groups[i]]
        totals = [sum(rewards[j]) for j in members]
        episode = norm(sum(each), totals, [sum(rewards[j]) for j in everyone]) if len(members) > 1 else 0.0
        row = []
        for t in range(len(each)):
            same = [returns[j][u] for j in members for u, s in enumerate(states[j]) if s == states[i][t]]
            step = norm(returns[i][t], same, all_returns) if states[i][t] is not None else 0.0
            row.append(episode + step)
        found.append(row)
    return found


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("seed", range(4))
def test_advantages_are_those_of_the_paper(std: str, seed: int):
    """Groups are interleaved, states recur within a trajectory and in other groups, and one trajectory is invalid."""
    draw = random.Random(seed)
    counts = [draw.randint(1, 6) for _ in range(10)]
    rewards = [[draw.choice([0.0, 0.25, 1.0, -0.5]) for _ in range(count)] for count in counts]
    states = [[draw.choice(["a", "b", "c", None]) for _ in range(count)] for count in counts]
    groups = [draw.randint(0, 2) for _ in counts]
    valid = [i != seed for i in range(10)]
    found = gigpo(rewards, states, groups, valid, std=std, kwargs={"gamma": 0.7})
    expected = paper(rewards, states, groups, valid, 0.7, std)
    assert max(map(max, expected)) > 0.5
    assert_close(found, expected, digits=5)


@pytest.mark.parametrize("states", [None, [[None, None], [None], [None, None, None]]], ids=["no steps", "unknown"])
def test_turns_without_a_state_have_the_advantage_of_grpo(states):
    rewards = [[0, 1], [0], [1, 0, 2]]
    totals = torch.tensor([1.0, 0.0, 3.0]).double()
    everyone = torch.ones(3).bool()
    grpo = group_advantages(totals, torch.zeros(3).long(), everyone, AdvantageConfig("grpo")).tolist()
    found = gigpo(rewards, states)
    assert [set(each) for each in found] == [{advantage} for advantage in grpo]


def test_equal_returns_in_a_state_give_exactly_0_wherever_they_are_in_their_trajectories():
    reward, gamma = 0.1, 0.3
    rewards = [[0.7, 0.0, 0.2, reward], [0.0, 0.2, reward]]  # from `s` on alike
    states = [["x", "s", "t", "u"], ["s", "t", "u"]]
    found = gigpo(rewards, states, kwargs={"gamma": gamma, "episode_weight": 0})
    assert found == [[0.0] * 4, [0.0] * 3]
    returns = discounted_returns(turns(rewards, states), gamma).tolist()
    assert returns[1:4] == returns[4:]


@pytest.mark.parametrize(("singleton", "first"), [("zero", 0.0), ("raw", 3.0)])
def test_a_trajectory_alone_in_its_group_may_have_its_reward_and_no_turn_has_its_return(singleton: str, first: float):
    assert gigpo([[1, 2]], [["a", "b"]], singleton=singleton, std="none") == [[first, first]]


@pytest.mark.parametrize("kwargs", [{"gamma": 1.5}, {"gamma": -0.1}, {"step_weight": -1}, {"episode_weight": -1}])
def test_arguments_outside_of_their_limits_are_refused(kwargs: dict[str, float]):
    from hwgrpo.algorithms.turn_advantages import gigpo as estimator

    with pytest.raises(ConfigError, match=r"algorithm\.advantage\.kwargs"):
        check_arguments(estimator, kwargs, "algorithm.advantage.kwargs")


def test_equal_states_have_one_number_in_every_process_and_others_another():
    assert state_number("a board") == state_number("a board") == 1530875752473885085
    assert len({state_number(text) for text in ("", "a", "b", "None")} | {state_number(None)}) == 5
    assert state_number(None) == -1
    assert all(state_number(str(i)) >= 0 for i in range(200))
