"""The short sample of a step's sequences: bounded, and the same for a prompt's responses."""

import torch

from hwgrpo.ragged import offsets_of
from hwgrpo.training.update.train_batch import (
    SAMPLE_PROMPT_TOKENS,
    SAMPLE_RESPONSE_TOKENS,
    SAMPLE_SEQUENCES,
    short_sample,
)
from hwgrpo.values import TrainBatch


def batch_of(prompts: list[int], responses: list[tuple[int, int]], temperature: float | None = None) -> TrainBatch:
    """Return a batch of numbered tokens.

    Args:
        prompts: their lengths.
        responses: (prompt, length) of each.
        temperature: of the batch.
    """
    lengths = torch.tensor([length for _, length in responses])
    return TrainBatch(
        prompt_tokens=torch.arange(sum(prompts)),
        prompt_offsets=offsets_of(torch.tensor(prompts)),
        prompt_index=torch.tensor([prompt for prompt, _ in responses]),
        tokens=1000 + torch.arange(int(lengths.sum())),
        offsets=offsets_of(lengths),
        advantages=torch.zeros(len(responses)),
        logprobs=torch.zeros(int(lengths.sum())),
        temperature=temperature,
    )


def test_a_sample_of_long_sequences_is_cut_to_its_bounds():
    batch = batch_of([100, 7, 50], [(0, 200), (0, 3), (0, 90), (1, 40), (2, 500), (2, 33)])
    sample = short_sample(batch, 0.7)
    assert sample is not None
    assert len(sample) == SAMPLE_SEQUENCES
    assert sample.lengths.tolist() == [SAMPLE_RESPONSE_TOKENS, 3, SAMPLE_RESPONSE_TOKENS, SAMPLE_RESPONSE_TOKENS]
    assert sample.prompt_index.tolist() == [0, 0, 1, 1]
    assert sample.prompt_offsets.diff().tolist() == [SAMPLE_PROMPT_TOKENS] * 2
    assert sample.prompt_tokens.tolist() == [*range(68, 100), *range(125, 157)]
    firsts = [start + batch.offsets[s].item() for s, start in ((0, 1000), (1, 1000), (4, 1000), (5, 1000))]
    assert sample.tokens[sample.offsets[:-1]].tolist() == firsts
    assert sample.temperature == 0.7


def test_a_sample_of_few_sequences_has_each_once_and_none_without_tokens():
    sample = short_sample(batch_of([3, 4], [(0, 0), (0, 2), (1, 5), (1, 0)], temperature=0.9), 0.7)
    assert sample is not None
    assert sample.lengths.tolist() == [2, 5]
    assert sample.prompt_tokens.tolist() == list(range(7))
    assert sample.temperature == 0.9
    assert short_sample(batch_of([3], [(0, 0)]), 0.7) is None
    assert short_sample(batch_of([3], []), 0.7) is None
