"""Training of a reward model on outcomes: AdamW on batches of rows or of pairs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hwgrpo.errors import RunError
from hwgrpo.research.outcomes import Outcome, pairs
from hwgrpo.research.reward_losses import bradley_terry, classification, mse
from hwgrpo.rewards.models.padded_batches import batches
from hwgrpo.training.strategies.optimizer import clip_by_norm

LOSSES = ("classification", "mse", "bradley_terry")
MAX_GRADIENT = 1.0
"""Norm to which gradients are clipped."""
_REMEDY = "lower kwargs.lr of the reward online_reward_model, or check the verifier's outcomes"
Example = tuple[Outcome, ...]
"""One row, or the better and the worse one of a pair."""


class RewardTraining:
    """A model with its optimizer. Dropout is off, so that nothing is drawn from global generators.

    Args:
        model: with one label; fp32.
        logits: returns the scores of rows of tokens, [B] fp32, with gradients.
        loss: one of `LOSSES`.
        lr: learning rate.
        batch_size: rows, or pairs, of an update.
        epochs: passes over the rows of a training.
        tokens: most tokens of a forward pass, padding included.
    """

    def __init__(
        self,
        model: Any,
        logits: Callable[[Sequence[Sequence[int]]], torch.Tensor],
        loss: str,
        lr: float,
        batch_size: int,
        epochs: int,
        tokens: int,
    ) -> None:
        self._model, self._logits, self._loss = model, logits, loss
        self._batch_size, self._epochs, self._tokens = batch_size, epochs, tokens
        self._parameters = dict(model.named_parameters())
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, foreach=False)

    def train(self, rows: Sequence[Outcome], seed: str) -> float | None:
        """Train on rows.

        Args:
            rows: outcomes.
            seed: of their order.

        Returns:
            The mean loss of the updates, before each; None if there was nothing to train on (no pairs).

        Raises:
            RunError: a loss or a gradient is not finite.
        """
        paired = self._loss == "bradley_terry"
        examples: list[Example] = list(pairs(rows)) if paired else [(row,) for row in rows]
        order = random.Random(f"order {seed}")
        losses = []
        for _ in range(self._epochs):
            order.shuffle(examples)
            parts = [examples[at : at + self._batch_size] for at in range(0, len(examples), self._batch_size)]
            losses += [self._update(part) for part in parts]
        return sum(losses) / len(losses) if losses else None

    def state(self) -> dict[str, torch.Tensor]:
        """Return weights and optimizer states by name, as copies on the CPU."""
        named = {f"model.{name}": parameter.detach() for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            for kind, value in self._optimizer.state[parameter].items():
                named[f"{kind}.{name}"] = value
        return {name: value.to("cpu", copy=True).contiguous() for name, value in named.items()}

    @torch.no_grad()
    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore what `state` returned."""
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[f"model.{name}"])
            states = {kind: tensors[f"{kind}.{name}"] for kind in _kinds(tensors, name)}
            self._optimizer.state[parameter] = {
                kind: value if kind == "step" else value.to(parameter.device) for kind, value in states.items()
            }

    def _update(self, examples: Sequence[Example]) -> float:
        """Make one update by the mean loss of the examples; return the loss before it."""
        self._optimizer.zero_grad()
        with torch.enable_grad():
            total = 0.0
            for part in self._parts(examples):
                loss = self._losses(part).sum() / len(examples)
                loss.backward()
                total += float(loss.detach())
        if not math.isfinite(total):
            raise RunError(f"the loss of the online reward model is {total}: {_REMEDY}")
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        norm = float(clip_by_norm(gradients, MAX_GRADIENT))
        if not math.isfinite(norm):
            raise RunError(f"the gradient of the online reward model has the norm {norm}: {_REMEDY}")
        self._optimizer.step()
        return total

    def _parts(self, examples: Sequence[Example]) -> Iterator[list[Example]]:
        """Yield examples in parts whose forward pass has at most `tokens` tokens."""
        width = len(examples[0])
        lengths = [max(len(row.tokens) for row in example) for example in examples]
        for chosen in batches(lengths, max(1, self._tokens // width)):
            yield [examples[each] for each in chosen]

    def _losses(self, examples: Sequence[Example]) -> torch.Tensor:
        """Return the loss of each example, [B]."""
        scores = self._logits([row.tokens for column in zip(*examples, strict=True) for row in column])
        if self._loss == "bradley_terry":
            return bradley_terry(*scores.chunk(2))
        targets = torch.tensor([row.target for row, *_ in examples], dtype=scores.dtype, device=scores.device)
        return (classification if self._loss == "classification" else mse)(scores, targets)


def _kinds(tensors: dict[str, torch.Tensor], name: str) -> list[str]:
    return [kind for kind in ("step", "exp_avg", "exp_avg_sq") if f"{kind}.{name}" in tensors]
