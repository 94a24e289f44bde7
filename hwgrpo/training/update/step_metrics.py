"""A step's metrics over all ranks, under verl's and TRL's names, and lines on what failed in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hwgrpo.algorithms.correction import mismatch_metrics, mismatch_sums
from hwgrpo.algorithms.groups import group_statistics
from hwgrpo.ragged import offsets_of
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.values import Completions, PromptBatch, Rewards, TrainBatch

METRIC_NAMES = {
    "pg_loss": ("actor/pg_loss",),
    "entropy": ("actor/entropy", "entropy"),
    "kl": ("actor/kl_loss", "kl"),
    "ppo_kl": ("actor/ppo_kl",),
    "ratio": ("actor/ratio_mean",),
    "pg_clipfrac": ("actor/pg_clipfrac", "clip_ratio/region_mean"),
    "pg_clipfrac_lower": ("actor/pg_clipfrac_lower",),
    "clip_ratio/low": ("clip_ratio/low_mean",),
    "clip_ratio/high": ("clip_ratio/high_mean",),
    "clip_ratio/capped": ("cispo_clip_ratio",),
}
"""The loss functions' metrics, under verl's and TRL's names."""

RATIO_METRICS = ("ppo_kl", "ratio")
"""Those of `METRIC_NAMES` averaged over trained tokens, as metrics without an entry are; the others are 0 at zero
advantage, or known for all tokens."""


