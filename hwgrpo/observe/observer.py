"""Observer of the training loop: loggers, warnings, progress and summary."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from hwgrpo.catalog import LOGGERS
from hwgrpo.config.bound_arguments import bind_arguments
from hwgrpo.errors import RunError
from hwgrpo.observe import completions, warnings
from hwgrpo.observe.completions import CompletionsLog, Sample
from hwgrpo.observe.console.progress import Progress, Silence
from hwgrpo.observe.console.view import choose_progress
from hwgrpo.observe.history import RunHistory
from hwgrpo.observe.loggers import jsonl, tensorboard
from hwgrpo.observe.saved_config import saved_config
from hwgrpo.observe.shown_fields import REWARD
from hwgrpo.observe.summary import build_summary, save_summary
from hwgrpo.observe.warnings import Monitor, WarningsLog
from hwgrpo.support.closing import close_all
from hwgrpo.user_code import arguments_of

if TYPE_CHECKING:
    import torch

    from hwgrpo.config.schema import ObserveConfig
    from hwgrpo.values import Completions, PromptBatch, Rewards, StepMetrics


class Logger(Protocol):
    """Where metrics go. It is made with the run's folder as its only argument."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the values of one step; called again for a step that is also validated."""
        ...

    def cut_back(self, step: int) -> None:
        """Forget every later step."""
        ...

    def close(self) -> None:
        """Write the rest and close files."""
        ...


