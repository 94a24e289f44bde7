"""Reward functions in three forms, called once per batch. The parameters' names decide the form.

verl    (data_source, solution_str, ground_truth, extra_info=None, **kwargs), called once per sample, with a parameter
        `opened_markers`, too; returns a number, or a dict with `score` and further fields
TRL     (prompts, completions, completion_ids, **columns), called once with lists of one item per sample;
        returns a list of numbers or None
batch   (batch: PromptBatch, completions: Completions, **kwargs), called once, with a parameter `step`, too;
        returns a list of numbers, None or dicts

A function declares the parameters of its form that it needs; `solution_str`, one of `prompts`/`completions`/
`completion_ids`, or `batch` decides the form. All forms may be `async`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hwgrpo.catalog import REWARDS
from hwgrpo.errors import ConfigError, error_text
from hwgrpo.own_copies import own_copy
from hwgrpo.rewards.failures import Cancelled, Raised
from hwgrpo.rewards.randomness import CONCURRENT, Seed, seeded
from hwgrpo.rewards.response_text import opened_markers
from hwgrpo.support.event_loops import run_outside_loops
from hwgrpo.user_code import raised_by_user_code, source_line
from hwgrpo.values import Completions, Prompt, PromptBatch

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
OPENED = "opened_markers"
"""Parameter of verl's form that only functions which name it get: the markers that the prompt leaves open."""
TRL = ("prompts", "completions", "completion_ids")
ENVIRONMENTS = "environments"
"""Parameter of TRL's form for the environments of the responses (`for_rewards`), which are no copies."""
TRL_SERVICES = ("trainer_state", "log_extra", "log_metric", ENVIRONMENTS)
Failed = Callable[[int, Exception], None]
"""Callback for a failed call: (number of the call, its exception)."""


PromptCheck = Callable[[Prompt], None]


def prompt_check(call: Callable[..., Any], kwargs: Mapping[str, Any]) -> PromptCheck | None:
    """Return the own `check_prompt` of a registered function, with the arguments from the config, or None.

    An attribute of this name that a user's function has, also by `functools.wraps`, is the user's.
    """
    check = getattr(call, "check_prompt", None)
    return functools.partial(check, **kwargs) if check is not None and REWARDS.has_loaded(call) else None


def chat_turns(completions: Completions) -> list[int]:
    """Return verl's `num_turns` of each response: the prompt, each turn of the policy, and what came after each."""
    mask = completions.loss_mask
    if mask is None:
        return [2] * len(completions)
    parts = (mask[start:end] for start, end in pairwise(completions.offsets.tolist()))
    return [2 + int((part[1:] != part[:-1]).sum()) for part in parts]


