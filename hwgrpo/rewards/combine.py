"""The weighted sum of several reward functions, after their failure policies; 0 where a gate is not passed."""

from __future__ import annotations

import collections
import copy
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hwgrpo.errors import ConfigError, nearest
from hwgrpo.rewards.failure_policy import OWN_PROCESS, FunctionValues
from hwgrpo.rewards.processes.reward_process import Reward, open_reward
from hwgrpo.rewards.randomness import Seed
from hwgrpo.rewards.response_steps import StepTotals
from hwgrpo.rewards.reward_metrics import RewardMetrics
from hwgrpo.rewards.signatures import split_name
from hwgrpo.rewards.trajectory_outcomes import FailedTrajectories, TurnFinder, last_turns
from hwgrpo.support.torch_settings import kept_torch_settings
from hwgrpo.values import Completions, Prompt, PromptBatch, Rewards

if TYPE_CHECKING:
    from hwgrpo.rewards.response_steps import StepFinder


class RewardPipeline:
    """The weighted sum of the configured reward functions.

    Args:
        config: the `reward` settings (`RewardConfig`); `shuffle` is the trainer's.
        context: values passed to functions with such parameters, e.g. {"max_response_tokens": 512}.
        columns: the columns of the data, checked now against the functions; None checks at the first batch.
        seed: seed of the functions' random numbers, together with the batch and the call.
        steps: finds the steps of responses, or their turns, whose rewards functions may return as a list; None: one
            number each.
        device: the run's device, for rewards with models of their own; None: the CPU.
        on_failure: policy for trajectories whose environment failed (`rollout.agent.on_failure`).

    Raises:
        ConfigError: no functions, or one cannot be found or called.
    """

    def __init__(
        self,
        config: Any,
        *,
        context: Mapping[str, Any] | None = None,
        columns: Collection[str] | None = None,
        seed: Seed = (),
        steps: StepFinder | TurnFinder | None = None,
        device: torch.device | None = None,
        on_failure: str = "mask_sample",
    ) -> None:
        if not config.functions:
            raise ConfigError("reward.functions is empty; name at least one, e.g. reward.functions=[exact_match]")
        self.settings = tuple(config.functions)
        self._seed = seed
        self._steps, self._on_failure = steps, on_failure
        functions, folder = [], os.getcwd()
        self._device = device or torch.device("cpu")
        turns = isinstance(steps, TurnFinder)
        # turns are no steps of a text: a model that scores those gives one number, the reward of the last turn
        services = {"device": self._device, "steps": None if turns else steps, "turn_rewards": turns}
        seen: collections.Counter[str] = collections.Counter()
        for number, entry in enumerate(self.settings):
            key = f"reward.functions[{number}]"
            name = split_name(entry.name)[1]
            seen[name] += 1
            name = name if seen[name] == 1 else f"{name}_{seen[name]}"
            with kept_torch_settings(f"reward {name}", OWN_PROCESS):  # its file or its class may change them
                functions.append(open_reward(entry, context or {}, key, name, folder, services))
        self.functions: tuple[Reward, ...] = tuple(functions)
        self.metrics = RewardMetrics(self.functions)
        self._columns_known = columns is not None
        if columns is not None:
            self.check_columns(columns)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions in metrics, in the order of the config."""
        return tuple(function.name for function in self.functions)

    def strict(self, number: int) -> RewardPipeline:
        """Return one of the functions as a pipeline that raises its failures, whatever its settings do with them."""
        other = copy.copy(self)
        other.functions = self.functions[number : number + 1]
        other.settings = (replace(self.settings[number], on_error="raise", on_nan="raise", on_timeout="raise"),)
        return other

    def score(
        self, batch: PromptBatch, completions: Completions, step: int | None = None, *, drawing: Seed | None = None
    ) -> Rewards:
        """Score the S responses to a batch.

        Args:
            batch: G prompts.
            completions: S responses.
            step: the training step, for functions that use it (TRL's `trainer_state`).
            drawing: id of the batch in the seed of random numbers; None: the batch of the training step.

        Returns:
            The weighted sum in fp64, and the values per function.

        Raises:
            RewardError: a function or an environment failed under the policy `raise`, or a function returned an invalid
                reward.
            ConfigError: a function needs a column that the data lacks.
        """
        if not self._columns_known:
            self.check_columns({column for prompt in batch.prompts for column in prompt.columns})
        size = len(completions)
        scored = []
        trajectories = FailedTrajectories(batch, completions, self._on_failure)
        valid = trajectories.valid
        per_function: dict[str, torch.Tensor] = {}
        failures = collections.Counter(trajectories.failures)
        first_failures = dict(trajectories.first_failures)
        extras: list[dict[str, Any]] = [{} for _ in range(size)]
        steps = StepTotals(self._steps, completions) if self._steps is not None else None
        for function, setting in zip(self.functions, self.settings, strict=True):
            counts = steps.counts if steps else None
            scored_texts = last_turns(completions) if setting.text == "last_turn" else completions
            result = FunctionValues(function, setting, batch, scored_texts, counts, trajectories.failed)
            result.collect(step, (*self._seed, *(drawing or ("step", step)), function.name), self._device)
            scored.append(torch.where(result.replaced, setting.failure_value, result.values.nan_to_num(0.0)))
            if steps is not None:
                steps.add(result, setting)
            valid = valid & result.valid
            per_function[function.name] = result.values
            failures.update(result.failures)
            first_failures = result.first_failures | first_failures
            for merged, extra in zip(extras, result.extras, strict=True):
                merged.update(extra)
        return Rewards(
            total=gated_sum(scored, self.settings).where(valid, 0.0),
            valid=valid,
            per_function=per_function,
            failures=dict(failures),
            first_failures=first_failures,
            extras=tuple(extras) if any(extras) else (),
            steps=None if steps is None else steps.rewards(valid, scored=bool((~trajectories.failed).any())),
        )

    def close(self) -> None:
        """End the processes of functions; nothing can be scored afterwards."""
        for function in self.functions:
            function.close()

    def __enter__(self) -> RewardPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Raise `DataError` for the first prompt that a function says no response can be scored to."""
        checks = [check for function in self.functions if (check := function.prompt_check) is not None]
        if checks:
            for prompt in prompts:
                for check in checks:
                    check(prompt)

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise `ConfigError` if a function needs a data column that is missing."""
        for number, function in enumerate(self.functions):
            for missing in function.missing_columns(columns):
                near = nearest(missing, columns)
                hint = f" Did you mean {near!r}?" if near else ""
                raise ConfigError(
                    f"reward.functions[{number}]: {function.name} needs a data column (or kwargs entry) {missing!r}; "
                    f"columns are: {', '.join(sorted(columns))}.{hint}"
                )


WHY_NOT = (
    "where a gate has no effect; use an estimator of one reward per response, e.g. algorithm.advantage.name=grpo, or "
    "leave gate out"
)


def gated_sum(values: Sequence[torch.Tensor], settings: Sequence[Any]) -> torch.Tensor:
    """Sum rewards by weight; where a gate's is not above 0, only those of the gates.

    Args:
        values: [S] fp64 per function, with those of its failure policy.
        settings: `RewardFunctionConfig` per function.

    Returns:
        [S] fp64.
    """
    total = torch.zeros_like(values[0])
    opened = torch.ones_like(total, dtype=torch.bool)
    for value, setting in zip(values, settings, strict=True):
        if setting.gate:
            opened &= value > 0
    for value, setting in zip(values, settings, strict=True):
        total += setting.weight * (value if setting.gate else torch.where(opened, value, 0.0))
    return total


def check_gates(settings: Sequence[Any], estimator: str, reads: str | None) -> None:
    """Check that the advantage estimator reads the sums, which alone are gated.

    Args:
        settings: `RewardFunctionConfig` per function.
        estimator: name of the advantage estimator.
        reads: what it reads besides the sums, for the message; None: nothing.

    Raises:
        ConfigError: it reads more, and there is a gate.
    """
    for number, setting in enumerate(settings):
        if setting.gate and reads is not None:
            raise ConfigError(
                f"reward.functions.{number}.gate=true with algorithm.advantage.name={estimator!r}, which reads {reads},"
                f" {WHY_NOT}"
            )