class Observer:
    """Logs, shows and sums up a run. On ranks other than the main one every method does nothing.

    Args:
        config: the `observe` settings.
        run_dir: folder of the run; made when missing.
        total_steps: steps of the run.
        is_main: whether this process is the one that logs.
        largest_kl: clamp of a token's KL to the reference; None: no clamp.

    Raises:
        ConfigError: a logger's name is not registered.
    """

    def __init__(
        self,
        config: ObserveConfig,
        run_dir: Path,
        *,
        total_steps: int,
        is_main: bool,
        largest_kl: float | None = None,
    ) -> None:
        self._main = is_main
        if not is_main:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._largest_kl = largest_kl
        self._loggers: dict[str, Logger] = {
            name: bind_arguments(LOGGERS.load(name), arguments_of(name, config.kwargs), 1, "observe.kwargs")(run_dir)
            for name in config.loggers
        }
        self._completions = CompletionsLog(run_dir, config.completions_per_step, config.logged_images)
        self._completions_per_step = config.completions_per_step
        self._warnings = WarningsLog(run_dir)
        self._warns = config.warnings
        self._monitor: Monitor | None = None
        self._history = RunHistory(self._largest_kl)
        self._resumed_from = 0
        self._started = time.monotonic()
        self._progress: Progress = choose_progress(
            config.progress, title=run_dir.name, total_steps=total_steps, log_every=config.log_every
        )

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def resume_from(self, step: int) -> None:
        """Cut all logs back to `step` and begin; call it once, before anything is logged.

        Args:
            step: step of the checkpoint that the run continues from. With 0 the run starts over and what an earlier
                attempt logged, its validation at step 0 included, is removed.
        """
        if not self._main:
            return
        for log in (*self._loggers.values(), self._completions, self._warnings):
            log.cut_back(step if step > 0 else -1)
        self._resumed_from = step
        self._history = RunHistory(self._largest_kl)
        self._monitor = Monitor(saved_config(self._run_dir)) if self._warns else None
        rewards = self._replay() if "jsonl" in self._loggers else []
        self._show(lambda: self._progress.begin(step, rewards))

    def step(self, metrics: StepMetrics, sample: Sample | None = None) -> None:
        """Log and show a finished step.

        Args:
            metrics: its numbers.
            sample: one of its responses to show.

        Raises:
            RunError: a logger failed; the message names it.
        """
        if not self._main:
            return
        self._log(metrics.step, metrics.values)
        self._show(lambda: self._progress.step(metrics.step, metrics.values, sample))
        for warning in self._monitor.add(metrics.step, metrics.values) if self._monitor else ():
            self._write(warnings.FILE, metrics.step, lambda warning=warning: self._warnings.log(warning))
            self._show(lambda warning=warning: self._progress.warning(warning.text))

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Log and show a validation after `step` (0: before training).

        Raises:
            RunError: a logger failed; the message names it.
        """
        if not self._main:
            return
        self._log(step, values)
        self._show(lambda: self._progress.validation(step, values))

    def completions(
        self,
        step: int,
        batch: PromptBatch,
        completions: Completions,
        rewards: Rewards,
        advantages_S: torch.Tensor,
        dropped: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Write some samples of this rank to completions.jsonl, as many as `observe.completions_per_step`.

        Args:
            step: step number.
            batch: the G prompts.
            completions: their S responses.
            rewards: [S] rewards.
            advantages_S: [S] advantages.
            dropped: `dropped_records` of all ranks.

        Raises:
            RunError: the file could not be written.
        """
        if self._main and self._completions_per_step:
            self._write(
                "completions.jsonl",
                step,
                lambda: self._completions.log(step, batch, completions, rewards, advantages_S, dropped),
            )

    def note(self, text: str) -> None:
        """Show an event: a checkpoint was saved, something deserves attention."""
        if self._main:
            self._show(lambda: self._progress.note(text))

    def finish(self, status: str, **paths: Path) -> dict[str, Any] | None:
        """Save and show the closing summary.

        Args:
            status: how the run ended ("completed", "interrupted", "failed").
            paths: where further results lie, e.g. `model=`, `checkpoint=`.

        Returns:
            The content of summary.json; None on ranks other than the main one.
        """
        if not self._main:
            return None
        ours = {
            "metrics": self._run_dir / jsonl.FILE,
            "tensorboard": self._run_dir / tensorboard.FOLDER,
            "completions": self._run_dir / completions.FILE,
            "warnings": self._run_dir / warnings.FILE,
        }
        summary = build_summary(
            self._history,
            status=status,
            total_steps=self._total_steps,
            resumed_from=self._resumed_from,
            wall_s=time.monotonic() - self._started,
            paths={**paths, **{what: path for what, path in ours.items() if path.exists()}},
            warnings=self._monitor.warnings if self._monitor else (),
        )
        save_summary(self._run_dir, summary)
        self._show(lambda: self._progress.summary(summary))
        return summary

    def close(self) -> None:
        """Close the logs and give the terminal back.

        Raises:
            RunError: a log could not be closed, and no error is on its way already; the message names it.
        """
        if not self._main:
            return
        self._show(lambda: self._progress.close())
        logs = {f"logger {name!r}": logger for name, logger in self._loggers.items()}
        logs |= {completions.FILE: self._completions, warnings.FILE: self._warnings}
        close_all(*(lambda what=what, log=log: self._close(what, log) for what, log in logs.items()))

    def _close(self, what: str, log: Logger | CompletionsLog | WarningsLog) -> None:
        try:
            log.close()
        except OSError as error:
            raise RunError(
                f"{what} could not write the rest to {self._run_dir}: {error}; make room or restore access there"
            ) from error

    def _replay(self) -> list[float]:
        """Load metrics.jsonl into the history, and rewrite warnings.jsonl for the steps so far.

        Returns:
            The mean reward of each step so far.
        """
        rewards = []
        for logged, values in sorted(jsonl.read_metrics(self._run_dir).items()):
            self._history.add(logged, values)
            reward = REWARD.read(values)
            rewards += [] if reward is None else [reward]
            if self._monitor is not None and logged > 0:
                self._monitor.add(logged, values)
        if self._monitor is not None:
            self._warnings.cut_back(-1)
            for warning in self._monitor.warnings:
                self._warnings.log(warning)
        return rewards

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        for name, logger in self._loggers.items():
            self._write(f"logger {name!r}", step, lambda logger=logger: logger.log(step, values))
        self._history.add(step, values)

    def _write(self, what: str, step: int, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            raise RunError(
                f"{what} could not write step {step} to {self._run_dir}: {error}; "
                "make room or restore access there, then start again: the run resumes from its last checkpoint"
            ) from error

    def _show(self, show: Callable[[], None]) -> None:
        """Show something; a terminal that has gone away (a closed pipe or session) ends the show, not the run."""
        try:
            show()
        except OSError as error:
            self._progress = Silence()
            logging.getLogger(__name__).warning("progress is no longer shown (%s); logging continues", error)
