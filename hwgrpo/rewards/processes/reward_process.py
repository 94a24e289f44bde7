"""A reward function that is called in processes of its own, so that it can be killed when it hangs."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from hwgrpo.errors import ConfigError
from hwgrpo.rewards.functions import Failed, RewardFunction
from hwgrpo.rewards.processes.messages import merge_extras, unpack_all, unpack_one
from hwgrpo.rewards.processes.worker_pool import Pool
from hwgrpo.rewards.randomness import Seed
from hwgrpo.rewards.reward_loading import load_function, split_name
from hwgrpo.rewards.signatures import adapt
from hwgrpo.user_code import imported_plugins
from hwgrpo.values import Completions, Prompt, PromptBatch


class ProcessReward:
    """A reward function in processes; to its callers it is like a `RewardFunction`.

    Args:
        setup: what the processes load: reward, name, kwargs, context, key.
        workers: how many there are.
        timeout: seconds for a call; None is no limit.

    Raises:
        ConfigError: the function cannot be found or called, or more processes are asked for than it can use.
    """

    def __init__(self, setup: Mapping[str, Any], workers: int, timeout: float | None) -> None:
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
        """Return the data columns that a function in TRL's form needs and `columns` lacks."""
        return self._signature.missing_columns(columns)

    def values(
        self,
        batch: PromptBatch,
        completions: Completions,
        step: int | None,
        failed: Failed | None = None,
        seed: Seed = (),
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Call the function on a whole batch, as `RewardFunction.values` does.

        Args:
            batch: G prompts.
            completions: S responses.
            step: the training step; None when there is none.
            failed: is told of a call's failure as soon as it is known; what it raises ends the other calls.
            seed: as in `RewardFunction.values`.

        Raises:
            Exception: the one call for a whole batch failed.
        """
        extras: list[dict[str, Any]] = [{} for _ in range(len(completions))]
        calls = self._signature.calls(batch, completions, step)
        answers = self._pool.run(calls, len(completions) if self.form == "trl" else 0, failed, seed)
        if self.form == "verl":
            return [_value(answer) for answer in answers], extras
        (answer,) = answers
        if isinstance(answer, Exception):
            raise answer
        if "extras" in answer:
            merge_extras(extras, answer["extras"])
        return unpack_all(answer["value"]), extras

    def per_sample(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Any]:
        """Call a function of verl's form once for each prompt and response; an exception stands where a call failed."""
        calls = [self._signature.sample_call(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        return [_value(answer) for answer in self._pool.run(calls, 0, None, ())]

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


Reward = RewardFunction | ProcessReward
"""A function that can be called."""


def open_reward(
    entry: Any, context: Mapping[str, Any], key: str, name: str | None = None, folder: str | None = None
) -> Reward:
    """Make a reward function callable, in this process or, with a timeout or workers, in others.

    Args:
        entry: its settings (`RewardFunctionConfig`).
        context: values that are offered to functions that name them, e.g. {"max_response_tokens": 512}.
        key: the setting, for messages ("reward.functions[0]").
        name: what metrics call it; None takes the function's own name.
        folder: working directory of its processes, which another reward's file may have changed here; None: this one's.

    Raises:
        ConfigError: the function cannot be found or called.
    """
    name = name or split_name(entry.name)[1]
    kwargs: Any = OmegaConf.to_container(entry.kwargs) if OmegaConf.is_config(entry.kwargs) else entry.kwargs
    if entry.timeout is None and entry.workers == 0:
        return adapt(name, load_function(entry.name, f"{key}.name")[1], kwargs, context, key)
    setup = {"reward": entry.name, "name": name, "kwargs": dict(kwargs), "context": dict(context), "key": key}
    setup["folder"], setup["plugins"] = folder or os.getcwd(), imported_plugins()
    return ProcessReward(setup, max(1, entry.workers), entry.timeout)


def _value(answer: Any) -> Any:
    return answer if isinstance(answer, Exception) else unpack_one(answer["value"])
