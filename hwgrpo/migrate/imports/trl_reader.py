"""A YAML file of `trl grpo`, `key=value` settings, or the fields of a GRPOConfig -> the settings of a TRL run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hwgrpo.config.yaml_text import read_yaml
from hwgrpo.errors import ConfigError
from hwgrpo.migrate.imports.input_text import text_of
from hwgrpo.migrate.imports.peer_settings import fill, typed
from hwgrpo.migrate.imports.trl_settings import TrlSettings
from hwgrpo.migrate.tables.trl_names import TRL


def read_trl(
    file: str | None, arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[TrlSettings, list[str]]:
    """Return the settings of a TRL run, and notices about what was read.

    Args:
        file: a YAML file of `trl grpo --config`, or `-` for one on standard input; None: arguments alone.
        arguments: `key=value`, or `--key=value`.
        environment: variables; WORLD_SIZE and those of `accelerate launch` count.

    Raises:
        ConfigError: the file is missing or no mapping; an unknown key; an illegal value.
    """
    values: dict[str, Any] = {}
    notices = []
    if file is not None:
        values = _of_file(file)
        if "env" in values:
            notices.append("env: variables of the environment are not set by a recipe; export them")
            values.pop("env")
    for argument in arguments:
        key, equals, text = argument.removeprefix("--").partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is not a setting; write key=value, e.g. num_generations=8")
        values[key] = read_yaml(text, argument, None)
    return trl_settings(values, environment), notices


def trl_settings(
    values: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    prompts: int | None = None,
    longest_prompt: int | None = None,
    evaluates: bool = False,
    agents: bool = False,
) -> TrlSettings:
    """Return settings under the names of the tables, checked.

    Args:
        values: key as it was written -> value; numbers and truth values may be text, as on a command line.
        environment: variables.
        prompts: rows of the training data, if known.
        longest_prompt: tokens of the longest prompt, if known.
        evaluates: whether validation data is given as an object.
        agents: whether the script has tools or environments.

    Raises:
        ConfigError: unknown keys, all of them, with the nearest known ones; or an illegal value, with the legal ones.
    """
    settings = TrlSettings(
        environment=environment, prompts=prompts, longest_prompt=longest_prompt, evaluates=evaluates, agents=agents
    )
    fill(settings, {key: _typed(key, value) for key, value in values.items()})
    return settings


def _typed(key: str, value: Any) -> Any:
    """Return a value that is written as text as the number or truth value that its row wants."""
    row = TRL.row_of(TRL.current_name(key)[0])
    if row is not None and value is False and "no" in row.values:
        return "no"  # as YAML reads it
    return typed(TRL, key, value)


def _of_file(file: str) -> dict[str, Any]:
    place = "standard input" if file == "-" else file
    content = read_yaml(text_of(file, "a YAML file of `trl grpo --config`"), place, None)
    if not isinstance(content, dict):
        raise ConfigError(f"{place} must be a YAML mapping of fields, as `trl grpo --config` reads")
    return content
