"""Any accepted reward function -> one call per batch. The form is told by the names of its parameters.

verl    (data_source, solution_str, ground_truth, extra_info=None, **kwargs), called once per sample;
        returns a number, or a dict with `score` and further fields
TRL     (prompts, completions, completion_ids, **columns), called once with lists of one item per sample;
        returns a list of numbers or None
batch   (batch: PromptBatch, completions: Completions, **kwargs), called once;
        returns a list of numbers, None or dicts

A function takes those of its form's parameters that it needs; `solution_str`, one of `prompts`/`completions`/
`completion_ids`, or `batch` tells the form. Any of them may be `async`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hwgrpo.errors import ConfigError, error_text
from hwgrpo.rewards.async_functions import wait_for, wait_for_all
from hwgrpo.rewards.failures import Raised
from hwgrpo.rewards.randomness import TOGETHER, Seed, seeded
from hwgrpo.user_code import raised_by_user_code, source_line
from hwgrpo.values import Completions, Prompt, PromptBatch

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = ("prompts", "completions", "completion_ids")
TRL_SERVICES = ("trainer_state", "log_extra", "log_metric", "environments")
Failed = Callable[[int, Exception], None]
"""Is told of a call's failure: its number and what went wrong."""


@dataclass(frozen=True)
class Signature:
    """What must be known of a function to make the arguments of its calls."""

    name: str
    """What metrics and messages call it."""
    form: str
    """"verl", "trl" or "batch"."""
    parameters: frozenset[str]
    """Names that it can be given, its `**kwargs` aside."""
    required: frozenset[str]
    """Those of them without a default."""
    open_ended: bool
    """Whether it has `**kwargs`."""
    given: frozenset[str]
    """Further arguments that the config gives it."""
    is_async: bool
    """Whether it is an async function."""

    def missing_columns(self, columns: Collection[str]) -> list[str]:
        """Return the data columns that a function in TRL's form needs and `columns` lacks."""
        if self.form != "trl":
            return []
        known = {*columns, *TRL, *TRL_SERVICES, *self.given, "ground_truth"}
        return sorted(self.required - known)

    def calls(self, batch: PromptBatch, completions: Completions, step: int | None) -> list[dict[str, Any]]:
        """Return the arguments of the calls that score a batch, without the config's and the functions that log.

        Args:
            batch: G prompts.
            completions: S responses.
            step: the training step, for TRL's `trainer_state.global_step`; None when there is none.

        Returns:
            verl's form: S calls, one per response; else one.
        """
        prompts = [batch.prompts[index] for index in completions.prompt_index.tolist()]
        if self.form == "verl":
            return [self.sample_call(*pair) for pair in zip(prompts, completions.texts, strict=True)]
        if self.form == "batch":
            return [self._accepted({"batch": batch, "completions": completions})]
        bounds = completions.offsets.tolist()
        tokens = completions.tokens.tolist()
        # The usual names come last: TRL keeps a data column of such a name from the function, too.
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        arguments: dict[str, Any] = {"ground_truth": [prompt.ground_truth for prompt in prompts]}
        arguments |= {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        arguments |= {name: [None] * len(prompts) for name in self.required - {*arguments, *self.given}}
        arguments |= {
            "prompts": [prompt.text if prompt.messages is None else list(prompt.messages) for prompt in prompts],
            "completions": [
                text if prompt.messages is None else [{"role": "assistant", "content": text}]
                for prompt, text in zip(prompts, completions.texts, strict=True)
            ],
            "completion_ids": [tokens[start:end] for start, end in itertools.pairwise(bounds)],
            "trainer_state": None if step is None else SimpleNamespace(global_step=step),
            "environments": None,
        }
        return [self._accepted(arguments)]

    def sample_call(self, prompt: Prompt, text: str) -> dict[str, Any]:
        """Return the arguments of a call in verl's form."""
        arguments = {
            "data_source": prompt.source,
            "solution_str": text,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.columns.get("extra_info"),
        }
        return self._accepted(arguments)

    def _accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if self.open_ended:
            return dict(arguments)
        return {name: value for name, value in arguments.items() if name in self.parameters}


@dataclass(frozen=True)
class RewardFunction(Signature):
    """A reward function, ready to be called with a batch."""

    call: Callable[..., Any]
    kwargs: Mapping[str, Any]
    """Further arguments, from the config."""

    def values(
        self,
        batch: PromptBatch,
        completions: Completions,
        step: int | None,
        failed: Failed | None = None,
        seed: Seed = (),
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Call the function on a whole batch.

        Args:
            batch: G prompts.
            completions: S responses.
            step: the training step, for TRL's `trainer_state.global_step`; None when there is none.
            failed: unused; functions that run in processes tell of a failure through it as soon as they know.
            seed: what the random numbers that it draws depend on, together with the call's number.

        Returns:
            What the function returned, per sample (verl's form: S items, an exception in the place of the value where
            a sample's call raised; else whatever it gave), and S dicts of extra fields that it logged.
        """
        extras: list[dict[str, Any]] = [{} for _ in range(len(completions))]
        calls = self.calls(batch, completions, step)
        if self.form == "verl":
            return self._each(calls, seed), extras
        try:
            with seeded(*seed, 0):
                return wait_for(self.start(calls[0], extras)), extras
        except BaseException as error:
            if isinstance(error, Exception) or not raised_by_user_code(error):
                raise
            raise Raised(type(error).__name__, error_text(error), source_line(error)) from error

    def per_sample(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Any]:
        """Call a function of verl's form once for each prompt and response; an exception stands where a call raised."""
        return self._each([self.sample_call(prompt, text) for prompt, text in zip(prompts, texts, strict=True)], ())

    def start(self, arguments: Mapping[str, Any], extras: list[dict[str, Any]]) -> Any:
        """Call the function, with the config's arguments too; what an async one returns must be waited for.

        Args:
            arguments: one of `calls`.
            extras: a dict per response, to which functions of TRL's form log.
        """
        if self.form != "trl":
            return self.call(**arguments, **self.kwargs)

        def log_extra(column: str, values: Sequence[Any]) -> None:
            for extra, value in zip(extras, values, strict=True):
                extra[column] = value

        def log_metric(name: str, value: float) -> None:
            for extra in extras:  # the same for each sample, so that their mean is the metric
                extra[name] = value

        services = self._accepted({"log_extra": log_extra, "log_metric": log_metric})
        return self.call(**{**arguments, **services, **self.kwargs})

    def close(self) -> None:
        """Do nothing: a function that is called right here holds nothing open."""

    def _each(self, calls: Sequence[Mapping[str, Any]], seed: Seed) -> list[Any]:
        def caught(number: int, arguments: Mapping[str, Any]) -> Any:
            try:
                with seeded(*seed, number):
                    return self.start(arguments, [])
            except ConfigError:
                raise  # a wrong setting is no failure of this sample
            except BaseException as error:  # a function that exits must not end the run
                if not raised_by_user_code(error):
                    raise
                return error

        results = [caught(*numbered) for numbered in enumerate(calls)]
        with seeded(*seed, TOGETHER):
            return wait_for_all(results)
