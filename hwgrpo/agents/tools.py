"""The tools that settings name: `rollout.agent.tools`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from hwgrpo.agents.action import Tool
from hwgrpo.agents.given_tools import GivenTool
from hwgrpo.agents.thread_tool import ThreadTool
from hwgrpo.agents.tool_processes import ProcessTool
from hwgrpo.agents.tool_schema import make_schema
from hwgrpo.catalog import TOOLS
from hwgrpo.config.schema import ToolConfig
from hwgrpo.errors import ConfigError, choice_error
from hwgrpo.rewards.signatures import make_instance
from hwgrpo.support.given_objects import find_object, is_object, name_of
from hwgrpo.user_code import FORM, names_a_file

KEY = "rollout.agent.tools"


def load_tools(configs: Sequence[ToolConfig], *, folder: str, sandbox_level: str = "auto") -> list[Tool]:
    """Return the tools of a run; the caller closes them.

    Args:
        configs: their settings.
        folder: working directory of their processes, from which relative paths start.
        sandbox_level: `reward.sandbox.level`, for tools with such an argument that `kwargs` do not set.

    Raises:
        ConfigError: one cannot be loaded, or two have the same name; none is left open.
    """
    tools: list[Tool] = []
    try:
        for number, config in enumerate(configs):
            tool = _load(config, f"{KEY}.{number}", folder, sandbox_level)
            tools.append(tool)
            same = next(i for i, each in enumerate(tools) if each.name == tool.name)
            if same < number:
                raise ConfigError(
                    f"{KEY}.{same}.name={configs[same].name!r} and {KEY}.{number}.name={config.name!r} are both called "
                    f"{tool.name!r} by the model: rename one of the functions"
                )
    except BaseException:
        close_tools(tools)
        raise
    return tools


def close_tools(tools: Sequence[Tool]) -> None:
    """Close tools, all of them also where one raises."""
    if tools:
        try:
            tools[0].close()
        finally:
            close_tools(tools[1:])


def _load(config: ToolConfig, key: str, folder: str, sandbox_level: str) -> Tool:
    kwargs: Any = OmegaConf.to_container(config.kwargs) if OmegaConf.is_config(config.kwargs) else config.kwargs
    options: Mapping[str, Any] = {"key": key, "max_chars": config.max_chars, "truncate": config.truncate}
    if is_object(config.name):
        function = find_object(config.name, f"{key}.name")
        schema = make_schema(function, kwargs, key, name_of(config.name))
        limits: Mapping[str, Any] = {"max_chars": config.max_chars, "truncate": config.truncate}
        return GivenTool(function, schema, kwargs, timeout=config.timeout, workers=config.workers, **limits)
    if names_a_file(config.name):
        return ProcessTool(
            config.name, kwargs, timeout=config.timeout, workers=config.workers, folder=folder, **options
        )
    if config.name not in TOOLS:
        raise ConfigError(
            f"{choice_error(f'{key}.name', config.name, TOOLS.names())} A function of your own is named {FORM}."
        )
    made = TOOLS.load(config.name)
    if not inspect.isclass(made):
        raise ConfigError(f"{key}.name={config.name!r} is registered as {made!r}; register a class with `run`, `close`")
    given = {"timeout": config.timeout, "workers": config.workers, "folder": folder, "key": key}
    level = {} if "sandbox_level" in kwargs else {"sandbox_level": sandbox_level}
    registered = make_instance(made, config.name, kwargs, given | level, key)
    return ThreadTool(config.name, registered, workers=config.workers, **options)
