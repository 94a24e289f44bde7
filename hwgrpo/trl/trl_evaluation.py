"""Evaluations of `GRPOTrainer`, and the best metric among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwgrpo.errors import ConfigError
from hwgrpo.trl.trainer_parts import TrainerParts
from hwgrpo.trl.trl_errors import trl_names
from hwgrpo.trl.trl_metrics import named_validation


class Evaluation(TrainerParts):
    """Evaluates, logs the metrics and notes the best."""

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the metrics of an evaluation; they are logged, too.

        Args:
            eval_dataset: rows, or a mapping of several; None: the constructor's.
            ignore_keys: without meaning here.
            metric_key_prefix: first part of the names.

        Raises:
            ConfigError: there is no dataset.
        """
        del ignore_keys
        rows = self.eval_dataset if eval_dataset is None else self._evaluation_rows(eval_dataset)
        if rows is None:
            raise ConfigError("evaluate: give eval_dataset here, or to the constructor")
        by_name = self._evaluates_by_name if eval_dataset is None else isinstance(eval_dataset, Mapping)
        trainer = self._opened_trainer()
        with trl_names():
            metrics = trainer.evaluate(rows)
        values = self._evaluated(metrics, by_name=by_name, prefix=metric_key_prefix)
        return values | {"epoch": self.state.epoch or 0.0}

    def _evaluated(self, metrics: Mapping[str, float], *, by_name: bool, prefix: str = "eval") -> dict[str, float]:
        """Log the metrics of an evaluation and return them under TRL's names.

        Args:
            metrics: those here.
            by_name: whether the rows were a mapping of datasets.
            prefix: first part of the names.
        """
        values = named_validation(metrics, self._rewards.shown, by_name=by_name)
        if prefix != "eval":
            values = {f"{prefix}{name.removeprefix('eval')}": value for name, value in values.items()}
        self.log(values)
        self._callbacks.call("on_evaluate", metrics=values)
        self._note_best(values)
        return values

    def _note_best(self, metrics: Mapping[str, float]) -> None:
        """Set the best metric of the state after an evaluation, as transformers does."""
        name = self.args.metric_for_best_model
        if name is None:
            return
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise ConfigError(f"metric_for_best_model={name!r} is no metric; there are: {', '.join(metrics)}")
        value, best = metrics[name], self.state.best_metric
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
