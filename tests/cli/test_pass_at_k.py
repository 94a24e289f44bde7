"""pass@k against the definition: the share of k-subsets that hold a pass."""

from itertools import combinations

import pytest

from hwgrpo.cli.eval import pass_at_k


@pytest.mark.parametrize(("n", "passed"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int, passed: int):
    for k in range(1, n + 1):
        subsets = list(combinations([True] * passed + [False] * (n - passed), k))
        assert pass_at_k(n, passed, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))
