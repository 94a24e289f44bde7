"""What a step's metrics are means over."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.step_metrics import gap_to_rollout, sample_metrics, update_metrics
from hwgrpo.values import PromptBatch, Rewards, TrainBatch
from tests.support.models.tiny import ragged_batch
from tests.support.numbers import response_batch


def test_metrics_of_ones_own_loss_are_means_over_the_tokens_that_it_saw():
    sums = {"loss": 3.0, "tokens": 10.0, "trained": 5.0, "fade": 2.5, "pg_loss": 2.5, "ratio": 5.0}
    metrics = update_metrics(sums, norms=[1.0], lr=1e-3)
    assert metrics["actor/fade"] == 0.5
    assert metrics["actor/ratio_mean"] == 1.0
    assert metrics["actor/pg_loss"] == 0.25, "it is 0 for the others"


class Pair:
    """Two ranks in two threads, which exchange values as processes do."""

    world_size = 2

    def __init__(self, rank: int, exchanged: list, barrier: threading.Barrier) -> None:
        self.rank, self._exchanged, self._barrier = rank, exchanged, barrier

    def gather_objects(self, value):
        self._exchanged[self.rank] = value
        self._barrier.wait(60)
        values = list(self._exchanged)
        self._barrier.wait(60)
        return values

    def sum(self, values):
        return [sum(each) for each in zip(*self.gather_objects([float(value) for value in values]), strict=True)]


def on_two_ranks(work):
    barrier, exchanged = threading.Barrier(2), [None, None]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: work(Pair(rank, exchanged, barrier)), range(2)))


def batches() -> list[TrainBatch]:
    return [ragged_batch(prompts=3, n=2, seed=seed, empty=True) for seed in (1, 2)]


@pytest.mark.parametrize("where", [(0, 2), (1, 4)], ids=["rank 0", "rank 1"])
def test_the_worst_token_is_that_of_all_ranks_and_all_ranks_know_it(where):
    rank, sequence = where
    both = batches()
    batch = both[rank]
    logprobs = [each.rollout_logprobs + 0.01 for each in both]
    start, end = batch.offsets[sequence], batch.offsets[sequence + 1]
    assert end - start >= 2
    logprobs[rank][end - 2] -= 5.01

    def measure(strategy):
        computed = torch.ones(len(both[strategy.rank]), dtype=torch.bool)
        computed[0] = False
        return gap_to_rollout(both[strategy.rank], computed, logprobs[strategy.rank], strategy)

    (metrics, worst), other = on_two_ranks(measure)
    assert (metrics, worst) == other
    assert worst is not None
    assert metrics["rollout_corr/log_ratio_max"] == pytest.approx(5.0)
    assert (worst.rank, worst.prompt, worst.token) == (
        rank,
        int(batch.prompt_index[sequence]),
        int(batch.tokens[end - 2]),
    )
    assert (worst.position, worst.length) == (int(end - start) - 2, int(end - start))
    assert worst.logprob - worst.rollout_logprob == pytest.approx(-5.0)


def test_a_log_prob_that_is_not_a_number_is_the_worst():
    [batch, _] = batches()
    logprobs = batch.rollout_logprobs.clone()
    logprobs[3] = math.nan
    logprobs[5] -= 9
    strategy = Single(torch.device("cpu"), "gloo")
    metrics, worst = gap_to_rollout(batch, torch.ones(len(batch), dtype=torch.bool), logprobs, strategy)
    assert metrics["rollout_corr/log_ratio_max"] == math.inf
    assert worst is not None
    assert worst.token == int(batch.tokens[3])


def test_a_step_without_trained_tokens_has_no_gap():
    [batch, _] = batches()
    nothing = torch.zeros(len(batch), dtype=torch.bool)
    assert gap_to_rollout(batch, nothing, batch.rollout_logprobs, Single(torch.device("cpu"), "gloo")) == ({}, None)


def test_the_share_of_groups_in_which_a_reward_does_not_differ_is_over_all_ranks():
    nan = math.nan
    parts = [
        {"a": [1.0, 1.0, 0.0, 1.0, 2.0, 3.0], "b": [0.0] * 6},  # groups of two; the last group is not valid
        {"a": [5.0, nan, nan, nan, 0.0, 1.0], "b": [0.0, 1.0, 0.0, 0.0, nan, nan]},
    ]
    valid = [[True] * 4 + [False] * 2, [True] * 6]

    def measure(strategy):
        batch, completions = response_batch.of(["x"] * 6)
        batch = PromptBatch(batch.prompts * 3)
        completions = replace(completions, prompt_index=torch.arange(3).repeat_interleave(2))
        own = {name: torch.tensor(values, dtype=torch.float64) for name, values in parts[strategy.rank].items()}
        rewards = Rewards(torch.zeros(6, dtype=torch.float64), torch.tensor(valid[strategy.rank]), own)
        return sample_metrics(batch, completions, rewards, torch.zeros(6), strategy.gather_objects)

    first, second = on_two_ranks(measure)
    assert first == pytest.approx(second, nan_ok=True)
    # of a: groups (1 1), (0 1), then (5 -) and (0 1), where one value alone does not differ
    assert first["rewards/a/frac_zero_std"] == pytest.approx(2 / 4)
    assert first["rewards/b/frac_zero_std"] == pytest.approx(3 / 4)
