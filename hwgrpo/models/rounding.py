"""Startup checks of a model on a few tokens: the tokens' ids, and whether rounding explains a difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2

DRAWS = 4
"""Forwards with rounded embeddings, of which the largest effect counts: one may route a token to another expert."""

MARGIN = 3
"""Largest difference that counts as rounding, in effects of one rounding of the embeddings on the same token.

A forward with each embedding changed by a unit in its last place has other roundings everywhere, so that its outputs
differ by as much as rounding makes of this model, whatever its depth and width, recurrences and routers. Another way to
compute the same has other roundings, too, of as many sums: its difference is another draw of the same size.

In bf16, layouts of dense models of 2 to 16 random layers and of SmolLM2-135M differ by at most 2 effects, and with a
dropped mask or wrong positions by at least 5; where random experts amplify rounding to a third of the largest value, by
at least 3.4. Decoding without experts differs by at most 2.2, in fp32 as in bf16.
"""

UNIT_OF_PRODUCTS = {"high": 2.0**-10, "medium": 2.0**-7}
"""Unit in the last place of fp32 products whose operands torch may round to TF32 or to bf16."""


@dataclass(frozen=True)
class Excess:
    """A difference that rounding does not explain, in shares of the largest value expected."""

    gap: float
    rounding: float
    """Measured effect of rounding on the same token."""

    def __str__(self) -> str:
        return f"{self.gap:.2g} of the largest ({self.rounding:.1g} is rounding)"


def check_ids(vocabulary: int, count: int, without: Collection[int] = ()) -> torch.Tensor:
    """Return token ids [count] for a startup check, distinct where the vocabulary has as many.

    They are spread over its middle half, if that has as many. The ends of published vocabularies hold special and
    reserved tokens, bytes and padding: between ordinary tokens, some of them amplify rounding a hundredfold.

    Args:
        vocabulary: rows of the embeddings.
        count: number of ids.
        without: ids that are left out.
    """
    if without:
        ids = [token for token in check_ids(vocabulary, count + len(without)).tolist() if token not in without]
        return torch.tensor(ids[:count])
    first = vocabulary // 4 if vocabulary >= 2 * count else 0
    size = vocabulary - 2 * first
    stride = next(s for s in range(max(1, int(GOLDEN_RATIO * size)), size + 1) if math.gcd(s, size) == 1)
    return first + stride * torch.arange(count) % size


def find_excess(
    actual: torch.Tensor, expected: torch.Tensor, floor: float, measure: Callable[[], torch.Tensor]
) -> Excess | None:
    """Return the largest difference that rounding does not explain, or None.

    Tokens are compared one by one: where a model amplifies rounding on some, the others are compared as strictly as in
    any model.

    Args:
        actual, expected: outputs [N, ...] of N tokens, computed in two ways.
        floor: difference that counts as rounding in any model.
        measure: returns the effect of rounding on each token, [N]; called only if the floor is exceeded.
    """
    gaps = relative_differences(actual, expected)
    if bool((gaps <= floor).all()):
        return None
    rounding = measure()
    beyond = ~(gaps <= (MARGIN * rounding).clamp_min(floor))
    if not bool(beyond.any()):
        return None
    worst = gaps.masked_fill(~beyond, 0).argmax()
    return Excess(float(gaps[worst]), float(rounding[worst]))


def measure_rounding(
    embeddings: torch.nn.Module, dtype: torch.dtype, forward: Callable[[], torch.Tensor], expected: torch.Tensor
) -> torch.Tensor:
    """Return how much one rounding of the embeddings changes a model's outputs for each token, [N].

    Args:
        embeddings: the model's module that looks them up.
        dtype: dtype of the model's products.
        forward: returns the model's outputs [N, ...] for N tokens.
        expected: what `forward` returns without rounded embeddings.
    """
    draws = []
    for seed in range(DRAWS):
        with embeddings_rounded_once(embeddings, dtype, seed):
            draws.append(relative_differences(forward(), expected))
    return torch.stack(draws).amax(0)


@contextmanager
def embeddings_rounded_once(embeddings: torch.nn.Module, dtype: torch.dtype, seed: int) -> Iterator[None]:
    """Change each value of the embeddings by a unit in its last place, up or down, within the block.

    Args:
        embeddings: the module that looks them up.
        dtype: dtype of the model's products.
        seed: of the directions.
    """
    unit = unit_of_products(dtype)

    def change(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, output.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        return output * (1 + unit * signs.to(output))

    hook = embeddings.register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


def relative_differences(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the largest difference of each token, in shares of the largest value expected of all, [N]."""
    actual, expected = actual.detach().float(), expected.detach().float()
    return (actual - expected).abs().flatten(1).amax(1) / expected.abs().max().clamp_min(1e-12)


def unit_of_products(dtype: torch.dtype) -> float:
    """Return the unit in the last place of a product's operands: that of the dtype that torch rounds them to."""
    if dtype != torch.float32:
        return torch.finfo(dtype).eps
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's other interface has set another one
        precision = "high"
    return UNIT_OF_PRODUCTS.get(precision, torch.finfo(dtype).eps)


def unit_of_sum(dtype: torch.dtype, terms: int) -> float:
    """Return the relative size of one rounding of a sum of products.

    Sums of fp32 products round after each of their terms; products of other dtypes sum in fp32 and round operands and
    result.

    Args:
        dtype: of products.
        terms: number of products.
    """
    unit = unit_of_products(dtype)
    return max(unit, torch.finfo(dtype).eps / 2 * math.sqrt(terms)) if dtype == torch.float32 else unit
