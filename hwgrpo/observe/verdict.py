"""Judge a run by its validation, else by its training reward, by signs of collapse and by its warnings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hwgrpo.observe.history import Ends, Measured, RunHistory
from hwgrpo.observe.shown_fields import KL, LOSS, REWARD, TRUNCATED, percent

FEWEST = 3
"""Steps that each end of a run needs before their means are compared."""
THRESHOLD = 2.5
"""Standard errors by which two means must differ to be called a change."""
WITHOUT_ERROR = 0.1
"""Share of the larger value by which a validation without a standard error must differ to be called a change."""
NEAR_CLAMP = 0.9
"""Share of the KL estimator's clamp beyond which the mean is meaningless: most tokens are at the clamp."""
ALL_TRUNCATED, FEW_TRUNCATED = 0.9, 0.5
"""Shares of truncated responses at the end and at the start of a run that has forgotten how to stop."""

Trend = Literal["rose", "fell", "mixed", "flat", "collapsed", "unknown"]
Mood = Literal["good", "warn", "bad", "muted"]

MOODS: dict[Trend, Mood] = {
    "rose": "good",
    "fell": "bad",
    "mixed": "warn",
    "flat": "warn",
    "collapsed": "bad",
    "unknown": "muted",
}
LOSS_MOODS: dict[Trend, Mood] = {"fell": "good", "rose": "bad"}


@dataclass(frozen=True)
class Verdict:
    """Verdict on a run."""

    word: Trend
    mood: Mood
    headline: str
    """One line."""
    about: str
    """Reasons for the headline and further facts, in sentences."""


@dataclass(frozen=True)
class _Change:
    """A measured value at the start and at the end of a run."""

    what: str
    word: Trend
    first: float
    last: float

    @property
    def span(self) -> str:
        return f"from {self.first:.3f} to {self.last:.3f}"

    @property
    def text(self) -> str:
        if self.word == "flat":
            return f"no clear change in {self.what}: {self.first:.3f} to {self.last:.3f}"
        return f"{self.what} {self.word} {self.span}"


def judge(history: RunHistory, warnings: Iterable[str] = ()) -> Verdict:
    """Return the verdict on a run.

    Args:
        history: the metrics of all its steps and validations.
        warnings: names of its warnings, in order, repetitions included.
    """
    if history.is_supervised:
        return _judge_losses(history, warnings)
    reward = _training_change(history.ends[REWARD], "training reward")
    validation = _validation_changes(history)
    signs = _signs_of_collapse(history)
    about = []
    if validation:
        word, headline = _validation_headline(validation)
        limit = f"{THRESHOLD:g} standard errors" if history.after_error else percent(WITHOUT_ERROR)
        about.append(f"Validation before training and after step {history.after_step}; a change counts from {limit}.")
        about += [f"{_upper(change.text)}." for change in (reward,) if change is not None]
        about += _best(history, validation)
    elif reward is not None:
        word, headline = reward.word, reward.text
        about.append(
            f"Means of the first and the last {history.ends[REWARD].size} steps; a change counts from {THRESHOLD:g} "
            "standard errors of the steps' scatter."
        )
    else:
        count = history.ends[REWARD].count
        word = "unknown"
        headline = f"Too early to judge: {count} {'step' if count == 1 else 'steps'} with a reward"
        if not history.last_step:
            headline = "No step has been logged yet"
        about.append(f"{2 * FEWEST} steps are needed to compare the start with the end.")
    mood = MOODS[word]
    if signs and word in ("fell", "mixed", "flat"):
        word, mood, headline = "collapsed", "bad", f"The run collapsed: {headline}"
    elif signs:
        mood = "warn"
    about += [f"{sign}." for sign in signs]
    names = list(dict.fromkeys(warnings))
    if names:
        about.append(f"{len(names)} {'warning' if len(names) == 1 else 'warnings'}: {', '.join(names)}.")
    return Verdict(word, mood, _upper(headline), " ".join(about))


