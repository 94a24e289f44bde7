"""The sum of squared probabilities of scored rows, against fp64 softmax over full logits."""

from typing import Any

import pytest
import torch
from hwgrpo_kernels import linear_logprob, square_sum
from hwgrpo_kernels.definitions import row_stats
from hwgrpo_kernels.logit_map import LogitMap, logit_map

from tests.kernels.token_loss_cases import problem
from tests.support.numbers.rounding import bound

PER_ROW = torch.linspace(0.3, 2.0, 193)
ROUNDED = bound(terms=517, sums=8)
"""Products of the head, then a softmax over the vocabulary and the sum of its squares."""


def expected(p: Any, temperature: Any = 1.0, softcap: float | None = None, logit_scale: float = 1.0, floor: Any = None):
    """Return the log-probs and sums of squares of fp64 probabilities, without what `floor` drops."""
    with torch.no_grad():
        logits = p.hidden.double() @ p.weight.double().T
        logits = (logits if p.bias is None else logits + p.bias.double()) * logit_scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logprobs = (
            logits / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)
        ).log_softmax(1)
        if floor is not None:
            kept = (logprobs >= floor[:, None]).scatter(1, p.targets[:, None], True)
            logprobs = logprobs.masked_fill(~kept, -torch.inf).log_softmax(1)
        return logprobs.gather(1, p.targets[:, None])[:, 0], logprobs.exp().square().sum(1)


@pytest.mark.parametrize("chunk_rows", [None, 50])
@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"temperature": 0.3},
        {"temperature": PER_ROW},
        {"softcap": 1.5, "temperature": PER_ROW},
        {"softcap": 2.0, "logit_scale": 3.0},
    ],
    ids=["plain", "temperature", "temperatures", "softcap", "scale"],
)
def test_sums_are_those_of_fp64_probabilities(mapping: dict[str, Any], chunk_rows: int | None, monkeypatch):
    monkeypatch.setattr(square_sum, "_BYTES", 4 * 517 * 7)  # several copies of logits per chunk
    p = problem(bias=True)
    with torch.no_grad():
        got = linear_logprob(
            p.hidden, p.weight, p.targets, bias=p.bias, with_square_sum=True, chunk_rows=chunk_rows, **mapping
        )
    logprob, squares = expected(p, **mapping)
    assert got.square_sum is not None
    assert got.square_sum.dtype == torch.float32
    torch.testing.assert_close(got.square_sum.double(), squares, rtol=ROUNDED, atol=0)
    torch.testing.assert_close(got.logprob.double(), logprob, rtol=ROUNDED, atol=ROUNDED)
    assert got.entropy is None


def test_log_probs_and_entropies_beside_it_are_bit_for_bit_those_without():
    p = problem()
    with torch.no_grad():
        alone, beside = (
            linear_logprob(p.hidden, p.weight, p.targets, with_entropy=True, with_square_sum=on) for on in (False, True)
        )
    assert alone.square_sum is None
    assert torch.equal(beside.logprob, alone.logprob)
    assert beside.entropy is not None
    assert alone.entropy is not None
    assert torch.equal(beside.entropy, alone.entropy)


@pytest.mark.parametrize("chunk_rows", [None, 50])
def test_dropped_tokens_have_no_probability(chunk_rows: int | None):
    p = problem()
    floor = torch.linspace(-7.5, -5.0, 193)
    floor[::4] = -torch.inf
    floor[1::5] = 0.0  # only the target
    options = {"temperature": 0.9, "with_square_sum": True, "chunk_rows": chunk_rows, "logprob_floor": floor}
    with torch.no_grad():
        got = linear_logprob(p.hidden, p.weight, p.targets, **options)
    assert got.square_sum is not None
    torch.testing.assert_close(got.square_sum.double(), expected(p, 0.9, floor=floor)[1], rtol=ROUNDED, atol=0)
    assert torch.equal(got.square_sum[1::5], torch.ones(39))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_summed_in_fp32(dtype: torch.dtype):
    logits = (4 * torch.randn(9, 3001, generator=torch.Generator().manual_seed(0))).to(dtype)
    mapping = logit_map(0.7, None, 1.0)
    _, _, row_max, log_sum = row_stats(logits, torch.zeros(9, dtype=torch.int64), *mapping, False)
    got = square_sum.square_sum(logits, row_max, log_sum, mapping)
    exact = (logits.double() / 0.7).softmax(1).square().sum(1)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=bound(terms=3001, sums=4), atol=0)


@pytest.mark.parametrize("offset", [0.0, 3e4])
def test_rows_with_minus_infinity_and_offsets(offset: float):
    logits = torch.randint(-40, 40, (6, 300), generator=torch.Generator().manual_seed(0)) / 8.0 + offset
    logits[0, 5:] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 1:] = -torch.inf
    mapping = LogitMap(1.3, 0.0, None)
    _, _, row_max, log_sum = row_stats(logits, torch.zeros(6, dtype=torch.int64), *mapping, False)
    got = square_sum.square_sum(logits, row_max, log_sum, mapping)
    exact = (1.3 * logits.double()).softmax(1).square().sum(1)
    exact[1] = 0.0
    torch.testing.assert_close(got.double(), exact, rtol=bound(terms=300, sums=4), atol=0)
    assert got[2] == 1


def test_no_rows_have_no_sums():
    p = problem(n=0)
    with torch.no_grad():
        got = linear_logprob(p.hidden, p.weight, p.targets, with_square_sum=True)
    assert got.square_sum is not None
    assert got.square_sum.shape == got.logprob.shape == (0,)


def test_fp64_stays_fp64():
    p = problem(dtype=torch.float64)
    with torch.no_grad():
        got = linear_logprob(p.hidden, p.weight, p.targets, with_square_sum=True)
    assert got.square_sum is not None
    torch.testing.assert_close(got.square_sum, expected(p)[1], rtol=1e-13, atol=0)


def test_a_gradient_or_a_sharded_head_is_refused():
    p = problem()
    with pytest.raises(ValueError, match=r"with_square_sum has no gradient: use torch\.no_grad"):
        linear_logprob(p.hidden, p.weight, p.targets, with_square_sum=True)
    with pytest.raises(ValueError, match=r"with_square_sum=True is unsupported with a vocab_group; pass None"):
        square_sum.check_square_sum(True, object())
    frozen = problem(frozen=("hidden", "weight"))
    assert linear_logprob(frozen.hidden, frozen.weight, frozen.targets, with_square_sum=True).square_sum is not None
