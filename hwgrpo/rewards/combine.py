"""Several reward functions -> one number per response, and what a failing function costs."""

from __future__ import annotations

import collections
import math
import numbers
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from omegaconf import OmegaConf

import hwgrpo
from hwgrpo.errors import ConfigError, RewardError, nearest
from hwgrpo.rewards.functions import RewardFunction, adapt
from hwgrpo.rewards.loading import load_function
from hwgrpo.values import Completions, PromptBatch, Rewards


class RewardPipeline:
    """The weighted sum of the configured reward functions.

    Args:
        config: the `reward` settings (`RewardConfig`); `shuffle` is the trainer's.
        context: values that are offered to functions that name them, e.g. {"max_response_tokens": 512}.
        columns: the columns of the data, to check now what functions need; None checks at the first batch.

    Raises:
        ConfigError: no functions, or one that cannot be found or called.
    """

    def __init__(
        self, config: Any, *, context: Mapping[str, Any] | None = None, columns: Collection[str] | None = None
    ) -> None:
        if not config.functions:
            raise ConfigError("reward.functions is empty; name at least one, e.g. reward.functions=[exact_match]")
        self.settings = tuple(config.functions)
        functions = []
        seen: collections.Counter[str] = collections.Counter()
        for number, entry in enumerate(self.settings):
            key = f"reward.functions[{number}]"
            name, call = load_function(entry.name, f"{key}.name")
            seen[name] += 1
            name = name if seen[name] == 1 else f"{name}_{seen[name]}"
            kwargs: Any = OmegaConf.to_container(entry.kwargs) if OmegaConf.is_config(entry.kwargs) else entry.kwargs
            functions.append(adapt(name, call, kwargs, context or {}, key))
        self.functions: tuple[RewardFunction, ...] = tuple(functions)
        self._columns_known = columns is not None
        if columns is not None:
            self._check_columns(columns)

    @property
    def names(self) -> tuple[str, ...]:
        """What metrics call the functions, in the order of the config."""
        return tuple(function.name for function in self.functions)

    def score(self, batch: PromptBatch, completions: Completions, step: int | None = None) -> Rewards:
        """Score the S responses to a batch.

        Args:
            batch: G prompts.
            completions: S responses.
            step: the training step, for functions that ask for it (TRL's `trainer_state`).

        Returns:
            The weighted sum in fp64, and per function its values.

        Raises:
            RewardError: a function failed under the policy `raise`, or returned something that is no reward.
            ConfigError: a function needs a column that the data lacks.
        """
        if not self._columns_known:
            self._check_columns({column for prompt in batch.prompts for column in prompt.columns})
        size = len(completions)
        total = torch.zeros(size, dtype=torch.float64)
        valid = torch.ones(size, dtype=torch.bool)
        per_function: dict[str, torch.Tensor] = {}
        failures: collections.Counter[str] = collections.Counter()
        extras: list[dict[str, Any]] = [{} for _ in range(size)]
        for function, setting in zip(self.functions, self.settings, strict=True):
            outcome = _Outcome(function, setting, batch, completions)
            outcome.collect(step)
            total += setting.weight * torch.where(
                outcome.replaced, setting.failure_value, outcome.values.nan_to_num(0.0)
            )
            valid &= outcome.valid
            per_function[function.name] = outcome.values
            failures.update(outcome.failures)
            for merged, extra in zip(extras, outcome.extras, strict=True):
                merged.update(extra)
        return Rewards(
            total=total.where(valid, 0.0),
            valid=valid,
            per_function=per_function,
            failures=dict(failures),
            extras=tuple(extras) if any(extras) else (),
        )

    def _check_columns(self, columns: Collection[str]) -> None:
        for number, function in enumerate(self.functions):
            for missing in function.missing_columns(columns):
                near = nearest(missing, columns)
                hint = f" Did you mean {near!r}?" if near else ""
                raise ConfigError(
                    f"reward.functions[{number}]: {function.name} needs a data column (or kwargs entry) {missing!r}; "
                    f"columns are: {', '.join(sorted(columns))}.{hint}"
                )


