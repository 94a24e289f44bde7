"""The environment `verl_tools`: tools of verl's tool files, as `rollout.agent.environments` of an imported run.

A tool of `tool_config` has an instance per trajectory: `create` at its first call, `execute` per call, `calc_reward`
and `release` at the end. A function of `function_tools` has none. All run in one event loop, as in verl.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hwgrpo.agents.action import Action, StepResult, ToolCall, ToolResult
from hwgrpo.agents.background_loop import run_in_background
from hwgrpo.agents.result_blocks import Block, merge_texts, read_blocks, text_block
from hwgrpo.agents.tool_results import shorten
from hwgrpo.agents.tool_schema import MalformedCall, make_schema, typed_arguments
from hwgrpo.errors import ConfigError, error_text, shown
from hwgrpo.migrate.verl_modules import MODULES, TOOL, has_verl, verl_modules
from hwgrpo.support.launched_ranks import launched_rank
from hwgrpo.user_code import import_file

KEY = "verl_tools"
SIDES = ("left", "middle", "right")


@dataclass(frozen=True)
class VerlTool:
    """A tool of a tool file."""

    name: str
    schema: Mapping[str, Any]
    tool: Any = None
    """A `BaseTool`; None: it is a function."""
    function: Callable[..., Any] | None = None


class VerlTools:
    """Tools of verl, and the instances of one trajectory.

    Args:
        tool_config: verl's `multi_turn.tool_config_path`, a YAML file of classes.
        function_tools: verl's `multi_turn.function_tool_path`, a Python file of functions with `@function_tool`.
        max_parallel_calls: calls of a turn that are made; further ones are left out, as in verl.
        max_tool_response_length: characters of a result.
        tool_response_truncate_side: side of a longer one that is left out.
        timeout: seconds per call.

    Raises:
        ConfigError: a file cannot be loaded, or two tools have the same name.
    """

    def __init__(
        self,
        tool_config: str | None = None,
        function_tools: str | None = None,
        max_parallel_calls: int = 1,
        max_tool_response_length: int = 256,
        tool_response_truncate_side: str = "middle",
        timeout: float = 30.0,
    ) -> None:
        if tool_response_truncate_side not in SIDES:
            raise ConfigError(f"tool_response_truncate_side={tool_response_truncate_side!r}: one of {', '.join(SIDES)}")
        self._all = load_tools(tool_config, function_tools)
        self._most, self._length, self._side = max_parallel_calls, max_tool_response_length, tool_response_truncate_side
        self._timeout = timeout
        self._ids: dict[str, Any] = {}
        """Tool -> id of its instance in this trajectory."""
        self._choose({})

    def reset(self, row: Mapping[str, Any]) -> None:
        """Begin a trajectory; `extra_info` of the row may have `tools_kwargs` and `tool_selection`."""
        run_in_background(self._release())  # of a trajectory that failed
        self._choose(row)

    def step(self, action: Action) -> StepResult:
        """Answer the calls of a turn; a turn without calls ends the trajectory."""
        if not action.calls or action.last:
            return StepResult("", done=not action.calls)
        results = run_in_background(self._results(action.calls[: self._most]))
        return StepResult(
            [{"role": "tool", "content": result.content} for _, result in results],
            reward=sum(result.reward for _, result in results),
            results=tuple(results),
        )

    def finish(self) -> float:
        """Return the rewards of the trajectory's instances, and release them."""
        return run_in_background(self._finish())

    def _choose(self, row: Mapping[str, Any]) -> None:
        info = row.get("extra_info")
        extra = info if isinstance(info, Mapping) else {}
        given = extra.get("tools_kwargs") or row.get("tools_kwargs") or {}
        self._kwargs = {name: each for name, each in given.items() if each}  # parquet writes None for missing ones
        selected = extra.get("tool_selection")
        names = [name for name in selected if name in self._all] if selected else list(self._all)
        self._tools = {name: self._all[name] for name in names}
        self.tools = [tool.schema for tool in self._tools.values()]
        self._data = SimpleNamespace(
            messages=list(row.get("prompt") or ()), tools_kwargs=self._kwargs, extra_fields={}, metrics={}
        )

    async def _results(self, calls: tuple[ToolCall, ...]) -> list[tuple[str, ToolResult]]:
        for name in dict.fromkeys(call.name for call in calls if call.name in self._tools):
            tool = self._tools[name].tool
            if tool is not None and name not in self._ids:
                try:
                    self._ids[name] = await self._create(name, tool)
                except Exception:  # the call says so
                    continue
        return list(await asyncio.gather(*map(self._result, calls)))

    async def _create(self, name: str, tool: Any) -> Any:
        given = self._kwargs.get(name, {}).get("create_kwargs") or {}
        made = await asyncio.wait_for(
            tool.create(**_accepted(tool.create, {**given, "create_kwargs": given})), self._timeout
        )
        return made[0] if isinstance(made, tuple) else made

    async def _result(self, call: ToolCall) -> tuple[str, ToolResult]:
        started, failure, reward, images = time.monotonic(), "error", 0.0, []
        try:
            value, reward = await asyncio.wait_for(self._called(call), self._timeout)
            text, images = text_of(value), images_of(value)
            failure = ""
        except MalformedCall as error:
            text, failure = f"Error: {error}", "malformed"
        except KeyError as error:
            if call.name in self._tools:
                text = f"Error: {call.name}: KeyError: {error_text(error)}"
            else:
                known = ", ".join(self._tools)
                text, failure = f"Error: there is no tool {call.name!r}; the tools are: {known}", "unknown"
        except TimeoutError:
            text, failure = f"Error: {call.name} took longer than {self._timeout:g} s", "timeout"
        except Exception as error:
            text = f"Error: {call.name}: {type(error).__name__}: {error_text(error)}"
        text, seconds = shorten(text, self._length, self._side), time.monotonic() - started
        if not images:
            return call.name, ToolResult(text, failure, seconds, reward)
        return call.name, ToolResult("", failure, seconds, reward, merge_texts([*images, text_block(text)]))

    async def _called(self, call: ToolCall) -> tuple[Any, float]:
        """Return what a tool returned, and its reward."""
        tool = self._tools[call.name]
        if tool.function is not None:
            arguments = typed_arguments(tool.schema, call.arguments)
            if inspect.iscoroutinefunction(tool.function):
                value = await tool.function(**arguments)
            else:
                value = await asyncio.to_thread(tool.function, **arguments)
        else:
            if call.name not in self._ids:  # create failed: once more, for its message
                self._ids[call.name] = await self._create(call.name, tool.tool)
            own = self._kwargs.get(call.name, {}).get("execute_kwargs") or {}
            more = _accepted(tool.tool.execute, {**own, "agent_data": self._data})
            value = await tool.tool.execute(self._ids[call.name], dict(call.arguments), **more)
        parts = value if isinstance(value, tuple) else (value,)
        reward = 0.0 if len(parts) < 2 or parts[1] is None else float(parts[1])
        if not math.isfinite(reward):
            raise ValueError(f"the reward {reward} is no finite number")
        return parts[0] if parts else "", reward

    async def _finish(self) -> float:
        rewards = []
        try:
            for name, instance in self._ids.items():
                tool, own = self._tools[name].tool, self._kwargs.get(name, {}).get("calc_reward_kwargs") or {}
                rewards.append(float(await tool.calc_reward(instance, **_accepted(tool.calc_reward, own)) or 0.0))
        finally:
            await self._release()
        return sum(rewards)

    async def _release(self) -> None:
        ids, self._ids = self._ids, {}
        for name, instance in ids.items():
            tool, own = self._all[name].tool, self._kwargs.get(name, {}).get("release_kwargs") or {}
            await tool.release(instance, **_accepted(tool.release, own))


