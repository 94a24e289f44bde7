"""From examples to the TrainBatch of one step: the response is what was "sampled", with advantage 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hwgrpo.data.examples import Example
from hwgrpo.ragged import offsets_of
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.values import TrainBatch


def assemble_examples(examples: Sequence[Example]) -> TrainBatch:
    """Build the batch of G examples, one sequence each; untrained response tokens have the advantage 0.

    There is no rollout engine: its log-probs are 0.
    """
    tokens = torch.tensor([token for each in examples for token in each.response_ids], dtype=torch.int64)
    return TrainBatch(
        prompt_tokens=torch.tensor([token for each in examples for token in each.token_ids], dtype=torch.int64),
        prompt_offsets=offsets_of(torch.tensor([len(each.token_ids) for each in examples])),
        prompt_index=torch.arange(len(examples)),
        tokens=tokens,
        offsets=offsets_of(torch.tensor([len(each.response_ids) for each in examples])),
        advantages=torch.ones(len(examples)),
        logprobs=torch.zeros(len(tokens)),
        token_advantages=torch.tensor([float(t) for each in examples for t in each.trained]),
    )


def mean_over_trained(batch: TrainBatch, prompts_per_update: int, strategy: Strategy) -> TrainBatch:
    """Return the batch whose token mean is the mean over the trained tokens of each update, over all ranks.

    The update divides by all of its response tokens; advantages of all / trained tokens correct that.

    Args:
        batch: from `assemble_examples`.
        prompts_per_update: examples of an update on this rank.
        strategy: sums over ranks.
    """
    assert batch.token_advantages is not None
    update_R = batch.per_token_of(batch.prompt_index // prompts_per_update)
    updates = (len(batch) - 1) // prompts_per_update + 1
    counts = torch.zeros(2, updates, dtype=torch.float64)
    counts[0].index_add_(0, update_R, torch.ones(len(update_R), dtype=torch.float64))
    counts[1].index_add_(0, update_R, batch.token_advantages.double())
    everything, trained = torch.tensor(strategy.sum(counts.flatten().tolist()), dtype=torch.float64).view(2, -1)
    scale_R = (everything / trained)[update_R]
    return replace(batch, token_advantages=(batch.token_advantages * scale_R).float())
