"""pass@k against the definition: the share of k-subsets that hold a pass."""

from itertools import combinations

import pytest
import torch

from hwgrpo.cli.eval import figures, pass_at_k


@pytest.mark.parametrize(("n", "passed"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int, passed: int):
    for k in range(1, n + 1):
        subsets = list(combinations([True] * passed + [False] * (n - passed), k))
        assert pass_at_k(n, passed, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_a_response_passes_with_the_lowest_successful_reward_and_one_without_a_reward_does_not():
    greedy = torch.tensor([[0.5], [1.0], [torch.nan]])
    sampled = torch.tensor([[0.5, 1.0, torch.nan, 2.0], [0.0, 0.5, 0.9, 0.0], [torch.nan] * 4])
    assert figures(greedy, sampled, [1, 4], 1.0) == pytest.approx({
        "greedy_reward": 0.75,
        "mean_reward": 4.9 / 7,
        "greedy_pass": 1 / 3,
        "pass@1": 0.5 / 3,
        "pass@4": 1 / 3,
    })  # fmt: skip
