"""One step's optimizer updates: micro-batches by token budget, losses normalised by counts of the full update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from hwgrpo_kernels import ReferenceHead, TokenLoss

from hwgrpo.algorithms.aggregation import count, token_weights, tokens_of_prompts
from hwgrpo.algorithms.coefficients import Coefficients, initial_coefficients
from hwgrpo.algorithms.policy_loss import PolicyLoss, build_loss
from hwgrpo.algorithms.scope import Scope, sequence_sum
from hwgrpo.algorithms.token_selection import UpdateTokens
from hwgrpo.config import Config
from hwgrpo.config.derived import prompts_per_update
from hwgrpo.config.schema import CorrectionConfig
from hwgrpo.errors import RunError
from hwgrpo.training.policy.auto_settings import micro_batch_tokens
from hwgrpo.training.policy.layouts import Layout, Rows
from hwgrpo.training.policy.micro_batch import MicroBatch, build_micro_batch, split_micro_batches
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.policy.sequence_shard import shard_micro_batch
from hwgrpo.training.strategies.optimizer import learning_rate
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update.flops import training_work
from hwgrpo.training.update.group_batch import GroupBatch, gather_group_batch
from hwgrpo.training.update.step_metrics import WorstToken, gap_to_rollout, update_metrics
from hwgrpo.training.update.token_budget import TokenBudget
from hwgrpo.training.update.train_batch import loss_signals, short_sample, split_updates, with_weights
from hwgrpo.values import TrainBatch

T = TypeVar("T")


class UpdateWatcher(Protocol):
    """Reads an update, and changes nothing."""

    def gradients_ready(self, loss: float, sequences: Sequence[int], logprobs: torch.Tensor) -> None:
        """Read the gradients of the parameters, not clipped yet.

        Args:
            loss: the update's loss.
            sequences: indices of its sequences in the batch.
            logprobs: [R] fp32 of the policy in its passes; 0 for tokens that were not computed.
        """
        ...

    def updated(self, norm: float, lr: float | None) -> None:
        """Read the parameters after the optimizer's step.

        Args:
            norm: of the full gradient, before it was clipped.
            lr: the learning rate; None: the gradient was not finite, and the update was skipped.
        """
        ...


@dataclass
class PolicyUpdate:
    """Trains the policy on one TrainBatch after another.

    Gradients are those of the global mean: token and sequence counts of the full update, over all ranks, are known
    before the first pass, so the split into micro-batches and ranks has no effect.
    """

    remedy: ClassVar = "lower optim.lr, check the rewards, or set kernels.logits_dtype=float32"
    config: Config
    strategy: Strategy
    policy: PolicyModel
    device: torch.device
    layout: Layout
    total_updates: int
    budget: TokenBudget | None = None
    """Token budget of a micro-batch; None: the configured one, and out of memory ends the run."""
    reference: Reference | None = None
    """The model of a KL over the full vocabulary, which each pass computes; None: no KL, or one of `ref_logprobs`."""
    scope: Scope = "token"
    """Rows that the loss sees at once even if it needs fewer."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user, returned by `pop_notes`."""
    updates_done: int = 0
    skipped_in_a_row: int = 0
    """Consecutive updates skipped until now because their gradient was not finite."""
    worst_token: WorstToken | None = None
    """The token of the last step whose log-probs by trainer and engine differ most."""
    sample: TrainBatch | None = None
    """A few short sequences of the last step that had any on this rank, for `sample_scores`; None: none yet."""
    flops: float = 0.0
    """FLOPs of this rank's share of the last step's updates; 0 where they cannot be counted."""
    watcher: UpdateWatcher | None = field(default=None, init=False)
    """Reads the next update."""

    def __post_init__(self) -> None:
        self._work = training_work(self.policy, with_reference=self.reference is not None)
        self.coefficients: Coefficients = initial_coefficients(self.config.algorithm)
        self.loss_fn: PolicyLoss = build_loss(self.config.algorithm, self.coefficients, self.scope)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {
            "updates_done": self.updates_done,
            "skipped_in_a_row": self.skipped_in_a_row,
            "coefficients": self.coefficients.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; older checkpoints lack all but the number of updates."""
        self.updates_done = state["updates_done"]
        self.skipped_in_a_row = state.get("skipped_in_a_row", 0)
        self.coefficients.restore(state.get("coefficients", {}))

    def apply_correction(self, correction: CorrectionConfig) -> None:
        """Apply these settings in place of `algorithm.correction` from the next update on."""
        if correction != self.loss_fn.algorithm.correction:
            algorithm = replace(self.config.algorithm, correction=correction)
            self.loss_fn = build_loss(algorithm, self.coefficients, self.scope)

    def watch(self, watcher: UpdateWatcher) -> None:
        """Let a watcher read the next update, and no later one."""
        self.watcher = watcher

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the ratio can differ from 1: several updates per batch, or dropout (an adapter may bring its own)."""
        t = self.config.trainer
        one_update = t.epochs_per_batch == 1 and prompts_per_update(self.config) == t.prompts_per_step
        return not one_update or self.has_dropout

    @property
    def has_dropout(self) -> bool:
        """Whether a training pass draws random numbers."""
        return any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in self.policy.modules())

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether sequences with zero advantage have zero loss and gradient, so that their passes can be skipped.

        False with a KL term, an entropy bonus, a router loss or a loss with a penalty, to which every token
        contributes, and with a loss that compares tokens of the full update with each other.
        """
        a = self.config.algorithm
        in_loss = a.kl.coef if not a.kl.in_reward else 0.0
        coefficients = (in_loss, a.entropy_coef, a.entropy_target, self.config.model.router_loss_coef)
        loss = self.loss_fn
        return not any(coefficients) and not loss.penalizes and loss.scope != "batch" and not loss.selections

    def trained_sequences(self, batch: TrainBatch, sequences: Sequence[int]) -> list[int]:
        """Return those of `sequences` on which the gradient depends."""
        if not self.skips_zero_advantages:
            return list(sequences)
        has_gradient = batch.advantages.ne(0)
        if batch.token_advantages is not None:  # their mean may be 0
            mine_R = batch.loss_tokens_of(torch.ones(len(batch), dtype=torch.bool))
            has_gradient = sequence_sum((batch.token_advantages.ne(0) & mine_R).float(), batch.offsets)[0] > 0
        kept = has_gradient.tolist()
        return [s for s in sequences if kept[s]]

    def score(
        self,
        batch: TrainBatch,
        policy: PolicyModel | None = None,
        sequences: Sequence[int] | None = None,
        entropies: torch.Tensor | None = None,
        square_sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the log-probs [R] fp32 of the batch's response tokens, without gradient or dropout.

        Args:
            batch: this rank's sequences.
            policy: the model that scores; None: the policy in training.
            sequences: indices of the sequences to score, the others get 0; None: all.
            entropies, square_sums: [R], into which these statistics are written, if not None.
        """
        scorer = policy or self.policy
        further = {"entropy": entropies, "square_sum": square_sums}
        options = {f"with_{name}": values is not None for name, values in further.items()}
        results = {"logprob": torch.zeros(len(batch.tokens))} | {n: v for n, v in further.items() if v is not None}
        wanted = range(len(batch)) if sequences is None else sequences
        pooled = gather_group_batch(self.strategy.sequence_group, replace(batch, token_extras={}), wanted)
        signals = {} if pooled.batch.floors is None else {"logprob_floor": "floors"}
        pooled_results = {name: torch.zeros(len(pooled.batch.tokens)) for name in results}

        def passes() -> None:
            scored = {name: PassValues() for name in results}
            for part in self._micro_batches(pooled.batch, pooled.sequences):
                micro = self._build_micro_batch(pooled, part, signals)
                micro = shard_micro_batch(micro, pooled.group, full_sequences=False)
                of_micro = scorer(micro.to(self.device), **options)
                for name, values in scored.items():
                    values.add(micro.token_index, getattr(of_micro, name))
            for name, values in scored.items():
                values.write(pooled_results[name])

        was_training = scorer.training
        scorer.eval()
        with torch.no_grad():
            self._run_within_budget("scoring", passes, undo=lambda: None)
        scorer.train(was_training)
        for name, values in results.items():
            values[pooled.own_tokens] = pooled.scatter_back(pooled_results[name])
        return results["logprob"]

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
        self.sample = short_sample(batch, self.policy.options.temperature) or self.sample
        local = prompts_per_update(self.config) // self.strategy.world_size
        updates = split_updates(batch, t.prompts_per_step // self.strategy.world_size, local)
        scored = batch.old_logprobs if self.config.algorithm.old_logprobs == "trainer" else None
        trainer_logprobs = torch.zeros(len(batch.tokens)) if scored is None else scored
        totals: dict[str, float] = {}
        norms: list[float] = []
        self.flops = 0.0
        skipped = 0
        for epoch in range(t.epochs_per_batch):
            for sequences in updates:
                fresh = trainer_logprobs if epoch == 0 and scored is None else None
                sums, norm = self._update(batch, sequences, fresh)
                norms.append(norm)
                skipped += not math.isfinite(norm)
                for name, value in sums.items():
                    totals[name] = totals.get(name, 0.0) + value
        restarts = self.budget.pop_restarts() if self.budget else 0
        faults = {"actor/skipped_updates": float(skipped), "perf/oom_restarts": float(restarts)}
        lr = float(self.strategy.optimizer.param_groups[0]["lr"])
        computed = torch.zeros(len(batch), dtype=torch.bool)
        computed[self.trained_sequences(batch, range(len(batch)))] = True
        gap, self.worst_token = gap_to_rollout(batch, computed, trainer_logprobs, self.strategy)
        metrics = update_metrics(totals, norms, lr) | faults | gap
        if self.coefficients.state():
            metrics |= self.coefficients.after_step(metrics, self.strategy.sum([len(batch)])[0])
        return metrics

    def _update(
        self, batch: TrainBatch, sequences: Sequence[int], logprobs: torch.Tensor | None
    ) -> tuple[dict[str, float], float]:
        """Run one optimizer update; write the current log-probs into `logprobs` [R] if it is not None."""
        watcher, self.watcher = self.watcher, None
        if watcher is not None and logprobs is None:
            logprobs = torch.zeros(len(batch.tokens))
        loss, sums = self.accumulate_gradients(batch, sequences, logprobs)
        if watcher is not None and logprobs is not None:
            watcher.gradients_ready(loss, sequences, logprobs)
        norm = float(self.strategy.clip_gradients(self.config.optim.grad_clip))
        lr = learning_rate(self.config.optim, self.updates_done, self.total_updates)
        if math.isfinite(norm):
            self.strategy.step(lr)
            self.skipped_in_a_row = 0
        else:
            self.strategy.discard_gradients()
            self.skipped_in_a_row += 1
        if watcher is not None:
            watcher.updated(norm, lr if math.isfinite(norm) else None)
        if not math.isfinite(norm):
            self._report_skipped_update(loss)
        self.updates_done += 1
        self.coefficients.after_update(sums.get("entropy", math.nan) / max(sums["tokens"], 1))
        return sums | {"loss": loss}, norm

    def _report_skipped_update(self, loss: float) -> None:
        most = self.config.trainer.max_skipped_updates
        problem = f"the gradient of update {self.updates_done + 1} is not finite (loss {loss:.4g})"
        if self.skipped_in_a_row > most:
            row = f"number {self.skipped_in_a_row} in a row, more than trainer.max_skipped_updates={most}"
            raise RunError(f"{problem}, {row}; {self.remedy}")
        self.notes.append(f"{problem}: the update is skipped and the weights are unchanged; {self.remedy}")

    def accumulate_gradients(
        self, batch: TrainBatch, sequences: Sequence[int], logprobs: torch.Tensor | None = None
    ) -> tuple[float, dict[str, float]]:
        """Accumulate the gradient of one update in the parameters, averaged over ranks.

        Returns:
            The update's loss, and the sums over tokens of its metrics, with the numbers of all `tokens` and of
            `trained` tokens; over all ranks. The entropy of an untrained token is estimated by its negative rollout
            log-prob, whose mean is the entropy; the trained tokens alone would be a biased sample.
        """
        chosen = torch.tensor(list(sequences), dtype=torch.int64)
        lengths = batch.loss_lengths[chosen]
        prompt_tokens, prompts = tokens_of_prompts(lengths, batch.prompt_index[chosen])
        tokens, filled, prompts = self.strategy.sum([*count(lengths), prompts])
        aggregation = self.config.algorithm.aggregation
        weights = token_weights(
            aggregation.name,
            lengths,
            total_tokens=int(tokens),
            total_sequences=int(filled),
            norm_length=aggregation.norm_length or self.config.rollout.max_response_tokens,
            total_prompts=int(prompts),
            prompt_tokens_S=prompt_tokens,
        )
        # Strategies average gradients over ranks; the factor turns that average into a sum.
        batch = with_weights(batch, sequences, weights * self.strategy.world_size)
        if selections := self.loss_fn.selections:
            entropies = torch.zeros(len(batch.tokens))
            scored = self.score(batch, sequences=sequences, entropies=entropies), entropies
            seed = self.config.trainer.seed * 1_000_003 + self.updates_done
            chosen_tokens = select_tokens(selections, batch, sequences, scored, self.strategy, seed)
            batch = replace(batch, selections=chosen_tokens)
        trained = self.trained_sequences(batch, sequences)
        pooled = gather_group_batch(self.strategy.sequence_group, batch, trained)
        pooled_logprobs = None if logprobs is None else torch.zeros(len(pooled.batch.tokens))
        loss, sums = self._run_within_budget(
            "updating", lambda: self._passes(pooled, tokens, pooled_logprobs), undo=self.strategy.discard_gradients
        )
        self.strategy.reduce_gradients()
        if logprobs is not None and pooled_logprobs is not None:
            logprobs[pooled.own_tokens] = pooled.scatter_back(pooled_logprobs)
        skipped = torch.ones(len(batch), dtype=torch.bool)
        skipped[trained] = False
        skipped &= torch.isin(torch.arange(len(batch)), torch.tensor(list(sequences), dtype=torch.int64))
        if skipped.any():
            surprise = -float(batch.rollout_logprobs[batch.loss_tokens_of(skipped)].sum())
            sums["entropy"] = sums.get("entropy", 0.0) + surprise
        sums["trained"] = float(batch.loss_lengths[torch.tensor(trained, dtype=torch.int64)].sum())
        names = sorted({name for names in self.strategy.gather_objects(list(sums)) for name in names})
        values = [sums.get(name, 0.0) for name in names]
        total_loss, *totals = self.strategy.sum([loss / self.strategy.world_size, *values])
        return total_loss, dict(zip(names, totals, strict=True)) | {"tokens": tokens}

    def _passes(
        self, pooled: GroupBatch, tokens: float, logprobs: torch.Tensor | None
    ) -> tuple[float, dict[str, float]]:
        """Run the forward and backward passes of an update; write its log-probs into `logprobs` [R] if not None.

        The host reads no result before the last pass: it prepares the next while the device computes. Without a mask
        (padded) transformers reads each pass's positions; a loss over sequences sends their bounds.

        Returns:
            This rank's loss and metric sums, not yet divided by the number of ranks.
        """
        full = self.loss_fn.scope != "token"
        parts = self._micro_batches(pooled.batch, pooled.sequences, full_trajectories=full)
        signals = loss_signals(pooled.batch, rollout=self.loss_fn.needs_rollout)
        losses: list[torch.Tensor] = []
        of_tokens = PassValues()
        sums: dict[str, torch.Tensor] = {}
        flops = 0.0
        self.policy.train()
        for i, part in enumerate(parts):
            micro = self._build_micro_batch(pooled, part, signals)
            flops += self._work.of(micro) / pooled.group.size if self._work else 0.0
            share = len(micro.targets) / max(tokens, 1) * self.strategy.world_size
            micro = shard_micro_batch(micro, pooled.group, full_sequences=full)
            with self.strategy.accumulate(last=i == len(parts) - 1):
                router = self.config.model.router_loss_coef * share
                out = forward_backward(self.strategy, micro.to(self.device), self.loss_fn, router, self.reference)
            losses.append(out.loss.detach())
            for name, value in out.sums.items():
                sums[name] = sums[name] + value if name in sums else value
            of_tokens.add(micro.token_index, out.logprob_N.detach())
        if logprobs is not None:
            of_tokens.write(logprobs)
        self.flops += flops
        return float(torch.stack(losses).cpu().double().sum()), to_host(sums)

    def pop_notes(self) -> list[str]:
        """Return and clear the notes for the user."""
        notes = self.notes + (self.budget.notes if self.budget else [])
        self.notes.clear()
        if self.budget:
            self.budget.notes.clear()
        return notes

    def _run_within_budget(self, what: str, work: Callable[[], T], undo: Callable[[], None]) -> T:
        return self.budget.run(self.strategy, what, work, undo) if self.budget else work()

    def _build_micro_batch(self, pooled: GroupBatch, part: Rows, signals: Mapping[str, str]) -> MicroBatch:
        return build_micro_batch(pooled.batch, part, signals, self.layout, multiple=pooled.group.size)

    def _micro_batches(
        self, batch: TrainBatch, sequences: Sequence[int], *, full_trajectories: bool = False
    ) -> list[Rows]:
        """Split into micro-batches, the same number on every rank, since collectives must match."""
        tokens = self.budget.tokens if self.budget else micro_batch_tokens(self.config, self.device)
        tokens *= self.strategy.sequence_group.size  # its ranks share them
        parts = split_micro_batches(
            batch, sequences, tokens, self.layout, self.policy.hidden_size, full_trajectories=full_trajectories
        )
        most = max(1, *self.strategy.gather_objects(len(parts)))
        return parts + [[] for _ in range(most - len(parts))]

    def with_old_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with old log-probs, the denominator of ratios, where they can differ from the current."""
        if self.config.algorithm.old_logprobs == "rollout":
            return replace(batch, old_logprobs=batch.rollout_logprobs)
        known = batch.old_logprobs is not None or batch.rollout_shares is not None
        if not self.needs_old_logprobs or known:
            return batch
        trained = self.trained_sequences(batch, range(len(batch)))
        return replace(batch, old_logprobs=self.score(batch, sequences=trained))

    def with_ref_logprobs(self, batch: TrainBatch, reference: Reference | None) -> TrainBatch:
        """Return the batch with the reference model's log-probs, where a KL term needs them."""
        if reference is None or self.reference is not None or self.config.algorithm.kl.in_reward:
            return batch
        with reference.active():
            return replace(batch, ref_logprobs=self.score(batch, reference.policy))


class PassValues:
    """Values per token, or per example, of several passes: they stay on the device until all are copied at once."""

    def __init__(self) -> None:
        self._index: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def add(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Add a pass.

        Args:
            index: [N] int64, on the host: the tokens or examples, in the order of `values`.
            values: [N, ...], on any device.
        """
        self._index.append(index)
        self._values.append(values)

    def write(self, into: torch.Tensor) -> None:
        """Write the values of all passes into a tensor [R, ...] fp32, on the host."""
        if self._values:
            into[torch.cat(self._index)] = torch.cat(self._values).float().cpu()


def to_host(scalars: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return scalars of a device as numbers, with one copy."""
    if not scalars:
        return {}
    return dict(zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True))


def forward_backward(
    strategy: Strategy, micro: MicroBatch, loss_fn: PolicyLoss, router_weight: float, reference: Reference | None
) -> TokenLoss:
    """Add the gradient of a micro-batch's loss to the policy's.

    The full KL needs hidden states and LM head of the reference beside those of the policy. A copy has a head of its
    own, whose weights a strategy that shards gathers for its forward only: the policy's pass is run within it, in
    place of that head. Adapters leave the head as it is, so hidden states are enough.

    Args:
        strategy: has the wrapped policy.
        micro: on the policy's device.
        loss_fn: the loss.
        router_weight: factor of the load-balancing loss.
        reference: the reference model, if the loss has the full KL to it; it computes without gradient or dropout.
    """
    if reference is None:
        return _train(strategy, micro, loss_fn, router_weight, None)
    if reference.kind == "copy":
        results: list[TokenLoss] = []
        with torch.no_grad():
            reference.policy(
                micro, visit=lambda head: results.append(_train(strategy, micro, loss_fn, router_weight, head))
            )
        return results[0]
    policy = reference.policy
    with torch.no_grad(), reference.active():
        hidden = policy.eval()(micro, visit=lambda head: None)
    policy.train()
    return _train(strategy, micro, loss_fn, router_weight, hidden)


def _train(
    strategy: Strategy,
    micro: MicroBatch,
    loss_fn: PolicyLoss,
    router_weight: float,
    reference: ReferenceHead | torch.Tensor | None,
) -> TokenLoss:
    with torch.enable_grad():
        result = strategy.module(micro, loss_fn, router_weight, reference=reference)
        strategy.backward(result.loss)
    return result


def select_tokens(
    selections: Mapping[str, Callable[[UpdateTokens], torch.Tensor]],
    batch: TrainBatch,
    sequences: Sequence[int],
    scored: tuple[torch.Tensor, torch.Tensor],
    strategy: Strategy,
    seed: int,
) -> dict[str, torch.Tensor]:
    """Return what each selection gives this rank's tokens: [R] fp32, 1 where selected; 0 outside of the update.

    Args:
        selections: name -> function of all tokens of the update.
        batch: this rank's sequences.
        sequences: indices of those of the update.
        scored: log-probs and entropies [R] of the policy before the update.
        strategy: reaches the other ranks.
        seed: of selections by chance; the same on all ranks.
    """
    chosen = torch.zeros(len(batch), dtype=torch.bool)
    chosen[torch.tensor(list(sequences), dtype=torch.int64)] = True
    mine_R = batch.loss_tokens_of(chosen)
    logprob_R, entropy_R = scored
    old_R = logprob_R if batch.old_logprobs is None else batch.old_logprobs
    if batch.rollout_shares is not None:
        old_R = logprob_R.lerp(batch.rollout_logprobs, batch.rollout_shares)
    own = [values[mine_R] for values in (logprob_R, old_R, batch.rollout_logprobs, entropy_R, batch.advantages_R)]
    ranks = strategy.gather_objects([*own, batch.loss_lengths[chosen]])
    new_R, old_R, rollout_R, entropy_R, advantage_R, lengths_S = map(torch.cat, zip(*ranks, strict=True))
    order_R = torch.randperm(len(new_R), generator=torch.Generator().manual_seed(seed))
    tokens = UpdateTokens(new_R, old_R, rollout_R, entropy_R, advantage_R, order_R, lengths_S)
    first = sum(len(parts[0]) for parts in ranks[: strategy.rank])
    found = {}
    for name, select in selections.items():
        found[name] = torch.zeros(len(batch.tokens))
        found[name][mine_R] = select(tokens)[first : first + int(mine_R.sum())].float()
    return found
