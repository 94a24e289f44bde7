"""The ops of torch.ops.hwgrpo run with the Triton row kernels, and give what they give with those in torch."""

import pytest
import torch
from hwgrpo_kernels import default_registry, linear_logprob, linear_token_loss, token_logprob

from tests.support.numbers.row_cases import ROW_OPS


def weighted(stats, rows):
    return stats.logprob * rows["weight"] + 0.1 * stats.entropy, {}


def everything(chunk_rows: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 12, requires_grad=True), torch.randn(33, 12, requires_grad=True)
    targets, rows = torch.arange(7), {"weight": torch.randn(7)}
    scored = linear_logprob(hidden, weight, targets, with_entropy=True, chunk_rows=chunk_rows)
    given = token_logprob(hidden @ weight.T, targets, with_entropy=True)
    loss = linear_token_loss(hidden, weight, targets, weighted, rows=rows, chunk_rows=chunk_rows)
    values = [each for each in (*scored, *given, loss.loss) if each is not None]
    total = sum((each * torch.randn(each.shape)).sum() for each in values)
    return [*values, *torch.autograd.grad(total, (hidden, weight))]


@pytest.mark.parametrize("chunk_rows", [3, 7], ids=["some chunks", "one chunk"])
def test_values_and_gradients_are_those_of_the_kernels_in_torch(interpreted, chunk_rows):
    found = everything(chunk_rows)
    with default_registry.pinned({op.name: "torch" for op in ROW_OPS}):
        expected = everything(chunk_rows)
    for value, true in zip(found, expected, strict=True):
        torch.testing.assert_close(value, true, rtol=1e-5, atol=1e-5)
