"""Settings with the prompts, reward functions and models that were given to `Trainer` as objects."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hwgrpo.config import Config, load_config
from hwgrpo.config.load import is_given, to_tree, used_settings
from hwgrpo.config.recipe_files import settings_tree
from hwgrpo.config.validate import check_resume
from hwgrpo.data.given_rows import part_of
from hwgrpo.data.row_schema import missing_column
from hwgrpo.errors import ConfigError, shown
from hwgrpo.support.given_objects import ENVIRONMENT, PREFIX, TOOL, find_object, given, is_object, name_of

TRAIN, VALIDATION, EVALUATION = (f"{PREFIX}{name}" for name in ("train", "validation", "evaluation"))
MODEL, TOKENIZER = f"{PREFIX}model", f"{PREFIX}tokenizer"
NAME = re.compile(r"[A-Za-z_][\w-]*")


def load_given(
    config: Config | str | Path | Mapping[str, Any],
    overrides: Sequence[str],
    *,
    train_data: Any = None,
    validation_data: Any = None,
    rewards: Any = None,
    reward_weights: Sequence[float] | None = None,
    model: Any = None,
    tokenizer: Any = None,
    tools: Any = None,
    environments: Any = None,
) -> tuple[Config, dict[str, Any]]:
    """Return checked settings that name the given objects, and the objects by these names.

    Args:
        config: loaded settings, which stay as they are; a recipe; or a mapping with nested or dotted keys.
        overrides: `key=value` arguments.
        train_data, validation_data, rewards, reward_weights, model, tokenizer, tools, environments: as for `Trainer`.

    Raises:
        ConfigError, DataError: as `load_config` does; or an object cannot be used, or an override names another.
    """
    tree = given_tree(config) if isinstance(config, Config) else settings_tree(config)
    used_before = used_settings(tree)
    places = (
        ("data", "train", TRAIN, train_data),
        ("data", "validation", VALIDATION, validation_data),
        ("model", "path", MODEL, model),
        ("model", "tokenizer", TOKENIZER, tokenizer),
    )
    objects = {name: value for _, _, name, value in places if value is not None}
    for section, key, name, value in places:
        if value is not None:
            tree.setdefault(section, {})[key] = name
    if model is not None and getattr(model, "name_or_path", ""):  # where its tokenizer is, too
        tree["model"].setdefault("tokenizer", model.name_or_path)
    if rewards is not None:
        entries, functions = reward_entries(rewards)
        tree.setdefault("reward", {})["functions"] = entries
        objects |= functions
    for argument, prefix, listed in (("tools", TOOL, tools), ("environments", ENVIRONMENT, environments)):
        if listed is not None:
            entries, functions = reward_entries(listed, argument, prefix)
            rollout = tree.setdefault("rollout", {})
            rollout.setdefault("workflow", "tools" if environments is None else "environment")
            rollout.setdefault("agent", {})[argument] = entries
            objects |= functions
    if reward_weights is not None:
        _set_weights(tree.get("reward", {}).get("functions") or [], reward_weights)
    with given(objects):
        loaded = load_config(tree, overrides, imported=used_before)  # objects may make them unused, as overrides may
        check_resume(loaded)
        for section, key, name, value in places:
            if value is not None and (here := getattr(getattr(loaded, section), key)) != name:
                raise ConfigError(f"{section}.{key}={shown(here)} is set, and an object is given, too; give one")
        if model is not None and loaded.model.tokenizer is None:
            raise ConfigError(f"model={type(model).__name__} does not say where its tokenizer is; give tokenizer=, too")
        check_objects(loaded)
    return loaded, objects


def given_tree(config: Config) -> dict[str, Any]:
    """Return the settings of a configuration that were set, as plain containers that `load_config` reads."""
    return _given_of(config, to_tree(config), Config(), config, "")


def _given_of(config: Config, tree: Any, defaults: Any, section: Any, prefix: str) -> dict[str, Any]:
    result = {}
    for field in dataclasses.fields(section):
        key, value = prefix + field.name, getattr(section, field.name)
        default = getattr(defaults, field.name)
        if dataclasses.is_dataclass(value):
            inner = _given_of(config, tree[field.name], default, value, f"{key}.")
            if inner:
                result[field.name] = inner
        elif value != default or is_given(config, key):
            result[field.name] = tree[field.name]
    return result


def reward_entries(
    rewards: Any, argument: str = "rewards", prefix: str = PREFIX
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return entries of `reward.functions`, and the functions among them by the names there.

    Args:
        rewards: a function or a name; a mapping from names to functions; or a sequence of functions, names and entries
            as in `reward.functions`, whose `name` may be a function.
        argument: of `Trainer`, for messages; tools and environments have such entries, too.
        prefix: begins the names.

    Raises:
        ConfigError: one is neither, has no name, or has the name of another.
    """
    if isinstance(rewards, Mapping):
        listed: list[Any] = [{"name": function, "as": name} for name, function in rewards.items()]
    else:
        listed = list(rewards) if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]
    entries, objects = [], {}
    for number, item in enumerate(listed):
        key = f"{argument}[{number}]"
        entry = dict(item) if isinstance(item, Mapping) else {"name": item}
        function, alias = entry.get("name"), entry.pop("as", None)
        if callable(function):
            name = prefix + (_checked_name(alias, key) if alias is not None else _name_of(function, key))
            if objects.setdefault(name, function) is not function:
                raise ConfigError(
                    f"{key}: two functions have the name {name_of(name)!r}; name them by a mapping, "
                    f'e.g. {argument}={{"short": f, "long": g}}'
                )
            entry["name"] = name
        elif not isinstance(function, str):
            raise ConfigError(
                f"{key}={shown(function)} is neither a function nor a name; give a callable, a registered name, or "
                "path/to/file.py:function"
            )
        entries.append(entry)
    return entries, objects


