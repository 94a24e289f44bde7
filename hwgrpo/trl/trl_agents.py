"""`tools` and `environment_factory` of a TRL script -> an environment of hwgrpo."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hwgrpo.agents.action import Action, StepResult, ToolCall, ToolResult
from hwgrpo.agents.background_loop import background_loop, run_in_background
from hwgrpo.agents.call_formats import UntypedText, detect_call_format
from hwgrpo.agents.given_tools import GivenTool
from hwgrpo.agents.result_blocks import Block, as_content, has_blocks, read_blocks
from hwgrpo.agents.tool_schema import typed_arguments
from hwgrpo.errors import ConfigError, choice_error, error_text, shown

LONGEST_CALL = 600.0
"""Seconds that TRL's tools may take here; TRL itself has no limit."""
LONGEST_RESULT = 10**9
_RESERVED = ("reset", "get_reward")
_TOOLS = "tools"
"""Name of the environment of a script with tools alone."""


class TrlEpisode:
    """The environment of a trajectory: the tools, and an instance of `environment_factory`, if there is one.

    Args:
        instance: has `reset`, and methods that the policy calls; None: tools alone.
        tools: name -> function.
        schemas: JSON schemas of tools and methods.
        chosen: whether the column `environment` has chosen it, which `reset` then does not get.
    """

    def __init__(
        self, instance: Any, tools: Mapping[str, GivenTool], schemas: Sequence[Mapping[str, Any]], *, chosen: bool
    ) -> None:
        self.for_rewards, self.tools = instance, list(schemas)
        self._tools, self._chosen = tools, chosen
        self._schemas = {schema["function"]["name"]: schema for schema in schemas}
        self._methods = {} if instance is None else dict(methods_of(instance))

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Begin an episode; return messages with what the instance adds to the prompt, as TRL appends it."""
        if self.for_rewards is None:
            return None
        columns = {name: value for name, value in row.items() if not (self._chosen and name == "environment")}
        opening = self.for_rewards.reset(**columns)
        if inspect.isawaitable(opening):
            opening = run_in_background(_awaited(opening))
        if opening is not None and not isinstance(opening, str):
            raise TypeError(f"reset returned {shown(opening)}; text or None is supported, and no images")
        prompt = row.get("prompt")
        if opening is None or prompt is None:
            return opening
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt + opening}]
        *before, last = prompt
        return [*before, {**last, "content": last["content"] + opening}]

    async def step(self, action: Action) -> StepResult:
        """Answer the calls of a turn; a turn without calls ends the episode."""
        if not action.calls or action.last:
            return StepResult("", done=not action.calls)
        waiting: dict[int, asyncio.Task[tuple[str, ToolResult]]] = {}
        results: dict[int, tuple[str, ToolResult]] = {}
        for number, call in enumerate(action.calls):  # as TRL: one after another, but coroutines at the same time
            if inspect.iscoroutinefunction(self._methods.get(call.name)):
                waiting[number] = asyncio.create_task(self._called(call))
            else:
                results[number] = await self._called(call)
        for number, task in waiting.items():
            results[number] = await task
        ordered = [results[number] for number in range(len(action.calls))]
        messages = [{"role": "tool", "name": name, "content": result.content} for name, result in ordered]
        return StepResult(messages, results=tuple(ordered))

    async def _called(self, call: ToolCall) -> tuple[str, ToolResult]:
        started, kind = time.monotonic(), "error"
        try:
            arguments = call.arguments
            if any(isinstance(value, UntypedText) for value in arguments.values()) and call.name in self._schemas:
                arguments = typed_arguments(self._schemas[call.name], arguments)
            if call.name in self._methods:
                value = self._methods[call.name](**arguments)
                if inspect.isawaitable(value):
                    value = await asyncio.wrap_future(
                        asyncio.run_coroutine_threadsafe(_awaited(value), background_loop())
                    )
            elif call.name in self._tools:
                value = await self._tools[call.name].run(arguments)
            else:
                kind = "unknown"
                raise ValueError(f"Tool {call.name} not found.")
            text, blocks = result_parts(value)
            kind = ""
        except Exception as error:
            text, blocks = str({"error": error_text(error)}), []
        return call.name, ToolResult(text, kind, time.monotonic() - started, blocks=blocks)


class Agents:
    """The tools and environments of a script.

    Args:
        tools: functions, or None.
        environment_factory: makes an environment; or name -> what makes one; or None.

    Raises:
        ConfigError: a function has no schema, an environment no `reset`, or two have the same name.
    """

    def __init__(self, tools: Any, environment_factory: Any) -> None:
        self._tools = _functions(tools)
        self._by_name = isinstance(environment_factory, Mapping)
        self._free: dict[str, list[Any]] = {}
        """Environment -> instances that no run has yet."""
        self.environments: dict[str, Callable[[], TrlEpisode]] = {}
        """Name -> what makes the environment here, for `hwgrpo.Trainer`."""
        self.rewards: list[Callable[..., Any]] = []
        """A reward function per class with `get_reward`, named after it."""
        schemas = [tool.schema for tool in self._tools.values()]
        if environment_factory is None:
            self.environments[_TOOLS] = lambda: TrlEpisode(None, self._tools, schemas, chosen=False)
            return
        factories = environment_factory if self._by_name else {None: environment_factory}
        if not factories:
            raise ConfigError("environment_factory={} has no environments; give one, or leave it out")
        rewarded: list[type] = []
        for given, factory in factories.items():
            argument = "environment_factory" if given is None else f"environment_factory[{given!r}]"
            instance = _made(factory, argument)
            own = [schema_of(each, f"{argument}.{name}") for name, each in methods_of(instance)]
            both = [name for name, _ in methods_of(instance) if name in self._tools]
            if both:
                raise ConfigError(
                    f"tools and {argument} both have {both[0]!r}, and the model calls by name; rename one of them"
                )
            name = type(instance).__name__ if given is None else str(given)
            self._free[name] = [instance]
            self.environments[name] = self._maker(name, factory, argument, [*schemas, *own], type(instance))
            if hasattr(instance, "get_reward") and type(instance) not in rewarded:
                rewarded.append(type(instance))
                self.rewards.append(environment_reward(type(instance)))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run."""
        return {"rollout.workflow": "environment", "rollout.agent.turn_timeout": LONGEST_CALL}

    @property
    def has_environments(self) -> bool:
        """Whether there are instances, which reward functions may read."""
        return bool(self._free)

    def check_rows(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """Check that each row names its environment, where there are several.

        Raises:
            ConfigError: it does not.
        """
        if not self._by_name:
            return
        for number, row in enumerate(rows):
            if row.get("environment") not in self.environments:
                place = f"{name}, row {number}: environment"
                if "environment" not in row:
                    raise ConfigError(f"{place} is missing: with several environments each row names its own")
                raise choice_error(place, row["environment"], self.environments)

    def open(self, row: Mapping[str, Any]) -> tuple[Any, list[Mapping[str, Any]]]:
        """Return the prompt and the tools of a row, of an instance that is reset for it."""
        names = list(self.environments)
        name = str(row.get("environment")) if self._by_name else names[0]
        episode = self.environments[name]()
        try:
            opening = episode.reset(row)
        finally:
            if episode.for_rewards is not None:
                self._free[name].append(episode.for_rewards)
        prompt = row.get("prompt") if opening is None else opening
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return messages, episode.tools

    def check_template(self, tokenizer: Any) -> None:
        """Check that a chat template has tool calls and results.

        Raises:
            ConfigError: it has not.
        """
        template, remedy = getattr(tokenizer, "chat_template", None), "give the tokenizer of a model that calls tools"
        if template is None:
            raise ConfigError(f"processing_class has no chat template, which tools need; {remedy}")
        if not isinstance(template, str):
            return
        if detect_call_format(template) is None:
            raise ConfigError(f"processing_class: its chat template does not show how the model calls tools; {remedy}")
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        conversation = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": [call]},
            {"role": "tool", "name": "f", "content": "the result"},
        ]
        try:
            text = tokenizer.apply_chat_template(conversation, tokenize=False)
        except Exception as error:
            text = error_text(error)
        if "the result" not in text:
            raise ConfigError(f"processing_class: its chat template has no role for results of tools; {remedy}")

    def _maker(
        self, name: str, factory: Callable[[], Any], argument: str, schemas: list[Any], kind: type
    ) -> Callable[[], TrlEpisode]:
        def make() -> TrlEpisode:
            try:
                instance = self._free[name].pop()  # instances are made in threads: none asks first whether one is free
            except IndexError:
                instance = _made(factory, argument)
            return TrlEpisode(instance, self._tools, schemas, chosen=self._by_name)

        make.__wrapped__ = kind  # type: ignore[attr-defined]  # whose source a run keeps, and compares on resume
        return make