def _judge_losses(history: RunHistory, warnings: Iterable[str]) -> Verdict:
    """Return the verdict on supervised training: by its validation loss, else by its training loss."""
    training = _training_change(history.ends[LOSS], "training loss")
    losses = history.validation_losses
    last = max(losses, default=0)
    validation = None
    if 0 in losses and last:
        word = _trend(losses[0], losses[last], _error(None, None, losses[0], losses[last]))
        validation = _Change("validation loss", word, losses[0], losses[last])
    change = validation or training
    if change is None:
        return Verdict("unknown", "muted", "Too early to judge the loss", f"{2 * FEWEST} steps are needed.")
    when = f"Validation before training and after step {last}"
    if validation is None:
        when = f"Means of the first and the last {history.ends[LOSS].size} steps"
    about = [f"{when}.", *(f"{_upper(each.text)}." for each in (training,) if each and each is not change)]
    if losses and min(losses.values()) < (1 - WITHOUT_ERROR) * losses[last]:
        best = min(losses, key=lambda step: losses[step])
        about.append(f"The lowest validation loss was {losses[best]:.3f}, after step {best}: the model overfits since.")
    about += [f"Warnings: {', '.join(names)}." for names in [list(dict.fromkeys(warnings))] if names]
    return Verdict(change.word, LOSS_MOODS.get(change.word, "warn"), _upper(change.text), " ".join(about))


def _training_change(ends: Ends, what: str) -> _Change | None:
    """Compare the first with the last steps; None where there are too few."""
    if ends.size < FEWEST:
        return None
    first, last = ends.first, ends.last
    before, after = statistics.fmean(first), statistics.fmean(last)
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / ends.size)
    return _Change(what, _trend(before, after, error), before, after)


def _validation_changes(history: RunHistory) -> list[_Change]:
    """Return the change of each validation reward that was measured before and after training."""
    changes = []
    for key in sorted(history.before.keys() & history.after.keys()):
        source, metric = key
        before, after = history.before[key], history.after[key]
        if not (math.isfinite(before) and math.isfinite(after)):
            continue
        word = _trend(before, after, _error(history.before_error.get(key), history.after_error.get(key), before, after))
        changes.append(_Change(f"{source} {metric}", word, before, after))
    return changes


def _error(before_error: float | None, after_error: float | None, before: float, after: float) -> float:
    if before_error is None or after_error is None:
        return WITHOUT_ERROR / THRESHOLD * max(abs(before), abs(after))
    return math.hypot(before_error, after_error)


def _trend(before: float, after: float, error: float) -> Trend:
    # floating-point sums of equal values differ in the last bit
    noise = max(THRESHOLD * error, 1e-9 * max(abs(before), abs(after)))
    return "flat" if abs(after - before) <= noise else "rose" if after > before else "fell"


def _validation_headline(changes: list[_Change]) -> tuple[Trend, str]:
    """Return the common verdict and the line that names the largest change."""
    clear = [change for change in changes if change.word != "flat"]
    words = {change.word for change in clear}
    if len(words) > 1:
        shown = ", ".join(f"{change.what} {change.span}" for change in clear)
        return "mixed", f"validation reward rose and fell: {shown}"
    largest = max(clear or changes, key=lambda change: abs(change.last - change.first))
    named = _Change(f"validation reward ({largest.what})", largest.word, largest.first, largest.last)
    return largest.word, named.text


def _best(history: RunHistory, changes: list[_Change]) -> list[str]:
    """Name the best validation where the last one is clearly worse than it."""
    found: list[tuple[float, Measured, str]] = []
    for key, best in history.best.items():
        if key not in history.before:
            continue
        error = _error(best.error, history.after_error.get(key), best.value, history.after[key])
        if _trend(best.value, history.after[key], error) == "fell":
            found.append((best.value - history.after[key], best, " ".join(key)))
    if not found:
        return []
    _, best, name = max(found, key=lambda each: each[0])
    whose = f"The best {name}" if len(changes) > 1 else "Its best"
    return [f"{whose} was {best.value:.3f}, after step {best.step}."]


def _signs_of_collapse(history: RunHistory) -> list[str]:
    """Return signs of a broken policy in the last steps, whether or not warnings are on."""
    signs = []
    kl, truncated = history.ends[KL], history.ends[TRUNCATED]
    clamp = history.largest_kl
    if clamp and kl.last and (mean := statistics.fmean(kl.last)) >= NEAR_CLAMP * clamp:
        signs.append(f"KL to the reference is at its clamp ({mean:.3g} of {clamp:g}), its true value is larger")
    if truncated.size and statistics.fmean(truncated.last) >= ALL_TRUNCATED:
        start = statistics.fmean(truncated.first)
        if start <= FEW_TRUNCATED:
            end = percent(statistics.fmean(truncated.last))
            signs.append(f"{end} of the responses were truncated ({percent(start)} at the start)")
    return signs


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
