"""Compare values and gradients of a module's plain and fused forward on its own inputs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest difference relative to the largest entry that rounding explains: a few units in the last place."""

FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
"""Exceptions of an op that rejects a call, or of a forward with another signature than its code suggests."""

Outputs = tuple[Tensor, ...]


def difference(
    plain: Callable[..., Any],
    fused: Callable[..., Any],
    inputs: Sequence[Any],
    differentiated: int = 1,
    parameters: Iterable[Tensor] = (),
) -> str | None:
    """Return how the fused forward differs from the plain one, or None.

    Args:
        plain, fused: functions of the inputs that return one tensor or several.
        inputs: passed to both.
        differentiated: number of leading inputs whose gradients are compared.
        parameters: parameters whose gradients are compared.

    Returns:
        A readable reason: another dtype or shape, the exception, or the relative difference.

    Raises:
        torch.OutOfMemoryError: the self-test does not fit, so it has no result.
    """
    inputs = [each.detach() if isinstance(each, Tensor) else each for each in inputs]
    parameters = [each for each in parameters if each.requires_grad]
    try:
        expected, expected_gradients = _run(plain, inputs, differentiated, parameters)
        outputs, gradients = _run(fused, inputs, differentiated, parameters)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        return f"it fails ({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''})"
    allowed = tolerance(*inputs, *expected)
    for name, actual, plain_values in (("outputs", outputs, expected), ("gradients", gradients, expected_gradients)):
        if [each.shape for each in actual] != [each.shape for each in plain_values]:
            return f"its {name} have other shapes than the plain module's"
        if [each.dtype for each in actual] != [each.dtype for each in plain_values]:
            return f"its {name} have other dtypes than the plain module's"
        for ours, theirs in zip(actual, plain_values, strict=True):
            gap = relative_difference(ours, theirs)
            if not gap <= allowed:
                return f"its {name} differ from the plain module's by {gap:.2g} of the largest"
    return None


def tolerance(*tensors: Any) -> float:
    """Return the largest difference that rounding to the coarsest dtype among tensors explains."""
    return max(TOLERANCE.get(each.dtype, 0.0) for each in tensors if isinstance(each, Tensor))


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest entry expected; NaN counts as infinite."""
    gap = float((actual.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-12))
    return gap if gap == gap else float("inf")


def _run(
    function: Callable[..., Any], inputs: list[Any], differentiated: int, parameters: list[Tensor]
) -> tuple[Outputs, Outputs]:
    """Return outputs, and gradients of inputs and parameters for non-constant gradients of the outputs."""
    with torch.enable_grad():
        leaves = [each.clone().requires_grad_() for each in inputs[:differentiated]]
        result = function(*leaves, *inputs[differentiated:])
        outputs = (result,) if isinstance(result, Tensor) else tuple(result)
        upstream = [_wave(each) for each in outputs]
        gradients = torch.autograd.grad(outputs, [*leaves, *parameters], upstream, materialize_grads=True)
    return tuple(each.detach() for each in outputs), gradients


def _wave(like: Tensor) -> Tensor:
    """Return values of both signs in another tensor's shape, without a random generator."""
    return torch.sin(torch.arange(like.numel(), device=like.device).float() * 1.7).view(like.shape).to(like.dtype)


@contextmanager
def self_test_mode(model: nn.Module, device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Turn dropout off and autocast to `dtype`, as the run does; restore every sub-module's mode at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    lower = dtype in (torch.bfloat16, torch.float16)
    try:
        with torch.autocast(device_type, dtype=dtype if lower else None, enabled=lower):
            yield
    finally:
        for module, training in modes:
            module.training = training


def run_on_few_tokens(model: nn.Module) -> None:
    """Run a causal LM on two rows of eight tokens, so that its hooks see real inputs."""
    table: Any = model.get_input_embeddings()  # type: ignore[operator]
    ids = torch.arange(1, 17, device=table.weight.device).view(2, 8) % table.weight.shape[0]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
