"""A reward function in separate processes, so that it can be killed on a timeout."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from hwgrpo.catalog import REWARDS
from hwgrpo.errors import ConfigError
from hwgrpo.rewards.functions import Failed, PromptCheck, RewardFunction, prompt_check
from hwgrpo.rewards.processes.messages import merge_extras, unpack_all, unpack_one
from hwgrpo.rewards.processes.worker_pool import Pool
from hwgrpo.rewards.randomness import Seed
from hwgrpo.rewards.signatures import load_function, make_instance, make_reward_function, split_name
from hwgrpo.user_code import imported_plugins
from hwgrpo.values import Completions, Prompt, PromptBatch


class ProcessReward:
    """A reward function in processes, with the interface of `RewardFunction`.

    Args:
        setup: settings that the processes load: reward, name, kwargs, context, key.
        workers: number of processes.
        timeout: seconds per call; None is no limit.

    Raises:
        ConfigError: the function cannot be found or called, or cannot use so many processes.
    """

    def __init__(self, setup: Mapping[str, Any], workers: int, timeout: float | None) -> None:
        name = setup["reward"]
        self.prompt_check: PromptCheck | None = None
        if name in REWARDS:  # a function of the user's is not loaded in this process
            self.prompt_check = prompt_check(REWARDS.load(name), {**setup["context"], **setup["kwargs"]})
        self._pool = Pool(setup, workers, timeout)
        self._signature = self._pool.signature
        self.name, self.form = self._signature.name, self._signature.form
        if workers > 1 and self.form != "verl":
            self.close()
            raise ConfigError(
                f"{setup['key']}.workers={workers}: {self.name} is called once for all responses of a batch, so one "
                f"process is all it can use; leave workers out, or give it verl's signature"
            )

    def missing_columns(self, columns: Collection[str]) -> list[str]:
        """Return the data columns that TRL's form needs and `columns` lacks."""
        return self._signature.missing_columns(columns)

    def values(
        self,
        batch: PromptBatch,
        completions: Completions,
        step: int | None,
        failed: Failed | None = None,
        seed: Seed = (),
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Call the function on a batch, as `RewardFunction.values` does.

        Args:
            batch: G prompts.
            completions: S responses.
            step: the training step; None when there is none.
            failed: called on a call's failure at once; an exception that it raises ends the other calls.
            seed: as in `RewardFunction.values`.

        Raises:
            Exception: the call for the full batch failed.
        """
        extras: list[dict[str, Any]] = [{} for _ in range(len(completions))]
        calls = self._signature.calls(batch, completions, step)
        results = self._pool.run(calls, len(completions) if self.form == "trl" else 0, failed, seed)
        if self.form == "verl":
            return [_value(result) for result in results], extras
        (result,) = results
        if isinstance(result, Exception):
            raise result
        if "extras" in result:
            merge_extras(extras, result["extras"])
        return unpack_all(result["value"]), extras

    def per_sample(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Any]:
        """Call a function of verl's form per prompt and response; return values or exceptions."""
        calls = [self._signature.sample_call(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        return [_value(result) for result in self._pool.run(calls, 0, None, ())]

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


Reward = RewardFunction | ProcessReward
"""A reward function, in this process or in others."""


def open_reward(
    entry: Any,
    context: Mapping[str, Any],
    key: str,
    name: str | None = None,
    folder: str | None = None,
    services: Mapping[str, Any] | None = None,
) -> Reward:
    """Load a reward function, in this process or, with a timeout or workers, in others.

    Args:
        entry: its settings (`RewardFunctionConfig`).
        context: values passed to functions with such parameters, e.g. {"max_response_tokens": 512}.
        key: the setting, for messages ("reward.functions[0]").
        name: name in metrics; None uses the function's own name.
        folder: working directory of its processes, since a reward's file may have changed this one's; None: this one's.
        services: further values passed to a reward that is a class: {"device": ..., "steps": ...}.

    Raises:
        ConfigError: the function cannot be found or called, or a class is to be used in other processes.
    """
    name = name or split_name(entry.name)[1]
    kwargs: Any = OmegaConf.to_container(entry.kwargs) if OmegaConf.is_config(entry.kwargs) else entry.kwargs
    if entry.timeout is None and entry.workers == 0:
        call = load_function(entry.name, f"{key}.name")[1]
        if inspect.isclass(call):
            given = {**context, **(services or {}), "name": name, "key": key}
            call, kwargs, context = make_instance(call, name, kwargs, given, key), {}, {}
        return make_reward_function(name, call, kwargs, context, key)
    setup = {"reward": entry.name, "name": name, "kwargs": dict(kwargs), "context": dict(context), "key": key}
    setup["folder"], setup["plugins"] = folder or os.getcwd(), imported_plugins()
    return ProcessReward(setup, max(1, entry.workers), entry.timeout)


def _value(result: Any) -> Any:
    return result if isinstance(result, Exception) else unpack_one(result["value"])
