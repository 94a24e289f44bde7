"""Signs of trouble in the metrics of a run: each a pure function of the series so far and the settings.

A detector returns a `Finding` while the sign is there, else None. `warnings` decides which are reported, and when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from hwgrpo.catalog import ADVANTAGES_OF_SINGLE_RESPONSES, ENGINES
from hwgrpo.observe import shown_fields
from hwgrpo.observe.series import MetricSeries, Series

if TYPE_CHECKING:
    from hwgrpo.config import Config

START = 5
"""Steps at the beginning that later ones are compared with: few, for good runs move early."""
RECENT = 5
"""Latest steps that are averaged, so that one odd batch is no sign."""
REWARD_WINDOW = 20
"""Latest steps over which the reward is averaged: its noise from batch to batch is large."""
FALL_WINDOWS = (REWARD_WINDOW, 2 * REWARD_WINDOW, 4 * REWARD_WINDOW)
"""Steps over which the reward before and after a fall is averaged: the longer, the smaller the falls that stand out."""
FLAT_STEPS = 50
"""Steps before a reward that has not risen is worth a warning; usual recipes rise visibly within 20 to 40."""
SLOW_RISE = 0.1 / 100
"""Share of the range of rewards that a run which learns slowly gains per step ..."""
PLAIN = 4.0
"""... and the standard errors by which it must stand out before its absence means anything: of a reward as noisy as
that of a few prompts per step, the first 100 steps show neither a rise nor its absence."""
SMALL_GAIN, STEP_SURE = 0.05, 2.25
"""Share of the range of rewards, and standard errors, by which a run has risen from one step to the next ones."""
FAST_RISE = 0.2 / 100
"""Share of the range of rewards that a run gains per step while entropy or length fall to a fraction."""
AT_TOP = 0.95
"""A mean reward this far up the range of rewards seen has no room to rise."""
LOST_SHARE = 0.5
"""Share of the reward's earlier gain whose loss is reported."""
SURE = 3.0
"""Standard errors by which a rise or fall must exceed noise; with two, a control run in six seems to rise or fall."""
GROUP_WINDOW = 10
"""Latest steps over which the share of equal groups is averaged."""
EQUAL_SHARE = 0.8
"""Share of groups without a signal from which four fifths of the samples are spent for nothing."""
HARDLY_ANY = 0.95
"""Share of groups without a signal from which there is hardly any left to learn from."""
NO_SIGNAL = 0.95
"""Share of groups without a signal before a gradient that is no spike but the first signal."""
LEARNED_SHARE = 0.95
"""The same where the rewards are high: a learned task ends that way, so it is reported only near the end of it."""
HIGH, LOW = 0.8, 0.2
"""Mean reward within the range seen, above and below which equal groups are mostly right or mostly wrong."""
LARGE_KL = 1.0
"""Nats per token from the reference beyond which little of its language is left; healthy runs stay below 0.3."""
KL_JUMP = 5.0
"""Growth over the median of the KL_BEFORE steps before that counts as an explosion ..."""
KL_FLOOR = 0.3
"""... from this KL on: below, growth from 0 is normal."""
KL_BEFORE = 20
TRUNCATED_SHARE = 0.3
"""Share of responses truncated at the limit: their reward does not judge a finished response."""
ENTROPY_SHARE = 0.1
"""Share of the initial entropy; learning a task reduces it to a fifth."""
ROOM = 0.9
"""A mean reward above this share of the range is a learned task, whose low entropy is as it should be."""
LARGE_GAP = 0.02
"""Mean difference of token probabilities between engine and trainer: twice what vendors' documents accept, for a model
of 135M parameters in bf16 learns with the 0.011 of its rounding."""
SPIKE = 10.0
"""A gradient norm this many times the median of the SPIKE_BEFORE steps before is a spike ..."""
SPIKE_RECORD = 3.0
"""... if it is also this many times the largest of them: where most gradients are near 0, tenfold is little."""
SPIKE_BEFORE = 20
CLIPPED_STEPS = 20
CLIPPED_TIMES = 3.0
"""Median gradient norm in units of optim.grad_clip, when every step was clipped; close to 1 clipping does little."""
EXTREME = 5
"""Percent of the steps whose highest or lowest reward the range leaves out."""
TINY = 1e-9
"""Rounding of a trend's rise."""
SHORT_SHARE = 0.25
"""Mean response length left of that at the start."""


