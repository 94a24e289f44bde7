"""Call a loss function on ranges of rows, check its results and sum them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .argument_checks import shape_of
from .streaming import RowGradients, RowStats


class TokenStats(NamedTuple):
    """The statistics that a loss function receives for R rows.

    Args:
        logprob: [R] log-probability of the target (nats), fp32, differentiable.
        entropy: [R] entropy (nats), fp32, differentiable.
        full_kl: [R] KL divergence (nats) from the reference over the full vocabulary, fp32, differentiable; None
            without a reference.
        cu_seqlens: [S+1] int64 row offsets of the sequences among these R rows, or None under scope "token".
            A sequence all of whose rows are masked has length 0.
        ref_logprob: [R] log-probability of the target under the reference (nats), fp32; None without one.
    """

    logprob: Tensor
    entropy: Tensor
    full_kl: Tensor | None = None
    cu_seqlens: Tensor | None = None
    ref_logprob: Tensor | None = None


LossFunction = Callable[[TokenStats, Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]


class LossCalls:
    """Calls the loss function on ranges of rows, and sums its loss and metrics."""

    def __init__(
        self,
        loss_fn: LossFunction,
        rows: Mapping[str, Tensor],
        bounds: list[int] | None,
        device: torch.device,
        with_reference: bool,
    ) -> None:
        self.loss_fn, self.rows, self.bounds, self.with_reference = loss_fn, rows, bounds, with_reference
        self.loss: Tensor | None = None
        self.sums: dict[str, Tensor] = {}
        self._device = device

    def __call__(
        self, stats: RowStats, start: int, stop: int, span: tuple[int, int] | None, needs_grad: bool
    ) -> RowGradients:
        """Return the loss gradients of rows [start, stop); entropy and kl are None if the loss ignores them.

        Args:
            span: first and last-plus-one sequence of the chunk; None: the rows are all rows.
            needs_grad: compute gradients; else they are zero.
        """
        reference = stats.reference
        leaves = [stats.logprob.detach(), stats.entropy.detach()]
        if reference is not None:
            leaves.append(reference.kl.detach())
        with torch.enable_grad():
            if needs_grad:
                for each in leaves:
                    each.requires_grad_()
            logprob, entropy = leaves[:2]
            offsets = self._offsets(start, span)
            token_stats = TokenStats(logprob, entropy, None, offsets)
            if reference is not None:
                token_stats = token_stats._replace(full_kl=leaves[2], ref_logprob=reference.ref_logprob)
            is_all = start == 0 and all(each.shape[0] == stop for each in self.rows.values())
            rows = self.rows if is_all else {name: each[start:stop] for name, each in self.rows.items()}
            losses, metrics = _check_result(self.loss_fn(token_stats, rows), stop - start)
            loss = losses.sum()
            gradients: tuple[Tensor | None, ...] = ()
            if needs_grad and loss.requires_grad:
                gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        loss = loss.detach().to(stats.logprob.dtype)
        self.loss = loss if self.loss is None else self.loss + loss
        for name, metric in metrics.items():
            total = metric.detach().sum(dtype=loss.dtype)
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        g, *others = gradients or (None,)
        return RowGradients(torch.zeros_like(stats.logprob) if g is None else g, *others)

    def infer_metric_names(self) -> None:
        """Call the loss on one dummy row, so that a rank without rows reports the same metrics as others."""
        zero = torch.zeros(1, device=self._device)
        rows = {name: each.new_zeros(1, *each.shape[1:]) for name, each in self.rows.items()}
        offsets = None if self.bounds is None else torch.tensor([0, 1], device=self._device)
        kl = zero.clone() if self.with_reference else None
        dummy = TokenStats(zero, zero.clone(), kl, offsets, kl)
        _, metrics = _check_result(self.loss_fn(dummy, rows), 1)
        self.sums = {name: zero.new_zeros(()) for name in metrics}

    def _offsets(self, start: int, span: tuple[int, int] | None) -> Tensor | None:
        if self.bounds is None:
            return None
        first, last = span or (0, len(self.bounds) - 1)
        return torch.tensor([bound - start for bound in self.bounds[first : last + 1]], device=self._device)


def _check_result(result: Any, n: int) -> tuple[Tensor, Mapping[str, Tensor]]:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        _raise_for_result(f"(loss_per_row, metrics), got {type(result).__name__}")
    losses, metrics = result
    if not isinstance(losses, Tensor) or losses.shape != (n,):
        _raise_for_result(f"one loss for each of its {n} rows, got {shape_of(losses)}; linear_token_loss sums them")
    if not losses.is_floating_point():
        _raise_for_result(f"floating losses, got {losses.dtype}")
    for name, metric in metrics.items():
        if not isinstance(metric, Tensor) or metric.shape != (n,):
            _raise_for_result(f"metric {name!r} with one value for each of its {n} rows, got {shape_of(metric)}")
    return losses, metrics


def _raise_for_result(expected: str) -> NoReturn:
    raise ValueError(f"loss_fn must return {expected}")
