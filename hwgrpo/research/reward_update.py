"""The optimizer updates of a reward model: micro-batches by token budget, the loss a mean over the full update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from hwgrpo.algorithms.coefficients import initial_coefficients
from hwgrpo.config.derived import prompts_per_update
from hwgrpo.research import reward_losses
from hwgrpo.research.score_model import ScoreModel
from hwgrpo.research.scored_examples import ScoredExample
from hwgrpo.rewards.models.padded_batches import batches, padded
from hwgrpo.training.policy.auto_settings import micro_batch_tokens
from hwgrpo.training.update.policy_update import PassValues, PolicyUpdate


class RewardUpdate(PolicyUpdate):
    """Trains the reward model on one batch of examples after another; optimizer steps are those of `PolicyUpdate`.

    The loss of an update is the mean over its examples of all ranks, so that the split into micro-batches and ranks has
    no effect.
    """

    remedy = "lower optim.lr, or check the scores of the data"

    def __post_init__(self) -> None:
        self.coefficients = initial_coefficients(self.config.algorithm)
        self.scores_BK: torch.Tensor = torch.zeros(0, 1)
        """[B, 1] scores of the last step's examples on this rank, or [B, 2] of pairs."""

    def __call__(self, batch: Any) -> dict[str, float]:
        """Run every update of a step.

        Args:
            batch: this rank's `ScoredExample`s. Afterwards `scores_BK` has their scores, each before its update.

        Returns:
            Loss, gradient norm, learning rate and faults, over all ranks.

        Raises:
            RunError: as of `PolicyUpdate`.
        """
        examples = cast(Sequence[ScoredExample], batch)
        local = prompts_per_update(self.config) // self.strategy.world_size
        losses, norms, scores = [], [], []
        for first in range(0, len(examples), local):
            sums, norm = self._update(batch, range(first, min(first + local, len(examples))), None)
            losses.append(sums["loss"])
            norms.append(norm)
            scores.append(self.scores_BK)
        self.scores_BK = torch.cat(scores)
        return {
            "actor/loss": math.fsum(losses) / len(losses),
            "actor/grad_norm": math.fsum(norms) / len(norms),
            "actor/lr": float(self.strategy.optimizer.param_groups[0]["lr"]),
            "actor/skipped_updates": float(sum(not math.isfinite(norm) for norm in norms)),
            "perf/oom_restarts": float(self.budget.pop_restarts() if self.budget else 0),
        }

    def accumulate_gradients(
        self, batch: Any, sequences: Sequence[int], logprobs: torch.Tensor | None = None
    ) -> tuple[float, dict[str, float]]:
        """Accumulate the gradient of one update in the parameters, averaged over ranks.

        Args:
            batch: this rank's `ScoredExample`s.
            sequences: indices of those of the update.
            logprobs: unused.

        Returns:
            The update's loss over all ranks, and the number of its `tokens`.
        """
        examples = [cast(ScoredExample, batch[index]) for index in sequences]
        count, tokens = self.strategy.sum([len(examples), sum(each.length for each in examples)])
        share = self.strategy.world_size / count  # strategies average gradients over ranks
        self.scores_BK = torch.zeros(len(examples), len(examples[0].rows))

        def passes() -> float:
            of_passes: list[torch.Tensor] = []
            of_examples = PassValues()
            self.policy.train()
            parts = list(self._parts(examples))
            for number, part in enumerate(parts):
                with self.strategy.accumulate(last=number == len(parts) - 1):
                    scores = self._scores([examples[index] for index in part or [0]])
                    losses = self.losses(scores, [examples[index] for index in part or [0]])
                    # a pass without examples only takes part in the collectives of the others
                    loss = losses.sum() * (share if part else 0.0)
                    self.strategy.backward(loss)
                of_passes.append(loss.detach())
                if part:
                    of_examples.add(torch.tensor(part), scores.detach())
            of_examples.write(self.scores_BK)
            return float(torch.stack(of_passes).cpu().double().sum())

        loss = self._run_within_budget("updating", passes, undo=self.strategy.discard_gradients)
        self.strategy.reduce_gradients()
        [total] = self.strategy.sum([loss / self.strategy.world_size])
        return total, {"tokens": tokens}

    def losses(self, scores_BK: torch.Tensor, examples: Sequence[ScoredExample]) -> torch.Tensor:
        """Return the loss of each example, [B].

        Args:
            scores_BK: [B, 1] scores, or [B, 2] of chosen and rejected responses.
            examples: B examples.
        """
        targets = torch.tensor([each.target for each in examples], dtype=scores_BK.dtype, device=scores_BK.device)
        loss = getattr(reward_losses, self.config.reward_model.loss)
        return loss(*scores_BK.unbind(1), targets)

    def score_examples(self, examples: Sequence[ScoredExample]) -> torch.Tensor:
        """Return the scores of examples without gradient, [B, 1] fp32, or [B, 2] of pairs."""
        result = torch.zeros(len(examples), len(examples[0].rows))

        def passes() -> None:
            of_examples = PassValues()
            for part in self._parts(examples):
                scores = self._scores([examples[index] for index in part or [0]])
                if part:
                    of_examples.add(torch.tensor(part), scores)
            of_examples.write(result)

        self.policy.eval()
        with torch.no_grad():
            self._run_within_budget("scoring", passes, undo=lambda: None)
        return result

    def _scores(self, examples: Sequence[ScoredExample]) -> torch.Tensor:
        """Return the scores of the examples' rows, [B, rows of each]."""
        module = cast(ScoreModel, self.strategy.module)
        ids, mask = padded([row for each in examples for row in each.rows], cast(ScoreModel, self.policy).pad)
        return module(ids.to(self.device), mask.to(self.device)).view(len(examples), -1)

    def _parts(self, examples: Sequence[ScoredExample]) -> Iterator[list[int]]:
        """Yield micro-batches of examples, the same number on every rank, since collectives must match."""
        tokens = self.budget.tokens if self.budget else micro_batch_tokens(self.config, self.device)
        rows = len(examples[0].rows)
        parts = list(batches([max(map(len, each.rows)) for each in examples], max(1, tokens // rows)))
        most = max(self.strategy.gather_objects(len(parts)))
        yield from parts + [[] for _ in range(most - len(parts))]