@dataclass(frozen=True)
class Finding:
    """A sign of trouble, as text."""

    seen: str
    """What was seen: the numbers and the steps."""
    meaning: str
    """What it may mean."""
    remedies: tuple[str, ...]
    """What to try; settings are named as in the config."""
    severity: float
    """How bad; it is reported again when this has doubled."""


REWARD_HIGH = shown_fields.Field("highest reward", ("critic/rewards/max",), shown_fields.decimals(3))
REWARD_LOW = shown_fields.Field("lowest reward", ("critic/rewards/min",), shown_fields.decimals(3))
GAP = shown_fields.Field("gap", ("training/rollout_probs_diff_mean",), shown_fields.decimals(3))
WATCHED = (
    shown_fields.REWARD,
    REWARD_HIGH,
    REWARD_LOW,
    shown_fields.ZERO_STD_GROUPS,
    shown_fields.KL,
    shown_fields.TRUNCATED,
    shown_fields.ENTROPY,
    shown_fields.LENGTH,
    shown_fields.GRAD_NORM,
    GAP,
)
"""The metrics that detectors read."""

Detector = Callable[[MetricSeries, "Config"], Finding | None]


def reward_flat(series: MetricSeries, config: Config) -> Finding | None:
    """The reward has not risen since the start, though there is room."""
    reward = series[shown_fields.REWARD]
    if len(reward) < FLAT_STEPS:
        return None
    start, recent = reward.first(REWARD_WINDOW), reward.last(REWARD_WINDOW)
    place = _place(series, recent.mean)
    if place is None or place >= AT_TOP or not _is_flat(series) or _stepped_up(series):
        return None
    remedies = [
        "read some responses in completions.jsonl: does the reward distinguish good ones from bad ones?",
        f"change {_now(config, 'optim.lr')}: tenfold up if entropy and KL hardly move, down if they move at once",
        f"raise {_now(config, 'rollout.n')} or {_now(config, 'trainer.prompts_per_step')}: a less noisy gradient",
    ]
    if config.algorithm.kl.coef:
        remedies.append(f"lower {_now(config, 'algorithm.kl.coef')}, which keeps the policy near the reference")
    if config.reward.shuffle:
        remedies = ["set reward.shuffle=false; a control run with shuffled rewards is meant to stay flat"]
    return Finding(
        seen=f"the reward has not risen beyond its noise: mean {recent.mean:.3f} over {recent}, {start.mean:.3f} over "
        f"{start}; from step to step it wavers by {reward.noise:.3f}, and a rise of a tenth of the range of rewards "
        "per 100 steps would stand out by now",
        meaning="the policy is not learning from this reward",
        remedies=tuple(remedies),
        severity=len(reward) / FLAT_STEPS,
    )


def reward_falling(series: MetricSeries, config: Config) -> Finding | None:
    """The reward rose and has lost much of it again."""
    reward = series[shown_fields.REWARD]
    for size in FALL_WINDOWS:
        if len(reward) >= 2 * size and (finding := _fall(reward, size, config)):
            return finding
    return None


