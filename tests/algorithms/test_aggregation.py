"""Loss aggregation: golden values, and independence from how an update is split."""

import pytest
import torch

from hwgrpo.algorithms.aggregation import count, token_weights, tokens_of_prompts
from hwgrpo.catalog import AGGREGATIONS
from hwgrpo.errors import ConfigError

LOSSES = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]


def aggregate(mode, losses, lengths, *, norm_length=None, count_empty=False):
    """Sum weight * loss over the first `length` tokens of each row."""
    lengths_S = torch.tensor(lengths)
    tokens, sequences = count(lengths_S, count_empty=count_empty)
    prompt_tokens_S, prompts = tokens_of_prompts(lengths_S, torch.zeros_like(lengths_S))
    weight_S = token_weights(
        mode,
        lengths_S,
        total_tokens=tokens,
        total_sequences=sequences,
        norm_length=norm_length,
        total_prompts=prompts,
        prompt_tokens_S=prompt_tokens_S,
    )
    return sum(w * sum(row[:n]) for w, row, n in zip(weight_S.double().tolist(), losses, lengths, strict=True))


@pytest.mark.parametrize(
    ("mode", "norm_length", "expected"),
    [
        ("token-mean", None, 3.5),
        ("token-sum", None, 21.0),
        ("seq-mean-token-sum", None, 10.5),
        ("seq-mean-token-sum-norm", 4, 2.625),
        ("seq-mean-token-sum-norm", 512, 0.0205078125),
        ("seq-mean-token-mean", None, 4.0),
        ("prompt-mean", None, 3.5),
    ],
)
def test_each_mode_gives_its_golden_loss(mode, norm_length, expected):
    assert aggregate(mode, LOSSES, [4, 2], norm_length=norm_length) == pytest.approx(expected, rel=1e-7)


def test_an_empty_sequence_is_left_out_of_the_mean_as_in_verl_or_counted_as_in_trl():
    assert aggregate("seq-mean-token-mean", LOSSES, [4, 0]) == pytest.approx(2.5, rel=1e-7)
    assert aggregate("seq-mean-token-mean", LOSSES, [4, 0], count_empty=True) == pytest.approx(1.25, rel=1e-7)


@pytest.mark.parametrize("mode", AGGREGATIONS.names())
def test_the_loss_does_not_depend_on_how_the_update_is_split(mode):
    generator = torch.Generator().manual_seed(3)
    lengths_S = torch.tensor([3, 0, 7, 1, 5, 0, 2, 11])
    losses_S = [torch.randn(int(n), generator=generator).double() for n in lengths_S]
    tokens, sequences = count(lengths_S)
    assert (tokens, sequences) == (29, 6)
    prompt_S = torch.tensor([0, 0, 1, 2, 1, 4, 2, 2])  # the prompt 4 has no tokens, and 3 no sequence
    prompt_tokens_S, prompts = tokens_of_prompts(lengths_S, prompt_S)
    assert (prompt_tokens_S.tolist(), prompts) == ([3, 3, 12, 14, 12, 0, 14, 14], 3)

    def part(ids):
        weight_S = token_weights(
            mode,
            lengths_S[ids],
            total_tokens=tokens,
            total_sequences=sequences,
            norm_length=16,
            total_prompts=prompts,
            prompt_tokens_S=prompt_tokens_S[ids],
        )
        return sum(float(w) * losses_S[i].sum().item() for w, i in zip(weight_S, ids, strict=True))

    whole = part(list(range(8)))
    means = [row.mean() for row in losses_S if len(row)]
    expected = {
        "token-mean": sum(row.sum() for row in losses_S) / 29,
        "token-sum": sum(row.sum() for row in losses_S),
        "seq-mean-token-sum": sum(row.sum() for row in losses_S) / 6,
        "seq-mean-token-sum-norm": sum(row.sum() for row in losses_S) / 6 / 16,
        "seq-mean-token-mean": sum(means) / 6,
        "prompt-mean": sum(row.sum() / n for row, n in zip(losses_S, prompt_tokens_S.clamp(min=1), strict=True)) / 3,
    }
    assert whole == pytest.approx(float(expected[mode]), rel=1e-6)
    for split in (
        [[0], [1], [2], [3], [4], [5], [6], [7]],
        [[7, 0, 3], [1, 5], [2, 4, 6]],
        [[0, 1, 2, 3, 4, 5, 6], [7]],
    ):
        assert sum(part(ids) for ids in split) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS.names())
def test_empty_sequences_weigh_nothing_even_in_an_empty_update(mode):
    none = torch.zeros(3, dtype=torch.int64)
    weight_S = token_weights(mode, none, total_tokens=0, total_sequences=0, norm_length=4, prompt_tokens_S=none)
    assert weight_S.dtype == torch.float32
    assert torch.equal(weight_S, torch.zeros(3))


@pytest.mark.parametrize("norm_length", [None, 0, -4])
def test_a_fixed_length_norm_needs_its_length(norm_length):
    with pytest.raises(ConfigError, match=f"norm_length={norm_length}.*positive"):
        token_weights(
            "seq-mean-token-sum-norm", torch.tensor([1]), total_tokens=1, total_sequences=1, norm_length=norm_length
        )


def test_an_unknown_mode_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"'token_mean'.*'token-mean'"):
        token_weights("token_mean", torch.tensor([1]), total_tokens=1, total_sequences=1)