def check_objects(config: Config) -> None:
    """Check that given rows have prompts, and that given functions are rewards that this process can call.

    Call it in `given`.

    Raises:
        ConfigError, DataError: they are not; the message has the remedy.
    """
    for key, spec in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        if isinstance(spec, str) and is_object(spec):
            check_prompts(find_object(spec, key), spec, key, config)
    for i, entry in enumerate(config.reward.functions):
        key = f"reward.functions[{i}]"
        if is_object(entry.name):
            check_function(find_object(entry.name, key), name_of(entry.name), key)
            if entry.timeout is not None or entry.workers:
                setting = f"timeout={entry.timeout}" if entry.timeout is not None else f"workers={entry.workers}"
                raise ConfigError(
                    f"{key}.{setting}: {name_of(entry.name)} is a Python object, which a process of its own cannot "
                    f"load; put the function into a file and name it path/to/file.py:{name_of(entry.name)}, or leave "
                    "timeout and workers out"
                )


def check_prompts(rows: Any, name: str, key: str, config: Config) -> None:
    """Raise `DataError` if an object is no sequence of rows with a prompt."""
    part = part_of(rows, name, key)
    if config.rollout.agent.environments:  # which may give the prompts
        return
    if config.data.prompt_key not in part.columns:
        raise missing_column("data.prompt_key", config.data.prompt_key, part.columns, name)


def check_function(function: Callable[..., Any], name: str, key: str) -> None:
    """Raise `ConfigError` if the signature of a function is none of a reward's; a class is checked when it is made."""
    from hwgrpo.rewards.signatures import SIGNATURES, form_of

    if inspect.isclass(function):
        return
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # many built-in functions have none
        raise ConfigError(f"{key}: {name} has no signature that Python can read; {SIGNATURES}") from error
    form_of(name, set(parameters), key)


def _name_of(function: Any, key: str) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    if name == "<lambda>":
        argument = key.partition("[")[0]
        raise ConfigError(f'{key} is a lambda, which has no name; give it one by a mapping: {argument}={{"name": ...}}')
    return _checked_name(name, key)


def _checked_name(name: Any, key: str) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"{key}: the name {shown(name)} is used in metrics and must be letters, digits, _ and -, not beginning "
            "with a digit; give another by a mapping from names to functions"
        )
    return name


def _set_weights(entries: list[Any], weights: Sequence[float]) -> None:
    if len(entries) != len(weights):
        raise ConfigError(f"reward_weights has {len(weights)} weights for {len(entries)} functions; give one each")
    for entry, weight in zip(entries, weights, strict=True):
        entry["weight"] = weight