def _fall(reward: Series, size: int, config: Config) -> Finding | None:
    """Return what is found of a fall between means over `size` steps."""
    start, best, recent = reward.first(START), reward.best(size), reward.last(size)
    gained, lost = best.mean - start.mean, best.mean - recent.mean
    # the best of many windows is above their mean by luck alone: by about this many standard errors
    luck = math.sqrt(2 * math.log(len(reward) / size))
    doubt = (SURE + luck) * reward.noise
    unsure = gained <= doubt * math.sqrt(1 / START + 1 / size) or lost <= doubt * math.sqrt(2 / size)
    if unsure or lost <= LOST_SHARE * gained:
        return None
    return Finding(
        seen=f"the reward rose from {start.mean:.3f} to {best.mean:.3f} (mean over {best}) and has fallen to "
        f"{recent.mean:.3f} (mean over {recent})",
        meaning="the updates have become too large, or the policy has found a way that the reward no longer pays",
        remedies=(
            f"resume from a checkpoint before the fall (trainer.resume=FOLDER) with a lower {_now(config, 'optim.lr')}",
            f"raise {_now(config, 'algorithm.kl.coef')}",
            f"set {_now(config, 'optim.schedule')} to linear or cosine",
        ),
        severity=lost / gained / LOST_SHARE,
    )


def groups_too_easy(series: MetricSeries, config: Config) -> Finding | None:
    """Nearly every group is equal because nearly every response is right."""
    found = _equal_groups(series, config, LEARNED_SHARE, lambda place: place > HIGH)
    if found is None:
        return None
    seen, severity = found
    return Finding(
        seen=seen + ": nearly all responses get the highest reward",
        meaning="the prompts are learned, or were too easy; a group of equal rewards teaches nothing",
        remedies=(
            "stop here if this is what you wanted",
            f"use harder prompts ({_now(config, 'data.train')}), or drop those that are always solved",
            "make the reward more demanding (reward.functions)",
        ),
        severity=severity,
    )


def groups_too_hard(series: MetricSeries, config: Config) -> Finding | None:
    """Most groups are equal because nearly every response is wrong."""
    found = _equal_groups(series, config, EQUAL_SHARE, lambda place: place < LOW)
    if found is None:
        return None
    seen, severity = found
    return Finding(
        seen=seen + ": nearly all responses get the lowest reward",
        meaning="the prompts are too hard for this model, or the reward does not recognise right answers; a group of "
        "equal rewards teaches nothing",
        remedies=(
            "read some responses in completions.jsonl: is a right one among them, in a form that the reward misses?",
            f"raise {_now(config, 'rollout.n')}: a larger group is more likely to contain a right one",
            f"use easier prompts ({_now(config, 'data.train')}), or train the model on examples first",
            "add a reward that pays for part of the way (reward.functions, e.g. format)",
        ),
        severity=severity,
    )


def groups_equal(series: MetricSeries, config: Config) -> Finding | None:
    """Most groups are equal, some right and some wrong."""
    found = _equal_groups(series, config, EQUAL_SHARE, lambda place: LOW <= place <= HIGH)
    if found is None:
        return None
    seen, severity = found
    return Finding(
        seen=seen,
        meaning="prompts are either always or never solved, or the samples of a prompt hardly differ; a group of "
        "equal rewards teaches nothing",
        remedies=(
            f"raise {_now(config, 'rollout.n')} or {_now(config, 'rollout.temperature')}: samples that differ more",
            f"sample others in their place ({_now(config, 'algorithm.filter_groups.enable')}), or use prompts of "
            f"medium difficulty ({_now(config, 'data.train')})",
            "use a reward with more steps than right and wrong (reward.functions)",
        ),
        severity=severity,
    )


def kl_exploding(series: MetricSeries, config: Config) -> Finding | None:
    """The policy is far from the reference, or is leaving it quickly."""
    kl = series[shown_fields.KL]
    if len(kl) < RECENT:
        return None
    recent = kl.last(RECENT)
    limit, before = LARGE_KL, ""
    if len(kl) >= RECENT + KL_BEFORE:
        usual = kl.last(KL_BEFORE, skip=RECENT)
        jump = max(KL_FLOOR, KL_JUMP * usual.median)
        if jump < limit:
            limit, before = jump, f"; the median over {usual} was {usual.median:.3f}"
    # the median: one token of a tiny probability makes a step's mean huge
    if recent.median <= limit:
        return None
    return Finding(
        seen=f"the KL to the reference model is {recent.median:.3f} nats per token (median over {recent}){before}",
        meaning="the policy is running away from the model it started as; its language may break next",
        remedies=(
            f"lower {_now(config, 'optim.lr')}",
            f"raise {_now(config, 'algorithm.kl.coef')}",
            f"lower {_now(config, 'optim.grad_clip')}",
        ),
        severity=recent.median / limit,
    )