def text_of(value: Any) -> str:
    """Return what a tool returned as text, without its images.

    Raises:
        ValueError: it has videos.
    """
    if isinstance(value, str):
        return value
    if hasattr(value, "text"):
        if getattr(value, "video", None):
            raise ValueError("results with videos are not supported")
        return value.text or ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def images_of(value: Any) -> list[Block]:
    """Return the images of a `ToolResponse`, which stand before its text, as in verl.

    Raises:
        DataError: one cannot be read.
    """
    images = getattr(value, "image", None) if hasattr(value, "text") else None
    listed = images if isinstance(images, list | tuple) else [images]
    return read_blocks([{"type": "image", "image": each} for each in listed if each is not None])


@functools.cache
def load_tools(tool_config: str | None, function_tools: str | None) -> dict[str, VerlTool]:
    """Return the tools of both files by name; they are loaded once in a process.

    Raises:
        ConfigError: there are none, a file cannot be loaded, or two tools have the same name.
    """
    tools: dict[str, VerlTool] = {}
    listed = [*(_classes(tool_config) if tool_config else ()), *(_marked(function_tools) if function_tools else ())]
    if not listed:
        raise ConfigError(f"{KEY} has no tools; set kwargs.tool_config or kwargs.function_tools")
    for tool in listed:
        if tool.name in tools:
            raise ConfigError(
                f"{KEY}: two tools of {' and '.join(filter(None, (tool_config, function_tools)))} are called "
                f"{tool.name!r} by the model; rename one of them"
            )
        tools[tool.name] = tool
    return tools


