"""What each policy loss costs: a step's updates with it, beside those with ppo_clip at the same scope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from hwgrpo_backends.device import Device

from hwgrpo.algorithms.scope import Scope, Scoped
from hwgrpo.bench.step import Start, before_update, repeatable_step
from hwgrpo.bench.times import Times
from hwgrpo.catalog import POLICY_LOSSES
from hwgrpo.config.schema import AlgorithmConfig, LossConfig
from hwgrpo.training.run_parts import Run
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import TrainBatch

MASKS = ("top_entropy_share", "m2po_threshold")
"""Settings that select tokens of the update, compared as losses are."""
LIMIT, LIMIT_WITH_SCORING = 1.05, 1.5
"""Most that a loss may cost, as a multiple of ppo_clip's; the latter for one that needs a scoring pass."""


@dataclass
class LossBench:
    """The updates of a step with one loss, each beside those with ppo_clip."""

    name: str
    scope: Scope
    scores: bool
    """Whether each update needs a scoring pass."""
    times: Times = field(default_factory=Times)
    reference: Times = field(default_factory=Times)
    """Of ppo_clip at the same scope, in the same rounds."""

    @property
    def ratios(self) -> tuple[float, float]:
        """Medians over the rounds of its seconds over ppo_clip's: wall time, processor time."""
        pairs = ((self.times.wall_s, self.reference.wall_s), (self.times.cpu_s, self.reference.cpu_s))
        wall, cpu = (median(own / other for own, other in zip(*pair, strict=True)) for pair in pairs)
        return wall, cpu

    @property
    def limit(self) -> float:
        """Most that it may cost, as a ratio."""
        return LIMIT_WITH_SCORING if self.scores else LIMIT

    def to_json(self) -> dict[str, Any]:
        """Return it with the samples of all rounds."""
        wall, cpu = self.ratios
        return {
            "name": self.name,
            "scope": self.scope,
            "scores": self.scores,
            "ratio_wall": wall,
            "ratio_cpu": cpu,
            "limit": self.limit,
            "times": self.times.to_json(),
            "ppo_clip": self.reference.to_json(),
        }


def algorithm_with(algorithm: AlgorithmConfig, name: str) -> AlgorithmConfig:
    """Return the settings with a loss at its defaults and without `MASKS`, or with ppo_clip and one of them."""
    defaults = AlgorithmConfig()
    masks = {each: getattr(defaults, each) for each in MASKS}
    if name in MASKS:
        masks[name] = {"top_entropy_share": 0.2, "m2po_threshold": 0.04}[name]
        name = "ppo_clip"
    return replace(algorithm, loss=LossConfig(name), **masks)


def measure_losses(
    run: Run, device: Device, names: Sequence[str], repeat: int, report: Callable[[str], None] = lambda _: None
) -> list[LossBench]:
    """Measure a step's updates off policy with each loss, and leave weights and optimizer as they were.

    Every update of a loss has one with ppo_clip directly before or, every second round, after it, of the same batch and
    from the same weights. One round before the others is not timed.

    Args:
        run: in one process.
        device: the device.
        names: of `POLICY_LOSSES`, or of `MASKS`.
        repeat: rounds that are timed.
        report: called with the name of the next measurement.
    """
    update, batch = run.update, _batch(run)
    pairs = []
    for name in names:
        own = replace(update, config=replace(update.config, algorithm=algorithm_with(update.config.algorithm, name)))
        ppo_clip = replace(own.config, algorithm=algorithm_with(run.config.algorithm, "ppo_clip"))
        other = replace(update, config=ppo_clip, scope=own.loss_fn.scope)
        bench = LossBench(name, own.loss_fn.scope, bool(own.loss_fn.selections))
        pairs.append((bench, ((own, bench.times), (other, bench.reference))))
    start = Start(update, batch)
    try:
        for number in range(repeat + 1):
            report(f"round {number} of {repeat}" if number else "a round to warm up")
            for _, (own, other) in pairs:
                for each, times in (own, other) if number % 2 else (other, own):
                    _time(each, batch, device, times if number else Times())
                    start.restore()
    finally:
        start.forget()
    return [bench for bench, _ in pairs]


def _time(update: PolicyUpdate, batch: TrainBatch, device: Device, times: Times) -> None:
    with times.measure(device.synchronize):
        update(batch)


def _batch(run: Run) -> TrainBatch:
    """Return the first batch with all log-probs, and advantages of 1 and -1 in turn: no response is skipped."""
    batch = before_update(repeatable_step(run, run.watch)).batch
    advantages = 1.0 - 2.0 * (torch.arange(len(batch)) % 2)
    return replace(batch, advantages=advantages, token_advantages=None, old_logprobs=run.update.score(batch))


def known_names() -> tuple[str, ...]:
    """Return what can be compared with ppo_clip, itself included: its ratio to itself shows the noise."""
    built_in = (name for name in POLICY_LOSSES.names() if isinstance(POLICY_LOSSES.load(name), Scoped))
    return (*built_in, *MASKS)


def table(benches: Sequence[LossBench]) -> list[str]:
    """Return the lines of a Markdown table."""
    columns = ("loss", "scope", "scoring pass", "update ms (CPU)", "of ppo_clip (CPU)", "(wall)", "limit")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for each in benches:
        wall, cpu = each.ratios
        scoring = "yes" if each.scores else ""
        seconds = f"{1e3 * median(each.times.cpu_s):.1f}"
        lines.append(f"| {each.name} | {each.scope} | {scoring} | {seconds} | {cpu:.3f} | {wall:.3f} | {each.limit} |")
    return lines
