"""Acts on the gap between rollout engine and trainer, as `rollout.guard` says.

When and how is decided in `hwgrpo.algorithms.gap_guard`; this applies the decision to a run and states it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from hwgrpo.algorithms.gap_guard import (
    RAISE_AFTER,
    GuardState,
    Measure,
    advance,
    correction_settings,
    diagnose,
    in_force,
    measures,
    signs,
)
from hwgrpo.config import Config
from hwgrpo.config.schema import CorrectionConfig
from hwgrpo.errors import RunError, quoted
from hwgrpo.rollout.engine_kind import unmatched_filters
from hwgrpo.training.checkpoint.restore import Checkpoint
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.step_metrics import WorstToken

DELAY = 2
"""Steps from a decision to the first batch that another bound of staleness concerns: the one between is in flight."""


@runtime_checkable
class AdjustableSource(Protocol):
    """A source of responses that can sample with fresher weights than `rollout.max_staleness` demands."""

    def limit_staleness(self, bound: int, first_step: int) -> None:
        """Sample the batches of steps from `first_step` on with weights at most `bound` versions old."""
        ...


class RolloutGuard:
    """Judges each step's gap, and puts measures in force or withdraws them under `rollout.guard=act`.

    All ranks decide alike, for the metrics that they judge are over all ranks.

    Args:
        config: the run's settings.
        update: has the policy, and the worst token of the last step.
        source: the source of responses; one that is an `AdjustableSource` gets the bound in force.
        tokenizer: decodes the worst token, for notes.
        checkpoint: the checkpoint that the run resumes from; None: it starts.
    """

    def __init__(
        self,
        config: Config,
        update: PolicyUpdate,
        source: object,
        tokenizer: Any,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        r = config.rollout
        self._config, self._update, self._source, self._tokenizer = config, update, source, tokenizer
        adjustable = r.max_staleness if isinstance(source, AdjustableSource) else 0
        self._measures = measures(config.algorithm.correction, adjustable)
        # The log-probs of a truncated distribution differ from those of the full one by design.
        self._watches = r.guard != "off" and not unmatched_filters(r, update.policy.head.softcap)
        self._acts = self._watches and r.guard == "act"
        self._state = GuardState()
        self._notes: list[str] = []
        saved = checkpoint.manifest["state"].get("guard") if checkpoint else None
        if saved is not None and saved["identity"] == self._identity():
            self._state = GuardState.restored(saved["state"])
        if self._acts and self._state.level:
            self._notes.append(f"rollout.guard: resumed at level {self._state.level}: {self._in_force()}")
            self._limit_staleness()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {"identity": self._identity(), "state": self._state.record()}

    @property
    def correction(self) -> CorrectionConfig:
        """The correction in force, which the next update applies."""
        level = self._state.level if self._acts else 0
        return in_force(self._measures, level)[0] or self._config.algorithm.correction

    def pop_notes(self) -> list[str]:
        """Return and clear the notes for the user."""
        notes, self._notes = self._notes, []
        return notes

    def judge(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Judge the gap of a step before its weights are sent, and act on it.

        Args:
            step: step number.
            metrics: the update's metrics, over all ranks.

        Returns:
            The guard's own metric, if it acts.

        Raises:
            RunError: the gap stayed too large in spite of all measures; on all ranks.
        """
        if not self._watches:
            return {}
        before, self._state = self._state, advance(self._state, self._measures, step, metrics)
        level = self._state.level
        if level > before.level:
            self._raise(step, metrics, self._measures[before.level])
        elif level < before.level and self._acts:
            self._limit_staleness()
            self._notes.append(
                f"rollout.guard, step {step}: the gap has been small again for {before.calm_steps} steps "
                f"({_numbers(metrics)}): back to {self._in_force()}"
            )
        return {"rollout/guard_level": float(level)} if self._acts else {}

    def _raise(self, step: int, metrics: Mapping[str, float], measure: Measure) -> None:
        """Apply a measure, or end the run; state it if it is new."""
        assert self._state.first is not None
        cause = diagnose(self._state.first, self._state.recent, self._config.rollout, self._config.optim)
        seen = (
            f"rollout.guard, step {step}: the rollout engine has another policy than the trainer: "
            f"{', '.join(signs(metrics, measure.severity))}; beyond a limit for {RAISE_AFTER} steps in a row"
            f"{self._worst_token()}; {cause.text}"
        )
        if self._acts:
            if measure.severity == "stop":
                raise RunError(f"{seen}. The run ends, for the gap is too large for {self._in_force()}")
            self._limit_staleness()
            self._notes.append(f"{seen}. From the next step on: {measure.settings}")
        elif self._state.level > self._state.stated:
            would = f"apply {measure.settings}; you can set that yourself" if measure.settings else "end the run"
            self._notes.append(f"{seen}. rollout.guard=act would now {would}")
        self._state = replace(self._state, stated=max(self._state.stated, self._state.level))

    def _limit_staleness(self) -> None:
        if isinstance(self._source, AdjustableSource):
            bound = in_force(self._measures, self._state.level)[1]
            bound = self._config.rollout.max_staleness if bound is None else bound
            self._source.limit_staleness(bound, self._state.changed + DELAY)

    def _in_force(self) -> str:
        """Return correction and bound of staleness that now apply, as settings."""
        correction, bound = in_force(self._measures, min(self._state.level, len(self._measures) - 1))
        r = self._config.rollout
        settings = [correction_settings(correction or self._config.algorithm.correction)]
        if r.max_staleness:
            settings.append(f"rollout.max_staleness={r.max_staleness if bound is None else bound}")
        return ", ".join(settings)

    def _worst_token(self) -> str:
        worst: WorstToken | None = self._update.worst_token
        if worst is None:
            return ""
        text = quoted(self._tokenizer.decode([worst.token]))
        return (
            f"; worst token: {text} (id {worst.token}), token {worst.position + 1} of {worst.length} in a response "
            f"to prompt {worst.prompt} of rank {worst.rank}: log-prob {worst.logprob:.3g} by the trainer, "
            f"{worst.rollout_logprob:.3g} by the engine"
        )

    def _identity(self) -> list[str]:
        """Return what a saved level refers to: with other settings a resumed run starts at level 0."""
        return [self._config.rollout.guard, *(measure.settings for measure in self._measures)]


def _numbers(metrics: Mapping[str, float]) -> str:
    names = ("rollout_corr/kl", "training/rollout_probs_diff_mean", "rollout_corr/rollout_is_eff_sample_size")
    return ", ".join(f"{name} {metrics[name]:.3g}" for name in names if name in metrics)