def _classes(file: str) -> Iterator[VerlTool]:
    """Yield the tools of a YAML file."""
    place = f"{KEY}: tool_config={shown(file)}"
    try:
        content = OmegaConf.to_container(OmegaConf.load(Path(file).expanduser()), resolve=True)
    except (OSError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(f"{place} cannot be read: {error_text(error)}") from error
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f"{place} has no list `tools` of classes, each with class_name, config and tool_schema")
    with _loading(place, Path(file)) as at:
        for number, entry in enumerate(entries):
            each = f"{place}: tools[{number}]"
            if not isinstance(entry, dict) or "." not in str(entry.get("class_name", "")):
                raise ConfigError(f"{each} has no class_name of the form module.Class")
            config = entry.get("config") or {}
            if config.get("type", "native") != "native":
                raise ConfigError(f"{each}.config.type={shown(config['type'])} is not supported; native is")
            at[0] = f"{each}.class_name={entry['class_name']}"
            yield _tool(entry["class_name"], config, entry.get("tool_schema"))


def _tool(class_name: str, config: Mapping[str, Any], schema: Mapping[str, Any] | None) -> VerlTool:
    module, _, name = class_name.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    if schema is not None:
        schema = importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema.model_validate(schema)
    tool = kind(config=config, tool_schema=schema)
    dumped = tool.get_openai_tool_schema().model_dump(exclude_unset=True, exclude_none=True)
    return VerlTool(dumped["function"]["name"], dumped, tool)


def _marked(file: str) -> Iterator[VerlTool]:
    """Yield the functions with `@function_tool` of a Python file."""
    place = f"{KEY}: function_tools={shown(file)}"
    path = Path(file).expanduser().resolve()
    with _IMPORTING:  # while another thread imports, its stand-ins can be found
        installed = has_verl()
    if not path.is_file():
        raise ConfigError(f"{place}: there is no such file")
    with _loading(place, path):
        if installed:
            loaded = importlib.import_module("verl.tools.function_tool").load_function_tools_from_path(str(path))
            found = [
                VerlTool(each.name, each.tool_schema.model_dump(exclude_unset=True, exclude_none=True), None, each.fn)
                for each in loaded
            ]
        else:
            module = import_file(path, place)
            marked = {id(each): each for each in vars(module).values() if hasattr(each, TOOL)}
            found = [_function(each, getattr(each, TOOL), place) for each in marked.values()]
    if not found:
        raise ConfigError(f"{place} has no function with @function_tool")
    yield from found


def _function(function: Callable[..., Any], marked: Mapping[str, Any], place: str) -> VerlTool:
    name = marked["name"]
    return VerlTool(name, marked["schema"] or make_schema(function, {}, place, name), None, function)


_IMPORTING = threading.RLock()
"""Environments are made in threads, and what an import finds is the process's."""


@contextmanager
def _loading(place: str, file: Path) -> Iterator[list[str]]:
    """Import with the working directory and the file's folder first, and with stand-ins of verl.

    It yields a list of one text: what is loaded, for messages, which the body may change.
    """
    at = [place]
    folders = [str(Path.cwd()), str(file.resolve().parent)]
    with _IMPORTING:
        sys.path[:0] = folders
        try:
            with verl_modules() as stand_ins:
                yield at
        except ConfigError:
            raise
        except ModuleNotFoundError as error:
            remedy = (
                f"install verl: only {', '.join(name for name in MODULES if name.count('.') == 2)} have stand-ins"
                if (error.name or "").partition(".")[0] == "verl"
                else f"start in the folder where it can be imported, or install it; looked in {', '.join(folders)}"
            )
            raise ConfigError(f"{at[0]}: there is no module {error.name!r}; {remedy}") from error
        except Exception as error:
            raise ConfigError(f"{at[0]} cannot be loaded: {type(error).__name__}: {error_text(error)}") from error
        finally:
            for folder in folders:
                sys.path.remove(folder)
    used = [each for each in stand_ins if each.count(".") == 2]
    if used and launched_rank().rank == 0:
        print(f"hwgrpo: note: {place}: verl is not installed; stand-ins of {', '.join(used)}", file=sys.stderr)


def _accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function has a parameter for."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}