class _Outcome:
    """What one function gave for one batch, with its failure policies applied."""

    def __init__(self, function: RewardFunction, setting: Any, batch: PromptBatch, completions: Completions) -> None:
        self.function, self.setting, self.batch, self.completions = function, setting, batch, completions
        size = len(completions)
        self.values = torch.full((size,), math.nan, dtype=torch.float64)
        self.valid = torch.ones(size, dtype=torch.bool)
        self.replaced = torch.zeros(size, dtype=torch.bool)
        self.failures: collections.Counter[str] = collections.Counter()
        self.extras: list[dict[str, Any]] = []

    def collect(self, step: int | None) -> None:
        """Call the function and file its results, sample by sample."""
        size = len(self.completions)
        try:
            results, self.extras = self.function.values(self.batch, self.completions, step)
        except ConfigError:
            raise  # a wrong setting stops the run, whatever the policy for failing samples
        except (Exception, SystemExit) as error:  # a call for the whole batch: every sample of it failed
            results, self.extras = [error] * size, [{} for _ in range(size)]
        if isinstance(results, str | bytes | Mapping) or not hasattr(results, "__len__"):
            raise RewardError(
                f"reward {self.function.name} must return a list with one number per response; "
                f"it returned {type(results).__name__}"
            )
        if len(results) != size:
            raise RewardError(f"reward {self.function.name} returned {len(results)} values for {size} responses")
        for sample, result in enumerate(results):
            if isinstance(result, Exception):
                self._fail(sample, "errors", self.setting.on_error, result)
                continue
            value = self._number(sample, result)
            if math.isfinite(value):
                self.values[sample] = value
            else:
                self._fail(sample, "nans", self.setting.on_nan, result)

    def _number(self, sample: int, result: Any) -> float:
        """Return a result as a float, NaN for None; the other fields of a dict go to `extras`."""
        if isinstance(result, Mapping):
            if "score" not in result:
                raise RewardError(f"{self._where(sample)} returned a dict without 'score'; it has: {list(result)}")
            self.extras[sample].update({name: value for name, value in result.items() if name != "score"})
            result = result["score"]
        if result is None:
            return math.nan
        if isinstance(result, torch.Tensor) or type(result).__module__ == "numpy":
            result = result.item() if getattr(result, "ndim", 0) == 0 else result
        if not isinstance(result, numbers.Real):
            raise RewardError(
                f"{self._where(sample)} returned {result!r} ({type(result).__name__}), which is no number"
            )
        return float(result)

    def _fail(self, sample: int, kind: str, policy: str, result: Any) -> None:
        self.failures[f"{kind}/{self.function.name}"] += 1
        if policy == "raise":
            self._raise(sample, kind, result)
        elif policy == "value":
            self.replaced[sample] = True
        elif policy == "mask_sample":
            self.valid[sample] = False
        else:
            assert policy == "drop_group", policy
            self.valid &= self.completions.prompt_index != self.completions.prompt_index[sample]

    def _raise(self, sample: int, kind: str, result: Any) -> NoReturn:
        error = result if isinstance(result, Exception) else None
        what = f"raised {type(error).__name__}: {error}{_place(error)}" if error else f"returned {result!r}"
        setting = "on_error" if kind == "errors" else "on_nan"
        raise RewardError(
            f"{self._where(sample)} {what}; mend it or, to go on without, set its {setting} to value, mask_sample or "
            f"drop_group, as in {{name: ..., {setting}: value}}"
        ) from error

    def _where(self, sample: int) -> str:
        index = self.completions.prompt_index
        prompt = self.batch.prompts[int(index[sample])]
        within = int((index[:sample] == index[sample]).sum())
        where = prompt.place or f"prompt {prompt.uid} of {prompt.source}"
        return f"reward {self.function.name}, {where}, sample {within} of its group"


_PACKAGE = str(Path(hwgrpo.__file__).parent)


def _place(error: Exception) -> str:
    """Return the line of the function's own file that an exception came from, in words."""
    frames = traceback.extract_tb(error.__traceback__)
    entered = next((frame for frame in frames if not frame.filename.startswith(_PACKAGE)), None)
    if entered is None:
        return ""
    last = [frame for frame in frames if frame.filename == entered.filename][-1]
    return f" at {last.filename}:{last.lineno}" + (f", `{last.line}`" if last.line else "")
