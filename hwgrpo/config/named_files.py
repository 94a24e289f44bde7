"""Files that settings name: functions of the user's own, and the absolute paths of all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hwgrpo.catalog import VERIFYING_REWARDS


class FunctionSetting(NamedTuple):
    """A setting that may name a function in a file, `path/to/file.py:function`."""

    key: str
    name: str
    """Its value; "" for None."""
    set: Callable[[str], None]
    """Gives the setting another value."""


def function_settings(config: Any) -> Iterator[FunctionSetting]:
    """Yield each setting that may name a function in a file.

    Args:
        config: the settings (`Config`).
    """
    algorithm, rollout = config.algorithm, config.rollout
    for i, function in enumerate(config.reward.functions):
        yield FunctionSetting(f"reward.functions.{i}.name", function.name, partial(setattr, function, "name"))
        if (verifier := verifier_of(function)) is not None:
            key = f"reward.functions.{i}.kwargs.verifier"
            yield FunctionSetting(key, verifier, partial(function.kwargs.__setitem__, "verifier"))
    agent = {"tools": rollout.agent.tools, "environments": rollout.agent.environments}
    for place, entries in agent.items():
        for i, entry in enumerate(entries):
            yield FunctionSetting(f"rollout.agent.{place}.{i}.name", entry.name, partial(setattr, entry, "name"))
    for place, section, name in (
        ("algorithm.advantage", algorithm.advantage, "name"),
        ("algorithm.loss", algorithm.loss, "name"),
        ("algorithm.kl", algorithm.kl, "estimator"),
        ("algorithm.correction", algorithm.correction, "name"),
        ("algorithm.process", algorithm.process, "function"),
        ("rollout", rollout, "source"),
        ("rollout", rollout, "workflow"),
    ):
        yield FunctionSetting(f"{place}.{name}", getattr(section, name) or "", partial(setattr, section, name))
    for key, names in (
        ("observe.loggers", config.observe.loggers),
        ("observe.metrics", config.observe.metrics),
        ("trainer.stages", config.trainer.stages),
        ("plugins", config.plugins),
    ):
        for i, name in enumerate(names):
            yield FunctionSetting(f"{key}.{i}", name, partial(names.__setitem__, i))


def verifier_of(function: Any) -> str | None:
    """Return the name of the reward that a reward calls; None if it calls none.

    Args:
        function: settings of a reward (`RewardFunctionConfig`).
    """
    verifier = function.kwargs.get("verifier") if function.name in VERIFYING_REWARDS else None
    return verifier if isinstance(verifier, str) else None


def with_absolute_paths(config: Any) -> Any:
    """Return a copy of the settings in which files and folders are absolute: a reward may change the directory.

    Prompts are left as they are: they are read before any reward is.

    Args:
        config: checked settings (`Config`).
    """
    config = copy.deepcopy(config)
    trainer, model, server = config.trainer, config.model, config.rollout.server
    trainer.output_dir = str(Path(trainer.output_dir).absolute())
    for section, name in (
        (trainer.deepspeed, "config"),
        (model, "path"),
        (model, "tokenizer"),
        (model, "chat_template"),
        (model.lora, "adapter"),
        (server, "weights_dir"),
    ):
        setattr(section, name, _absolute(getattr(section, name)))
    if "/" in (server.python or ""):  # a bare name is looked up in PATH
        server.python = _absolute(server.python)
    for setting in function_settings(config):
        if ".py" in setting.name:
            setting.set(with_absolute_file(setting.name))
    return config


def with_absolute_file(name: str) -> str:
    """Return a function's name with the absolute path of its file, where it has one."""
    if ".py" not in name:
        return name
    file, colon, function = name.rpartition(":")
    return f"{_absolute(file)}:{function}" if colon else str(_absolute(name))


def _absolute(path: str | None) -> str | None:
    """Return the absolute path of an existing file or folder; a hub name, another name or None unchanged."""
    if path is None or not Path(path).expanduser().exists():
        return path
    return str(Path(path).expanduser().absolute())