def truncation(series: MetricSeries, config: Config) -> Finding | None:
    """Many responses are cut at the length limit."""
    truncated = series[shown_fields.TRUNCATED]
    if len(truncated) < RECENT:
        return None
    recent = truncated.last(RECENT)
    if recent.mean <= TRUNCATED_SHARE:
        return None
    return Finding(
        seen=f"{recent.mean:.0%} of the responses were truncated at the length limit (mean over {recent})",
        meaning="their reward does not judge a finished response; the policy may not know how to stop",
        remedies=(
            f"raise {_now(config, 'rollout.max_response_tokens')}",
            "look at the ends of responses in completions.jsonl: if the answer comes early, name a stop text in "
            "rollout.stop, or let the chat template end it (data.chat)",
            "add the reward `length` to reward.functions",
        ),
        severity=recent.mean / TRUNCATED_SHARE,
    )


def entropy_collapse(series: MetricSeries, config: Config) -> Finding | None:
    """The policy has become nearly deterministic before the task is learned."""
    entropy, reward = series[shown_fields.ENTROPY], series[shown_fields.REWARD]
    if len(entropy) < START + RECENT or not len(reward):
        return None
    start, recent = entropy.first(START), entropy.last(RECENT)
    place = _place(series, reward.last(min(RECENT, len(reward))).mean)
    if place is None or place > ROOM or recent.mean >= ENTROPY_SHARE * start.mean or not _has_stopped_rising(series):
        return None
    return Finding(
        seen=f"entropy fell to {recent.mean:.4f} nats per token (mean over {recent}) from {start.mean:.4f} over "
        f"{start}, with rewards still to be won",
        meaning="samples of a prompt are nearly the same, so groups have little signal and nothing new is explored",
        remedies=(
            f"lower {_now(config, 'optim.lr')}",
            f"raise {_now(config, 'algorithm.loss.clip_high')} (DAPO: 0.28), where a batch gets several updates",
            f"raise {_now(config, 'rollout.temperature')} or {_now(config, 'algorithm.kl.coef')}",
            f"set a small {_now(config, 'algorithm.entropy_coef')}, e.g. 0.001",
        ),
        severity=ENTROPY_SHARE * start.mean / max(recent.mean, 1e-9),
    )


def gap_too_large(series: MetricSeries, config: Config) -> Finding | None:
    """The engine that samples and the trainer give tokens different probabilities."""
    gap = series[GAP]
    if len(gap) < RECENT:
        return None
    recent = gap.last(RECENT)
    if recent.mean <= LARGE_GAP:
        return None
    cuts = [
        _now(config, key)
        for key, off in (("rollout.top_k", 0), ("rollout.top_p", 1.0), ("rollout.min_p", 0.0))
        if _value(config, key) != off and not ENGINES.load(config.rollout.engine).reports_floors
    ]
    remedies = []
    if cuts:
        remedies.append(f"switch off {', '.join(cuts)}: the trainer's log-probs are those of the full distribution")
    if config.algorithm.correction.name == "none":
        remedies.append(f"set {_now(config, 'algorithm.correction.name')} to token_truncate, which weighs tokens")
    if not cuts:
        remedies.append(f"set {_now(config, 'model.dtype')} to float32 if the hardware allows")
    return Finding(
        seen=f"sampled tokens have probabilities that differ by {recent.mean:.4f} between rollout and trainer (mean "
        f"over {recent})",
        meaning="the samples are not from the policy that is trained, so the gradient is biased",
        remedies=tuple(remedies),
        severity=recent.mean / LARGE_GAP,
    )


