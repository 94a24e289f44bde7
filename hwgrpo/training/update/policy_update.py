"""One step's optimizer updates: micro-batches by token budget, losses normalised by counts of the whole update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from hwgrpo.algorithms.aggregation import count, token_weights
from hwgrpo.algorithms.policy_loss import PolicyLoss, build_loss
from hwgrpo.config import Config
from hwgrpo.config.derived import prompts_per_update
from hwgrpo.errors import RunError
from hwgrpo.training.policy.auto_settings import micro_batch_tokens
from hwgrpo.training.policy.layouts import Layout, Rows, split_micro_batches
from hwgrpo.training.policy.micro_batch import MicroBatch, TokenSignals, build_micro_batch
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.policy.sequence_shard import shard_micro_batch
from hwgrpo.training.strategies.optimizer import learning_rate
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update.flops import training_work
from hwgrpo.training.update.group_batch import GroupBatch, gather_group_batch
from hwgrpo.training.update.step_metrics import gap_to_rollout, update_metrics
from hwgrpo.training.update.token_budget import TokenBudget
from hwgrpo.training.update.train_batch import split_updates, token_signals
from hwgrpo.values import TrainBatch

T = TypeVar("T")


@dataclass
class PolicyUpdate:
    """Trains the policy on one TrainBatch after another.

    Gradients are those of the global mean: token and sequence counts of the whole update, over all ranks, are known
    before the first pass, so nothing depends on how the update is cut into micro-batches or spread over ranks.
    """

    config: Config
    strategy: Strategy
    policy: PolicyModel
    device: torch.device
    layout: Layout
    total_updates: int
    budget: TokenBudget | None = None
    """Of a micro-batch; None: what the settings say, and a full memory ends the run."""
    notes: list[str] = field(default_factory=list)
    """What `pop_notes` will return."""
    updates_done: int = 0
    skipped_in_a_row: int = 0
    """Updates that were left out up to now because their gradient was not finite, since the last that was not."""
    flops: float = 0.0
    """FLOPs that this rank's part of the last step's updates needed; 0 where they cannot be counted."""

    def __post_init__(self) -> None:
        self._work = training_work(self.policy)
        self.loss_fn: PolicyLoss = build_loss(self.config.algorithm)

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the ratio can differ from 1: several updates per batch, or dropout (an adapter may bring its own)."""
        t = self.config.trainer
        one_update = t.epochs_per_batch == 1 and prompts_per_update(self.config) == t.prompts_per_step
        dropout = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in self.policy.modules())
        return not one_update or dropout

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether a sequence with zero advantage adds nothing to loss and gradient, so that it need not be computed.

        Not with a KL term, an entropy bonus or a router loss, which every token feeds, nor with a loss that compares
        tokens of the whole update with each other.
        """
        a = self.config.algorithm
        coefficients = (a.kl.coef, a.entropy_coef, self.config.model.router_loss_coef)
        return not any(coefficients) and self.loss_fn.scope != "batch"

    def trained(self, batch: TrainBatch, sequences: Sequence[int]) -> list[int]:
        """Return those of `sequences` that the gradient depends on."""
        if not self.skips_zero_advantages:
            return list(sequences)
        counts = batch.advantages.ne(0).tolist()
        return [s for s in sequences if counts[s]]

    def score(
        self, batch: TrainBatch, policy: PolicyModel | None = None, sequences: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return the log-probs [R] fp32 of the batch's response tokens, without gradient or dropout.

        Args:
            batch: this rank's sequences.
            policy: the model that scores; None: the one being trained, as it stands.
            sequences: those to score, the others get 0; None: all.
        """
        scorer = policy or self.policy
        logprobs = torch.zeros(len(batch.tokens))
        wanted = range(len(batch)) if sequences is None else sequences
        given = gather_group_batch(self.strategy.sequence_group, batch, wanted, TokenSignals({}, {}))
        found = torch.zeros(len(given.batch.tokens))

        def passes() -> None:
            for part in self._micro_batches(given.batch, given.sequences):
                micro = shard_micro_batch(self._build_micro_batch(given, part), given.group, whole_sequences=False)
                found[micro.token_index] = scorer(micro.to(self.device)).logprob.float().cpu()

        was_training = scorer.training
        scorer.eval()
        with torch.no_grad():
            self._run_within_budget("scoring", passes, undo=lambda: None)
        scorer.train(was_training)
        logprobs[given.own_tokens] = given.own(found)
        return logprobs

    def __call__(self, batch: TrainBatch) -> dict[str, float]:
        """Run every update of a step.

        Args:
            batch: this rank's sequences, with old log-probs where `needs_old_logprobs`.

        Returns:
            The step's `actor/*` and `rollout_corr/*` metrics, over all ranks.

        Raises:
            RunError: the gradient was not finite in `trainer.max_skipped_updates` + 1 updates in a row; the policy
                keeps the weights of the last good one.
        """
        t = self.config.trainer
        local = prompts_per_update(self.config) // self.strategy.world_size
        updates = split_updates(batch, t.prompts_per_step // self.strategy.world_size, local)
        trainer_logprobs = batch.old_logprobs
        if trainer_logprobs is None:
            trainer_logprobs = torch.zeros(len(batch.tokens))
        totals: dict[str, float] = {}
        norms: list[float] = []
        self.flops = 0.0
        skipped = 0
        for epoch in range(t.epochs_per_batch):
            for sequences in updates:
                fresh = trainer_logprobs if epoch == 0 and batch.old_logprobs is None else None
                sums, norm = self._update(batch, sequences, fresh)
                norms.append(norm)
                skipped += not math.isfinite(norm)
                for name, value in sums.items():
                    totals[name] = totals.get(name, 0.0) + value
        restarts = self.budget.pop_restarts() if self.budget else 0
        faults = {"actor/skipped_updates": float(skipped), "perf/oom_restarts": float(restarts)}
        lr = float(self.strategy.optimizer.param_groups[0]["lr"])
        computed = torch.zeros(len(batch), dtype=torch.bool)
        computed[self.trained(batch, range(len(batch)))] = True
        gap = gap_to_rollout(batch, computed, trainer_logprobs, self.strategy)
        return update_metrics(totals, norms, lr) | faults | gap

    def _update(
        self, batch: TrainBatch, sequences: Sequence[int], logprobs: torch.Tensor | None
    ) -> tuple[dict[str, float], float]:
        """Run one optimizer update; write the current log-probs into `logprobs` [R] where it is given."""
        loss, sums = self.accumulate_gradients(batch, sequences, logprobs)
        norm = float(self.strategy.clip_gradients(self.config.optim.grad_clip))
        if math.isfinite(norm):
            self.strategy.step(learning_rate(self.config.optim, self.updates_done, self.total_updates))
            self.skipped_in_a_row = 0
        else:
            self.strategy.discard_gradients()
            self.skipped_in_a_row += 1
            self._report_skipped_update(loss)
        self.updates_done += 1
        return sums | {"loss": loss}, norm

    def _report_skipped_update(self, loss: float) -> None:
        most = self.config.trainer.max_skipped_updates
        what = f"the gradient of update {self.updates_done + 1} is not finite (loss {loss:.4g})"
        remedy = "lower optim.lr, check the rewards, or set kernels.logits_dtype=float32"
        if self.skipped_in_a_row > most:
            raise RunError(
                f"{what}, number {self.skipped_in_a_row} in a row, and trainer.max_skipped_updates={most} may be "
                f"left out; {remedy}"
            )
        self.notes.append(f"{what}: the update is left out and the weights stay as they were; {remedy}")

    def accumulate_gradients(
        self, batch: TrainBatch, sequences: Sequence[int], logprobs: torch.Tensor | None = None
    ) -> tuple[float, dict[str, float]]:
        """Leave the gradient of one update in the parameters, averaged over ranks.

        Returns:
            The update's loss, and the sums over tokens of its metrics, with the number of `tokens` and of those that
            were `trained`; all over all ranks. The entropy of a token that was not trained is taken from its rollout
            log-prob, whose negative has the entropy as its mean; left out, the rest would be no fair sample.
        """
        lengths = batch.lengths[torch.tensor(list(sequences), dtype=torch.int64)]
        tokens, filled = self.strategy.sum(count(lengths))
        aggregation = self.config.algorithm.aggregation
        weights = token_weights(
            aggregation.name,
            lengths,
            total_tokens=int(tokens),
            total_sequences=int(filled),
            norm_length=aggregation.norm_length or self.config.rollout.max_response_tokens,
        )
        # Strategies average gradients over ranks; the factor turns that average into a sum.
        weights = weights * self.strategy.world_size
        signals = token_signals(batch, sequences, weights, rollout=self.config.algorithm.correction.name != "none")
        trained = self.trained(batch, sequences)
        given = gather_group_batch(self.strategy.sequence_group, batch, trained, signals)
        found = None if logprobs is None else torch.zeros(len(given.batch.tokens))
        loss, sums = self._run_within_budget(
            "updating", lambda: self._passes(given, tokens, found), undo=self.strategy.discard_gradients
        )
        self.strategy.reduce_gradients()
        if logprobs is not None and found is not None:
            logprobs[given.own_tokens] = given.own(found)
        skipped = torch.ones(len(batch), dtype=torch.bool)
        skipped[trained] = False
        skipped &= torch.isin(torch.arange(len(batch)), torch.tensor(list(sequences), dtype=torch.int64))
        if skipped.any():
            surprise = -batch.rollout_logprobs[torch.repeat_interleave(skipped, batch.lengths)].sum()
            sums["entropy"] = sums.get("entropy", 0.0) + surprise
        sums["trained"] = batch.lengths[torch.tensor(trained, dtype=torch.int64)].sum()
        names = sorted({name for names in self.strategy.gather_objects(list(sums)) for name in names})
        values = [float(sums[name]) if name in sums else 0.0 for name in names]
        total_loss, *totals = self.strategy.sum([float(loss) / self.strategy.world_size, *values])
        return total_loss, dict(zip(names, totals, strict=True)) | {"tokens": tokens}

    def _passes(
        self, given: GroupBatch, tokens: float, logprobs: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run the forward and backward passes over what is trained; leave its log-probs in `logprobs` [R] if given.

        Returns:
            Loss and metric sums of this rank, both before they are divided by the number of ranks.
        """
        parts = self._micro_batches(given.batch, given.sequences)
        loss = torch.zeros((), dtype=torch.float64)
        sums: dict[str, torch.Tensor] = {}
        flops = 0.0
        self.policy.train()
        for i, part in enumerate(parts):
            micro = self._build_micro_batch(given, part)
            flops += self._work.of(micro) / given.group.size if self._work else 0.0
            share = len(micro.targets) / max(tokens, 1) * self.strategy.world_size
            micro = shard_micro_batch(micro, given.group, whole_sequences=self.loss_fn.scope != "token")
            with self.strategy.accumulate(last=i == len(parts) - 1):
                out = self.strategy.module(
                    micro.to(self.device), self.loss_fn, self.config.model.router_loss_coef * share
                )
                self.strategy.backward(out.loss)
            loss += out.loss.detach().cpu().double()
            for name, value in out.sums.items():
                sums[name] = sums[name] + value if name in sums else value
            if logprobs is not None:
                logprobs[micro.token_index] = out.logprob_N.detach().float().cpu()
        self.flops += flops
        return loss, sums

    def pop_notes(self) -> list[str]:
        """Return what a user should know since this was last asked, in words."""
        told = self.notes + (self.budget.notes if self.budget else [])
        self.notes.clear()
        if self.budget:
            self.budget.notes.clear()
        return told

    def _run_within_budget(self, what: str, work: Callable[[], T], undo: Callable[[], None]) -> T:
        return self.budget.run(self.strategy, what, work, undo) if self.budget else work()

    def _build_micro_batch(self, given: GroupBatch, part: Rows) -> MicroBatch:
        return build_micro_batch(given.batch, part, given.signals, self.layout, multiple=given.group.size)

    def _micro_batches(self, batch: TrainBatch, sequences: Sequence[int]) -> list[Rows]:
        """Cut into micro-batches; every rank gets the same number, since collectives must match."""
        tokens = self.budget.tokens if self.budget else micro_batch_tokens(self.config, self.device)
        tokens *= self.strategy.sequence_group.size  # each of its ranks has a part of them
        parts = split_micro_batches(batch, sequences, tokens, self.layout, self.policy.hidden_size)
        most = max(1, *self.strategy.gather_objects(len(parts)))
        return parts + [[] for _ in range(most - len(parts))]

    def with_old_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with the log-probs that ratios are taken against, where they can differ from the current."""
        if not self.needs_old_logprobs:
            return batch
        return replace(batch, old_logprobs=self.score(batch, sequences=self.trained(batch, range(len(batch)))))

    def with_ref_logprobs(self, batch: TrainBatch, reference: Reference | None) -> TrainBatch:
        """Return the batch with the reference model's log-probs, where a KL term needs them."""
        if reference is None:
            return batch
        with reference.active():
            return replace(batch, ref_logprobs=self.score(batch, reference.policy))