@dataclass(frozen=True)
class Signature:
    """Name, form and parameters of a reward function, which determine the arguments of its calls."""

    name: str
    """Name in metrics and messages."""
    form: str
    """"verl", "trl" or "batch"."""
    parameters: frozenset[str]
    """Names of its parameters, except `**kwargs`."""
    required: frozenset[str]
    """Names of parameters without a default."""
    open_ended: bool
    """Whether it has `**kwargs`."""
    given: frozenset[str]
    """Names of arguments from the config."""
    is_async: bool
    """Whether it is an async function."""

    def missing_columns(self, columns: Collection[str]) -> list[str]:
        """Return the data columns that TRL's form needs and `columns` lacks."""
        if self.form != "trl":
            return getattr(getattr(self, "call", None), "missing_columns", lambda _: [])(columns)
        known = {*columns, *TRL, *TRL_SERVICES, *self.given, "ground_truth"}
        return sorted(self.required - known)

    def calls(self, batch: PromptBatch, completions: Completions, step: int | None) -> list[dict[str, Any]]:
        """Return the arguments of the calls for a batch, without those of the config and the logging functions.

        Args:
            batch: G prompts.
            completions: S responses.
            step: the training step, for TRL's `trainer_state.global_step` and a parameter `step`; None: there is none.

        Returns:
            verl's form: S calls, one per response; otherwise one.
        """
        prompts = [batch.prompts[index] for index in completions.prompt_index.tolist()]
        outcomes = completions.outcome_of_each
        if self.form == "verl":
            turns = chat_turns(completions) if completions.outcomes else ()
            numbers = [turns[i] if outcome else None for i, outcome in enumerate(outcomes)]
            return [self.sample_call(*each) for each in zip(prompts, completions.texts, numbers, strict=True)]
        if self.form == "batch":
            passed = {"step": step} if "step" in self.parameters - self.given else {}
            return [self._accepted({"batch": batch, "completions": completions, **passed})]
        # TRL's names come last: there, too, they override data columns of the same name.
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        arguments: dict[str, Any] = {"ground_truth": [prompt.ground_truth for prompt in prompts]}
        arguments |= {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        arguments |= {name: [None] * len(prompts) for name in self.required - {*arguments, *self.given}}
        arguments |= {
            "prompts": [prompt.text if prompt.messages is None else list(prompt.messages) for prompt in prompts],
            "completions": [
                [*outcome["messages"]]
                if outcome.get("messages")
                else text
                if prompt.messages is None
                else [{"role": "assistant", "content": text}]
                for prompt, text, outcome in zip(prompts, completions.texts, outcomes, strict=True)
            ],
            "completion_ids": completions.new_tokens(),
            "trainer_state": None if step is None else SimpleNamespace(global_step=step),
            ENVIRONMENTS: None,
        }
        return [self._accepted(arguments)]

    def sample_call(self, prompt: Prompt, text: str, turns: int | None = None) -> dict[str, Any]:
        """Return the arguments of one call in verl's form.

        Args:
            prompt: the prompt.
            text: the response.
            turns: `chat_turns` of a trajectory, the `num_turns` in `extra_info`; None: it is none.
        """
        extra_info = prompt.columns.get("extra_info")
        if turns is not None and (extra_info is None or isinstance(extra_info, Mapping)):
            extra_info = {**(extra_info or {}), "num_turns": turns}
        arguments = {
            "data_source": prompt.source,
            "solution_str": text,
            "ground_truth": prompt.ground_truth,
            "extra_info": extra_info,
        }
        if OPENED in self.parameters:
            arguments[OPENED] = opened_markers(prompt.text)
        return self._accepted(arguments)

    def _accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if self.open_ended:
            return dict(arguments)
        return {name: value for name, value in arguments.items() if name in self.parameters}


@dataclass(frozen=True)
class RewardFunction(Signature):
    """A reward function that is called in this process."""

    call: Callable[..., Any]
    kwargs: Mapping[str, Any]
    """Arguments from the config."""

    def values(
        self,
        batch: PromptBatch,
        completions: Completions,
        step: int | None,
        failed: Failed | None = None,
        seed: Seed = (),
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Call the function on a batch.

        Args:
            batch: G prompts.
            completions: S responses.
            step: the training step, for TRL's `trainer_state.global_step`; None when there is none.
            failed: unused; functions in processes report a failure through it at once.
            seed: seed of its random numbers, together with the call's number.

        Returns:
            The returned values (verl's form: S items, with the exception of a call that raised as its item; otherwise
            the raw return value), and S dicts of extra fields that it logged.
        """
        extras: list[dict[str, Any]] = [{} for _ in range(len(completions))]
        calls = self.calls(batch, completions, step)
        if self.form == "verl":
            return self._each(calls, seed), extras
        environments = [getattr(outcome, "environment", None) for outcome in completions.outcomes]
        if self.form == "trl" and any(each is not None for each in environments):
            calls[0] |= self._accepted({ENVIRONMENTS: environments})
        try:
            with seeded(*seed, 0):
                return wait_for(self.start(calls[0], extras)), extras
        except BaseException as error:
            if isinstance(error, Exception) or not raised_by_user_code(error):
                raise
            raise Raised(type(error).__name__, error_text(error), source_line(error)) from error

    def per_sample(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Any]:
        """Call a function of verl's form per prompt and response; return values or exceptions."""
        return self._each([self.sample_call(prompt, text) for prompt, text in zip(prompts, texts, strict=True)], ())

    def start(self, arguments: Mapping[str, Any], extras: list[dict[str, Any]]) -> Any:
        """Call the function, with the config's arguments; the result of an async one must be awaited.

        The function gets copies: what it changes in them changes neither the data nor the arguments of other calls.

        Args:
            arguments: one of `calls`.
            extras: a dict per response, filled by the logging functions of TRL's form.
        """
        kwargs = own_copy(dict(self.kwargs))
        arguments = {name: value if name == ENVIRONMENTS else self._own(value) for name, value in arguments.items()}
        if self.form != "trl":
            return self.call(**arguments, **kwargs)

        def log_extra(column: str, values: Sequence[Any]) -> None:
            for extra, value in zip(extras, values, strict=True):
                extra[column] = value

        def log_metric(name: str, value: float) -> None:
            for extra in extras:  # the same for each sample, so that their mean is the metric
                extra[name] = value

        services = self._accepted({"log_extra": log_extra, "log_metric": log_metric})
        return self.call(**{**arguments, **services, **kwargs})

    def _own(self, value: Any) -> Any:
        """Return the copy of an argument; in TRL's form of each item, which the responses to a prompt share."""
        if self.form == "trl":
            return list(map(own_copy, value)) if isinstance(value, list) else value
        return own_copy(value)

    @property
    def prompt_check(self) -> PromptCheck | None:
        """Called with each prompt when data is read; it raises DataError for one that no response can be scored to."""
        return prompt_check(self.call, self.kwargs)

    def close(self) -> None:
        """Close a reward with state."""
        if hasattr(self.call, "close"):
            self.call.close()  # pyright: ignore[reportFunctionMemberAccess]

    def _each(self, calls: Sequence[Mapping[str, Any]], seed: Seed) -> list[Any]:
        def call_one(number: int, arguments: Mapping[str, Any]) -> Any:
            try:
                with seeded(*seed, number):
                    return self.start(arguments, [])
            except ConfigError:
                raise  # a wrong setting is not a failure of this sample
            except BaseException as error:  # a function that exits must not end the run
                if not raised_by_user_code(error):
                    raise
                return error

        results = [call_one(number, arguments) for number, arguments in enumerate(calls)]
        with seeded(*seed, CONCURRENT):
            return wait_for_all(results)


def wait_for(value: Any) -> Any:
    """Return a value, after awaiting it if it comes from an async function."""
    (result,) = wait_for_all([value])
    if isinstance(result, BaseException) and inspect.isawaitable(value):
        raise result
    return result


def wait_for_all(values: list[Any]) -> list[Any]:
    """Await all awaitables of a list concurrently; an exception replaces the value of one that raises."""
    awaitable = [number for number, value in enumerate(values) if inspect.isawaitable(value)]
    if not awaitable:
        return values
    values = list(values)
    results = run_outside_loops(lambda: _run_here([values[number] for number in awaitable]))
    for number, result in zip(awaitable, results, strict=True):
        if isinstance(result, ConfigError):
            raise result
        values[number] = result
    return values


async def _awaited(value: Awaitable[Any]) -> Any:
    """Return the result of an awaitable, or its exception: SystemExit in one task would end the loop of all."""
    try:
        return await value
    except BaseException as error:
        if not raised_by_user_code(error):
            raise
        return error


def _run_here(values: list[Awaitable[Any]]) -> list[Any]:
    results = run_concurrently([_awaited(value) for value in values])
    for value, result in zip(values, results, strict=True):
        if isinstance(result, Cancelled):
            getattr(value, "close", int)()  # it may never have begun
    return results


def run_concurrently(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutines in an event loop of their own; return their results, an exception in place of one that raises.

    What waits for the tasks is no task: a function could cancel it with all others.
    """
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        tasks = [loop.create_task(each) for each in coroutines]
        results = loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    return [Cancelled() if task.cancelled() else result for task, result in zip(tasks, results, strict=True)]