def gradient_spike(series: MetricSeries, config: Config) -> Finding | None:
    """One gradient is far larger than those before."""
    norm = series[shown_fields.GRAD_NORM]
    if len(norm) < SPIKE_BEFORE + 1:
        return None
    last, usual = norm.last(1), norm.last(SPIKE_BEFORE, skip=1)
    # most batches had no signal at all, and the first that has one is no spike
    equal = series[shown_fields.ZERO_STD_GROUPS]
    unsignalled = len(equal) > SPIKE_BEFORE and equal.last(SPIKE_BEFORE, skip=1).median >= NO_SIGNAL
    if usual.median == 0 or unsignalled or last.mean <= max(SPIKE * usual.median, SPIKE_RECORD * max(usual.values)):
        return None
    return Finding(
        seen=f"the gradient norm of {last} is {last.mean:.3g}; the median over {usual} was {usual.median:.3g}",
        meaning="an odd batch, or a policy that is becoming unstable",
        remedies=(
            f"set {_now(config, 'optim.grad_clip')} to a few times the usual norm",
            f"lower {_now(config, 'optim.lr')} if it happens again",
            "read the responses of that step in completions.jsonl",
        ),
        severity=last.mean / (SPIKE * usual.median),
    )


def gradient_clipped(series: MetricSeries, config: Config) -> Finding | None:
    """Every gradient is cut to a fraction of its length."""
    norm, clip = series[shown_fields.GRAD_NORM], config.optim.grad_clip
    if not clip or len(norm) < CLIPPED_STEPS:
        return None
    recent = norm.last(CLIPPED_STEPS)
    if min(recent.values) <= clip or recent.median <= CLIPPED_TIMES * clip:
        return None
    return Finding(
        seen=f"every gradient of {recent} was clipped; their median norm is {recent.median:.3g}, "
        f"{_now(config, 'optim.grad_clip')}",
        meaning="every step is then clipped to one length: a strong signal counts no more than a weak one",
        remedies=(
            f"raise {_now(config, 'trainer.prompts_per_step')} or {_now(config, 'rollout.n')}: a less noisy gradient",
            f"look at {_now(config, 'algorithm.aggregation.name')}: sums give larger gradients than means",
            "raise optim.grad_clip and watch the reward",
        ),
        severity=recent.median / (CLIPPED_TIMES * clip),
    )


def length_collapse(series: MetricSeries, config: Config) -> Finding | None:
    """Responses have become much shorter, and not better."""
    length, reward = series[shown_fields.LENGTH], series[shown_fields.REWARD]
    if min(len(length), len(reward)) < START + RECENT:
        return None
    start, recent = length.first(START), length.last(RECENT)
    was, now = reward.first(START), reward.last(RECENT)
    if recent.mean >= SHORT_SHARE * start.mean or _stepped_up(series) or not _has_stopped_rising(series):
        return None
    return Finding(
        seen=f"responses shrank to {recent.mean:.1f} tokens (mean over {recent}) from {start.mean:.1f} over {start}, "
        f"while the reward went from {was.mean:.3f} to {now.mean:.3f}",
        meaning="the policy has stopped working out answers, because long responses are penalized or short ones are "
        "safer",
        remedies=(
            "if `length` is among reward.functions, lower its weight",
            "look at algorithm.aggregation.name: seq-mean-token-mean favours short right answers",
            f"raise {_now(config, 'algorithm.kl.coef')}, or lower {_now(config, 'optim.lr')}",
        ),
        severity=SHORT_SHARE * start.mean / max(recent.mean, 1e-9),
    )