def sample_metrics(
    prompts: PromptBatch,
    completions: Completions,
    rewards: Rewards,
    advantages: torch.Tensor,
    gather: Any,
    token_advantages: torch.Tensor | None = None,
) -> dict[str, float]:
    """Return reward, advantage and length statistics of a step.

    Args:
        prompts: this rank's prompts.
        completions: their responses.
        rewards: their rewards.
        advantages: [S] fp32.
        gather: the strategy's `gather_objects`: every rank's value in rank order.
        token_advantages: [R] fp32, whose statistics take the place of those of the advantages; None: none.
    """
    valid = rewards.valid
    advantages = advantages[valid]
    if token_advantages is not None:
        advantages = token_advantages[completions.loss_tokens_of(valid)]
    steps = rewards.steps
    rewarded = (rewards.total, completions.prompt_index, valid)
    if steps is not None:
        rewarded = (steps.rewards, steps.per_token_of(completions.prompt_index), steps.per_token_of(valid))
    zero, groups, group_std = group_statistics(*rewarded)
    ranks = gather(
        {
            "total": rewards.total[valid],
            "group_std": group_std,
            "advantages": advantages,
            "steps": None if steps is None else steps.lengths,
            "greedy": rewards.greedy,
            "lengths": completions.lengths,
            "sampled": None if completions.loss_mask is None else completions.loss_lengths,
            "finished": completions.finished,
            "rows": None if completions.row_starts is None else completions.row_bounds()[1].bincount(),
            "tokens": int(completions.lengths.sum())
            + sum(len(prompts.prompts[i].token_ids) for i in completions.prompt_index.tolist())
            + (0 if completions.row_starts is None else int(completions.row_starts.clamp_min(0).sum())),
            "prompts": torch.tensor([len(p.token_ids) for p in prompts.prompts]),
            "functions": dict(rewards.per_function),
            "alike": {
                name: group_statistics(values, completions.prompt_index, valid & ~values.isnan())[:2]
                for name, values in rewards.per_function.items()
            },
            "failures": dict(rewards.failures),
            "zero": zero,
            "groups": groups,
            "invalid": int((~valid).sum()),
            "late": completions.late,
            "dropped": len(completions.dropped),
        }
    )
    total = torch.cat([r["total"] for r in ranks])
    lengths = torch.cat([r["lengths"] for r in ranks])
    finished = torch.cat([r["finished"] for r in ranks])
    stds = torch.cat([r["group_std"] for r in ranks])
    dropped = sum(r["dropped"] for r in ranks)
    missing = dropped * (len(lengths) // max(1, sum(len(r["prompts"]) for r in ranks) - dropped) or 1)
    invalid = sum(r["invalid"] for r in ranks) + missing
    values = {
        "reward": _mean(total) if total.numel() else math.nan,  # all samples failed: there is no reward
        "reward_std": _mean(stds),
        "frac_reward_zero_std": sum(r["zero"] for r in ranks) / max(1, sum(r["groups"] for r in ranks)),
        **_spread("critic/rewards", total),
        **_spread("critic/score", total),
        **_spread("critic/advantages", torch.cat([r["advantages"] for r in ranks])),
        **_spread("response_length", lengths),
        "response_length/clip_ratio": _mean(~finished),
        **_spread("prompt_length", torch.cat([r["prompts"] for r in ranks])),
        "response/aborted_ratio": invalid / max(1, len(lengths) + missing),
        "perf/response_tokens": float(lengths.sum()),
        "perf/total_num_tokens": float(sum(r["tokens"] for r in ranks)),
    }
    if any(r["sampled"] is not None for r in ranks):  # the others' responses are sampled throughout
        sampled = [r["lengths"] if r["sampled"] is None else r["sampled"] for r in ranks]
        values |= _spread("response_length/sampled", torch.cat(sampled))
    if any(r["rows"] is not None for r in ranks):  # the others' responses are one row each
        rows = torch.cat([torch.ones_like(r["lengths"]) if r["rows"] is None else r["rows"] for r in ranks])
        values |= {"agent/rows_per_trajectory/mean": _mean(rows), "agent/rows_per_trajectory/max": float(rows.max())}
        values["agent/forks"] = float((rows - 1).sum())
    if steps is not None:
        counts = torch.cat([r["steps"] for r in ranks]).tolist() or [0]
        values["response/steps/mean"] = sum(counts) / len(counts)
        values |= {"response/steps/max": float(max(counts)), "response/steps/min": float(min(counts))}
    if rewards.greedy is not None:
        values["critic/greedy_rewards/mean"] = float(torch.cat([r["greedy"] for r in ranks]).nanmean())
    late = [r["late"] for r in ranks if r["late"] is not None]  # a resumed rank may have sampled with other settings
    if late:
        values |= {"rollout/groups_late": float(sum(late)), "rollout/groups_dropped": float(dropped)}
    for name in ranks[0]["functions"]:
        scores = torch.cat([r["functions"][name] for r in ranks])
        values[f"rewards/{name}/mean"] = float(scores.nanmean())
        finite = scores[~scores.isnan()]
        if finite.numel() > 1:
            values[f"rewards/{name}/std"] = float(finite.std())
        alike, groups = (sum(counts) for counts in zip(*(r["alike"][name] for r in ranks), strict=True))
        values[f"rewards/{name}/frac_zero_std"] = alike / max(1, groups)
    for r in ranks:
        for name, count in r["failures"].items():
            key = f"reward_failures/{name}"
            values[key] = values.get(key, 0.0) + count
    return values


def update_metrics(totals: Mapping[str, float], norms: Sequence[float], lr: float) -> dict[str, float]:
    """Return the `actor/*` metrics of a step's updates, means over its tokens.

    Args:
        totals: sums over all updates and ranks, among them the numbers of `tokens` and of `trained` tokens.
        norms: gradient norm of each update.
        lr: learning rate of the last update.
    """
    tokens, trained = (max(totals.get(name, 0.0), 1.0) for name in ("tokens", "trained"))
    metrics: dict[str, float] = {
        "actor/loss": totals["loss"] / len(norms),
        "actor/trained_tokens_ratio": trained / tokens,
    }
    for name, value in totals.items():
        if name not in ("tokens", "trained", "loss"):
            for public in METRIC_NAMES.get(name, (f"actor/{name}",)):
                of_trained = name in RATIO_METRICS or name not in METRIC_NAMES
                metrics[public] = value / (trained if of_trained else tokens)
    metrics["actor/grad_norm"] = sum(norms) / len(norms)
    metrics["actor/lr"] = lr
    return metrics


@dataclass(frozen=True)
class WorstToken:
    """The token of a step whose log-probs by trainer and engine differ most."""

    rank: int
    prompt: int
    """Index of its prompt in the rank's batch."""
    position: int
    """Index in the response."""
    length: int
    """Tokens of the response."""
    token: int
    """Token id."""
    logprob: float
    """By the trainer."""
    rollout_logprob: float

    @property
    def log_ratio(self) -> float:
        """Absolute difference of the log-probs; infinite where it is NaN."""
        difference = abs(self.logprob - self.rollout_logprob)
        return math.inf if math.isnan(difference) else difference


def gap_to_rollout(
    batch: TrainBatch, computed: torch.Tensor, logprobs: torch.Tensor, strategy: Strategy
) -> tuple[dict[str, float], WorstToken | None]:
    """Measure the gap between the trainer's and the engine's log-probs.

    Args:
        batch: this rank's sequences.
        computed: [S] bool, the sequences whose log-probs the trainer computed.
        logprobs: [R] fp32, the trainer's.
        strategy: sums over ranks.

    Returns:
        The metrics and the worst token, over all ranks; none without a token of these sequences.
    """
    lengths = torch.where(computed, batch.loss_lengths, 0)
    tokens_R = batch.loss_tokens_of(computed)
    logprobs, rollout = logprobs[tokens_R], batch.rollout_logprobs[tokens_R]
    sums = mismatch_sums(logprobs, rollout, offsets_of(lengths))
    metrics = mismatch_metrics(torch.tensor(strategy.sum(sums.tolist()), dtype=torch.float64))
    gap = (logprobs.exp() - rollout.exp()).abs()
    total, tokens = strategy.sum([float(gap.sum()), gap.numel()])
    if not tokens:
        return metrics, None
    own = _worst_token(batch, tokens_R, logprobs, rollout, strategy.rank)
    ranks = strategy.gather_objects((float(gap.max()) if gap.numel() else 0.0, own))
    worst = max((each for _, each in ranks if each is not None), key=lambda each: each.log_ratio)
    metrics["training/rollout_probs_diff_mean"] = total / tokens
    metrics["training/rollout_probs_diff_max"] = max(largest for largest, _ in ranks)
    metrics["rollout_corr/log_ratio_max"] = worst.log_ratio
    return metrics, worst


def _worst_token(
    batch: TrainBatch, tokens_R: torch.Tensor, logprobs: torch.Tensor, rollout: torch.Tensor, rank: int
) -> WorstToken | None:
    """Return this rank's worst token of those where `tokens_R` is true, of which the log-probs are."""
    if not logprobs.numel():
        return None
    at = int((logprobs - rollout).abs().nan_to_num(nan=math.inf, posinf=math.inf).argmax())
    token = int(tokens_R.nonzero()[at, 0])
    sequence = int(torch.searchsorted(batch.offsets[1:], token, right=True))
    return WorstToken(
        rank=rank,
        prompt=int(batch.prompt_index[sequence]),
        position=token - int(batch.offsets[sequence]),
        length=int(batch.lengths[sequence]),
        token=int(batch.tokens[token]),
        logprob=float(logprobs[at]),
        rollout_logprob=float(rollout[at]),
    )


def utilisation(flops: float, seconds: float, peak: float | None, world_size: int) -> dict[str, float]:
    """Return the update's model FLOPs utilisation; empty if FLOPs or peak are unknown.

    Args:
        flops: the update's model FLOPs on all ranks.
        seconds: duration of the update.
        peak: FLOP/s of one rank's device in the compute dtype.
        world_size: number of ranks.
    """
    if peak is None or not flops:
        return {}
    return {"perf/mfu/actor": flops / max(seconds, 1e-9) / (peak * world_size)}


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    return {f"{name}/mean": _mean(values), f"{name}/max": float(values.max()), f"{name}/min": float(values.min())}


def _mean(values: torch.Tensor) -> float:
    return float(values.double().mean()) if values.numel() else 0.0


def failure_notes(
    values: Mapping[str, float],
    dropped_groups: Sequence[Mapping[str, Any]],
    rewards: Rewards,
    step: int,
    reported: set[str],
) -> Iterator[str]:
    """Yield a note for each reward that failed in a step and on late groups, each kind of failure once per run.

    Args:
        values: the step's metrics.
        dropped_groups: `dropped_records` of all ranks.
        rewards: this rank's, for the first failure of each kind.
        step: the step.
        reported: metrics reported before; new ones are added.
    """
    for name, count in values.items():
        if name.startswith("reward_failures/") and count and name not in reported:
            reported.add(name)
            failure = name.removeprefix("reward_failures/")
            first = f" ({rewards.first_failures[failure]})" if failure in rewards.first_failures else ""
            yield f"reward {failure}: {count:.0f} samples in step {step}{first}; metrics count further ones"
    late, dropped = values.get("rollout/groups_late", 0), values.get("rollout/groups_dropped", 0)
    kind = "groups dropped" if dropped else "groups late"
    if late and kind not in reported:
        reported.add(kind)
        which = "".join(f" (prompt {group['uid']}: {group['dropped']})" for group in dropped_groups[:1])
        yield (
            f"step {step} waited for {late:.0f} groups of responses longer than rollout.group_timeout, and dropped "
            f"{dropped:.0f} of them{which}; metrics count further ones"
        )