def methods_of(instance: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and method of each tool of an environment: all public ones but `reset` and `get_reward`."""
    for name, method in inspect.getmembers(instance, predicate=inspect.ismethod):
        if name not in _RESERVED and not name.startswith("_"):
            yield name, method


def environment_reward(kind: type) -> Callable[..., Any]:
    """Return the reward function of a class of environments; instances of others get None."""

    def get_reward(environments: Sequence[Any] | None = None, completions: Sequence[Any] = ()) -> list[Any]:
        own = [each if type(each) is kind else None for each in environments or [None] * len(completions)]
        values = [None if each is None else each.get_reward() for each in own]
        if any(inspect.isawaitable(value) for value in values):
            return run_in_background(_gathered(values))
        return values

    get_reward.__name__ = kind.__name__
    return get_reward


def result_parts(value: Any) -> tuple[str, list[Block]]:
    """Return what a tool returned as the model reads it: text, or blocks where it has images.

    Raises:
        DataError: a block is neither text nor an image.
    """
    blocks = isinstance(value, list) and value and all(isinstance(each, dict) and "type" in each for each in value)
    if not blocks and not has_blocks(value):
        return str(value), []
    content = as_content(read_blocks(value))
    return (content, []) if isinstance(content, str) else ("", content)


def schema_of(function: Any, key: str) -> dict[str, Any]:
    """Return a function's JSON schema, as TRL shows it: by `transformers.utils.get_json_schema`.

    Args:
        function: a function or a bound method.
        key: the argument, for messages.

    Raises:
        ConfigError: it is no function, or lacks type hints or a docstring.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    name = getattr(function, "__name__", None)
    if not callable(function) or not isinstance(name, str) or name == "<lambda>":
        raise ConfigError(f"{key}={shown(function)} is no function with a name; give one written with def")
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    variadic = [each.name for each in inspect.signature(function).parameters.values() if each.kind in open_ended]
    if variadic:
        raise ConfigError(f"{key}: {name} takes *{variadic[0]}, which no schema can have; name its arguments")
    try:
        return get_json_schema(function)
    except Exception as error:
        raise ConfigError(
            f"{key}: {name} has no JSON schema: {error_text(error)} Give each argument a type hint, and the function a "
            "docstring that says what it does, with a line per argument below Args:"
        ) from error


def _functions(tools: Any) -> dict[str, GivenTool]:
    """Return the tools by name."""
    if tools is not None and not isinstance(tools, list | tuple):
        raise ConfigError(f"tools={shown(tools)} must be a list of functions")
    named: dict[str, GivenTool] = {}
    for number, function in enumerate(tools or ()):
        schema = schema_of(function, f"tools[{number}]")
        tool = GivenTool(function, schema, timeout=LONGEST_CALL, workers=1, max_chars=LONGEST_RESULT, truncate="middle")
        if tool.name in named:
            raise ConfigError(f"tools[{number}]: two tools have the name {tool.name!r}; rename one of the functions")
        named[tool.name] = tool
    return named


def _made(factory: Any, argument: str) -> Any:
    if not callable(factory):
        raise ConfigError(f"{argument}={shown(factory)} must be a class, or a function that makes an environment")
    try:
        instance = factory()
    except Exception as error:
        raise ConfigError(f"{argument}() failed, which is called without arguments: {error_text(error)}") from error
    if not callable(getattr(instance, "reset", None)):
        raise ConfigError(
            f"{argument}() made {shown(instance)}, which has no reset(self, **row); an environment is reset for each "
            "response"
        )
    return instance


async def _awaited(value: Any) -> Any:
    return await value


async def _gathered(values: Sequence[Any]) -> list[Any]:
    """Return values, awaited where they can be, at the same time."""
    waiting = [number for number, value in enumerate(values) if inspect.isawaitable(value)]
    done = await asyncio.gather(*(values[number] for number in waiting))
    by_number = dict(zip(waiting, done, strict=True))
    return [by_number.get(number, value) for number, value in enumerate(values)]