DETECTORS: Mapping[str, Detector] = {
    "reward flat": reward_flat,
    "reward falling": reward_falling,
    "groups too easy": groups_too_easy,
    "groups too hard": groups_too_hard,
    "groups equal": groups_equal,
    "KL exploding": kl_exploding,
    "truncation": truncation,
    "entropy collapse": entropy_collapse,
    "rollout and trainer differ": gap_too_large,
    "gradient spike": gradient_spike,
    "gradient clipped": gradient_clipped,
    "length collapse": length_collapse,
}
"""Name of the warning -> its detector."""


def _equal_groups(
    series: MetricSeries, config: Config, share: float, belongs: Callable[[float], bool]
) -> tuple[str, float] | None:
    """Return (observation, severity) when more than `share` of the groups are equal and their rewards belong.

    None where advantages do not compare within the group, so that equal rewards have a gradient, too.
    """
    if config.rollout.n == 1 or config.algorithm.advantage.name in ADVANTAGES_OF_SINGLE_RESPONSES:
        return None
    equal, reward = series[shown_fields.ZERO_STD_GROUPS], series[shown_fields.REWARD]
    if min(len(equal), len(reward)) < GROUP_WINDOW:
        return None
    recent = equal.last(GROUP_WINDOW)
    if recent.mean <= HARDLY_ANY and not _is_flat(series):  # the other groups are enough to learn from
        return None
    place = _place(series, reward.last(GROUP_WINDOW).mean)
    if place is None:  # one constant reward: at most 0 counts as never solved, more as always solved
        place = 1.0 if reward.values[-1] > 0 else 0.0
    if recent.mean <= share or not belongs(place):
        return None
    return (
        f"{recent.mean:.0%} of the groups had equal rewards (mean over {recent})",
        (1 - share) / max(1 - recent.mean, 0.01),
    )


def _is_flat(series: MetricSeries) -> bool:
    """Return whether the reward has no trend, though that of a run which learns slowly would be plain by now."""
    reward = series[shown_fields.REWARD]
    trend = reward.trend(len(reward))
    slow = SLOW_RISE * _range(series) * (len(reward) - 1)
    # half of a slow rise is a drift, as of a control run, unless it is beyond doubt
    drift = min(slow / 2 - 2 * trend.error, SURE * trend.error)
    return slow >= PLAIN * trend.error and trend.rise <= max(trend.error, drift) + TINY


def _stepped_up(series: MetricSeries) -> bool:
    """Return whether the reward is, from some step on, clearly and by a share of its range above that before."""
    return series[shown_fields.REWARD].steps_up(SMALL_GAIN * _range(series), STEP_SURE)


def _has_stopped_rising(series: MetricSeries) -> bool:
    """Return whether the reward has no trend in its latest half, or in the fewest steps that would show one."""
    reward, fastest = series[shown_fields.REWARD], FAST_RISE * _range(series)
    # the trend's standard error is noise * sqrt(12 / steps), and its rise steps * fastest
    needed = math.ceil((SURE * math.sqrt(12) * reward.noise / fastest) ** (2 / 3)) if fastest else 0
    steps = max(needed, len(reward) // 2)
    if steps > len(reward):
        return False
    trend = reward.trend(steps)
    return trend.rise <= trend.error + TINY


def _range(series: MetricSeries) -> float:
    """Return the distance from low to high rewards, without those of few steps: one extreme would widen it for good."""
    low, high = series[REWARD_LOW].values, series[REWARD_HIGH].values
    return float(np.percentile(high, 100 - EXTREME) - np.percentile(low, EXTREME)) if low and high else 0.0


def _place(series: MetricSeries, reward: float) -> float | None:
    """Return where a mean reward lies between the lowest (0) and the highest (1) reward seen; None if those agree."""
    low, high = series[REWARD_LOW].lowest, series[REWARD_HIGH].highest
    return (reward - low) / (high - low) if high > low else None


def _value(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _now(config: Config, key: str) -> str:
    """Name a setting with its value: `optim.lr (now 0.0004)`."""
    return f"{key} (now {_value(config, key)})"
