"""The values of one reward function for a batch, with the policies for its failures applied."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from hwgrpo.errors import ConfigError, RewardError, quoted
from hwgrpo.rewards.failures import ProcessDied, StepMismatch, TimedOut, describe_failure
from hwgrpo.rewards.processes.messages import SHOWN_CHARS, InvalidReward, is_listed, number_of
from hwgrpo.rewards.processes.reward_process import Reward
from hwgrpo.rewards.randomness import Seed, seed_of
from hwgrpo.support.jsonlines import jsonable
from hwgrpo.support.torch_settings import kept_torch_settings, own_generators
from hwgrpo.values import Completions, PromptBatch

OWN_PROCESS = "With `workers: 1` the reward has a process of its own."


class FunctionValues:
    """Values and failures of one function for one batch."""

    def __init__(
        self,
        function: Reward,
        setting: Any,
        batch: PromptBatch,
        completions: Completions,
        step_counts: Sequence[int] | None = None,
        left_out: torch.Tensor | None = None,
    ) -> None:
        """Prepare a call.

        Args:
            function: the reward.
            setting: its settings (`RewardFunctionConfig`).
            batch: G prompts.
            completions: S responses.
            step_counts: as the attribute.
            left_out: [S] bool: responses that it is not called with, and that have no value; None: none.
        """
        self.step_counts = step_counts
        """Number of steps of each response, if the function may return their rewards; None: it may not."""
        self.steps: dict[int, list[float]] = {}
        """Response -> the rewards of its steps, where the function returned a list; `values` are their sums."""
        self.function, self.setting, self.batch, self.completions = function, setting, batch, completions
        size = len(completions)
        called = None if left_out is None or not left_out.any() else ~left_out
        self._samples = [*range(size)] if called is None else called.nonzero()[:, 0].tolist()
        """Numbers of the responses that the function is called with."""
        self._scored = completions if called is None else completions.select(called)
        self.values = torch.full((size,), math.nan, dtype=torch.float64)
        self.valid = torch.ones(size, dtype=torch.bool)
        self.replaced = torch.zeros(size, dtype=torch.bool)
        self.failures: collections.Counter[str] = collections.Counter()
        self.first_failures: dict[str, str] = {}
        self.extras: list[dict[str, Any]] = [{} for _ in range(size)]

    def collect(self, step: int | None, seed: Seed, device: torch.device) -> None:
        """Call the function and store its results per sample.

        Args:
            step: the training step.
            seed: of the function's random numbers.
            device: whose generator is kept as it is, beside the host's.
        """
        size = len(self._samples)
        if size == 0:
            return  # all groups were dropped, or all environments failed
        called = self.batch, self._scored, step, self._raise_early, seed
        try:
            with (
                kept_torch_settings(f"reward {self.function.name}", OWN_PROCESS),
                own_generators(seed_of(*seed), device),
            ):
                results, extras = self.function.values(*called)
        except (ConfigError, RewardError):
            raise  # a wrong setting stops the run, whatever the policy for failing samples
        except Exception as error:  # a call for the whole batch: every sample of it failed
            results, extras = [error] * size, [{} for _ in range(size)]
        if not is_listed(results):
            raise RewardError(
                f"reward {self.function.name} must return a list with one number per response; "
                f"it returned {_kind(results)}"
            )
        if len(results) != size:
            raise RewardError(f"reward {self.function.name} returned {len(results)} values for {size} responses")
        values = self.values.tolist()
        for sample, result, extra in zip(self._samples, results, extras, strict=True):
            self.extras[sample] = extra
            if isinstance(result, BaseException):
                self._fail(sample, *self._policy(result), result)
                continue
            value = result if type(result) is float else self._number(sample, result)
            if isinstance(value, str):
                self._fail(sample, "steps", self.setting.on_error, StepMismatch(value))
                continue
            if math.isfinite(value):
                values[sample] = value
            else:
                self._fail(sample, "nans", self.setting.on_nan, result)
        self.values = torch.tensor(values, dtype=torch.float64)

    def _policy(self, error: BaseException) -> tuple[str, str]:
        """Return the kind under which a failure is counted, and its policy."""
        if isinstance(error, TimedOut):
            return "timeouts", self.setting.on_timeout
        return "errors", self.setting.on_error

    def _raise_early(self, call: int, error: Exception) -> None:
        """Raise at once where a failure stops the run: other samples may time out, too."""
        kind, policy = self._policy(error)
        if policy == "raise":
            self._raise(self._samples[call], kind, error)

    def _number(self, sample: int, result: Any) -> float | str:
        """Return a result as a float, NaN for None; the other fields of a dict go to `extras`.

        A list of rewards of steps goes to `steps`; returned is its sum, or text if there is not one for each step.
        """
        if isinstance(result, Mapping):
            if "score" not in result:
                raise RewardError(
                    f"{self._where(sample)} returned a dict without 'score'; "
                    f"it has: {quoted(list(result), SHOWN_CHARS)}"
                )
            fields = {name: _recordable(value) for name, value in result.items() if name != "score"}
            self.extras[sample].update(fields)
            result = result["score"]
        if self.step_counts is not None and is_listed(result):
            return self._sum_of_steps(sample, result, self.step_counts[sample])
        number = number_of(result)
        if number is None and is_listed(result):
            raise RewardError(
                f"{self._where(sample)} returned {quoted(result, SHOWN_CHARS)} ({_kind(result)}), which is not a "
                "number; rewards of steps need algorithm.advantage.name=process, those of turns also gigpo"
            )
        if number is None:
            shown = quoted(result, SHOWN_CHARS)
            raise RewardError(f"{self._where(sample)} returned {shown} ({_kind(result)}), which is not a number")
        return number

    def _sum_of_steps(self, sample: int, result: Any, count: int) -> float | str:
        rewards = [number_of(each) for each in result]
        if None in rewards:
            raise RewardError(f"{self._where(sample)} returned {quoted(result, SHOWN_CHARS)}, not a list of numbers")
        numbers = [float(each) for each in rewards if each is not None]
        if not numbers and not self.completions.texts[sample].strip():
            numbers = [0.0]  # nothing was written; the response is one step all the same
        if len(numbers) != count:
            return f"returned {len(numbers)} rewards of steps for a response of {count}"
        self.steps[sample] = numbers
        return math.fsum(numbers) if all(map(math.isfinite, numbers)) else math.nan

    def _fail(self, sample: int, kind: str, policy: str, result: Any) -> None:
        self.steps.pop(sample, None)
        key = f"{kind}/{self.function.name}"
        self.failures[key] += 1
        if policy == "raise":
            self._raise(sample, kind, result)
        self.first_failures.setdefault(key, f"{self._where(sample, result)} {_what(result)}")
        if policy == "value":
            self.replaced[sample] = True
        elif policy == "mask_sample":
            self.valid[sample] = False
        else:
            assert policy == "drop_group", policy
            self.valid &= self.completions.prompt_index != self.completions.prompt_index[sample]

    def _raise(self, sample: int, kind: str, result: Any) -> NoReturn:
        where, what = self._where(sample, result), _what(result)
        setting = {"errors": "on_error", "steps": "on_error", "nans": "on_nan", "timeouts": "on_timeout"}[kind]
        example = f"timeout: {self.setting.timeout:g}, {setting}" if kind == "timeouts" else setting
        remedy = "mend it, give it more time with timeout or" if kind == "timeouts" else "mend it or"
        raise RewardError(
            f"{where} {what}; {remedy}, to continue without it, set its {setting} to value, mask_sample or "
            f"drop_group, as in {{name: ..., {example}: value}}"
        ) from (result if isinstance(result, BaseException) else None)

    def _where(self, sample: int, result: Any = None) -> str:
        if self.function.form != "verl" and isinstance(result, TimedOut | ProcessDied):
            return f"reward {self.function.name}, called with all {len(self._scored)} responses,"
        index = self.completions.prompt_index
        prompt = self.batch.prompts[int(index[sample])]
        within = int((index[:sample] == index[sample]).sum())
        where = prompt.place or f"prompt {prompt.uid} of {prompt.source}"
        return f"reward {self.function.name}, {where}, sample {within} of its group"


def _what(result: Any) -> str:
    return describe_failure(result) if isinstance(result, BaseException) else f"returned {quoted(result, SHOWN_CHARS)}"


def _recordable(value: Any) -> Any:
    """Return a field, or its quoted text where it cannot be written to completions.jsonl."""
    if value is None or isinstance(value, str | float | bool):
        return value
    try:
        json.dumps(jsonable(value))
    except Exception:  # a class of the user's may raise anything; integers and nesting have limits
        return quoted(value, SHOWN_CHARS)
    return value


def _kind(value: Any) -> str:
    return value.kind if isinstance(value, InvalidReward) else type(value).__name__
