"""The trial: a module's own inputs through the plain and the fused way, values and gradients compared."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest difference, relative to the largest entry, that rounding explains: a few units in the last place."""

FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
"""What an op raises that does not take a call, or a forward that is another than it looks."""

Outputs = tuple[Tensor, ...]


def difference(
    plain: Callable[..., Any],
    fused: Callable[..., Any],
    inputs: Sequence[Any],
    differentiated: int = 1,
    parameters: Iterable[Tensor] = (),
) -> str | None:
    """Return how the fused way differs from the plain one, or None.

    Args:
        plain, fused: take the inputs; return a tensor or several.
        inputs: of both.
        differentiated: how many of them, from the first, get gradients.
        parameters: get gradients too.

    Returns:
        A reason for people: other dtype or shape, what was raised, or the relative difference.

    Raises:
        torch.OutOfMemoryError: there is no room for the trial, which says nothing of the fused way.
    """
    given = [each.detach() if isinstance(each, Tensor) else each for each in inputs]
    parameters = [each for each in parameters if each.requires_grad]
    try:
        expected, wanted = _run(plain, given, differentiated, parameters)
        found, gradients = _run(fused, given, differentiated, parameters)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        return f"it fails ({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''})"
    allowed = tolerance(*given, *expected)
    for what, ours, theirs in (("outputs", found, expected), ("gradients", gradients, wanted)):
        if [each.shape for each in ours] != [each.shape for each in theirs]:
            return f"its {what} have other shapes than the plain module's"
        if [each.dtype for each in ours] != [each.dtype for each in theirs]:
            return f"its {what} have other dtypes than the plain module's"
        for mine, right in zip(ours, theirs, strict=True):
            gap = apart(mine, right)
            if not gap <= allowed:
                return f"its {what} differ from the plain module's by {gap:.2g} of the largest"
    return None


def tolerance(*tensors: Any) -> float:
    """Return the largest difference that rounding to the coarsest dtype among tensors explains."""
    return max(TOLERANCE.get(each.dtype, 0.0) for each in tensors if isinstance(each, Tensor))


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest entry expected; NaN counts as infinite."""
    gap = float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-12))
    return gap if gap == gap else float("inf")


def _run(
    function: Callable[..., Any], inputs: list[Any], differentiated: int, parameters: list[Tensor]
) -> tuple[Outputs, Outputs]:
    """Return outputs and the gradients of inputs and parameters, for gradients of the outputs that are no constant."""
    with torch.enable_grad():
        leaves = [each.clone().requires_grad_() for each in inputs[:differentiated]]
        result = function(*leaves, *inputs[differentiated:])
        outputs = (result,) if isinstance(result, Tensor) else tuple(result)
        upstream = [_wave(each) for each in outputs]
        gradients = torch.autograd.grad(outputs, [*leaves, *parameters], upstream, materialize_grads=True)
    return tuple(each.detach() for each in outputs), gradients


def _wave(like: Tensor) -> Tensor:
    """Return numbers of both signs in another's shape; no generator is moved for them."""
    return torch.sin(torch.arange(like.numel(), device=like.device).float() * 1.7).view(like.shape).to(like.dtype)


@contextmanager
def trial_mode(model: nn.Module, device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Switch dropout off and compute in `dtype`, as the run will; every sub-module's mode is put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    lower = dtype in (torch.bfloat16, torch.float16)
    try:
        with torch.autocast(device_type, dtype=dtype if lower else None, enabled=lower):
            yield
    finally:
        for module, training in modes:
            module.training = training


def run_on_a_few_tokens(model: nn.Module) -> None:
    """Run a causal LM on two rows of eight tokens, so that what listens in it meets its own inputs."""
    table: Any = model.get_input_embeddings()  # type: ignore[operator]
    ids = torch.arange(1, 17, device=table.weight.device).view(2, 8) % table.weight.shape[0]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
