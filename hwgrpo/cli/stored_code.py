"""Code that the settings of a run's folder name: printed before it is run, and a model's own only if you say so."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hwgrpo.config import Config
from hwgrpo.config.recipe_files import read_recipe
from hwgrpo.config.stored_settings import settings_from
from hwgrpo.errors import ConfigError
from hwgrpo.support.text import terminal_line

FUNCTION_KEYS = (
    *("functions", "name", "estimator", "function", "verifier", "source"),
    *("workflow", "loggers", "metrics", "stages", "plugins"),
)
"""Last parts of the settings that may name a function (`config.named_files.function_settings`)."""


def print_code(settings: Path, tree: dict[str, object] | None = None) -> None:
    """Print the Python files and modules that stored settings name, on standard error.

    Args:
        settings: their file.
        tree: the settings, where the file holds more than these; None: read them.

    Raises:
        ConfigError: the file cannot be read.
    """
    tree = read_recipe(settings) if tree is None else tree
    try:
        found = named_code(tree)
    except ConfigError:  # settings that do not load, or need what the command line sets
        found = _named(tree)
    named = ", ".join(dict.fromkeys(found.values()))
    if named:
        line = f"hwgrpo: note: {settings} names code, which is run as who made that folder wrote it: {named}"
        print(terminal_line(line), file=sys.stderr, flush=True)


def named_code(tree: dict[str, object]) -> dict[str, str]:
    """Return the settings that name a Python file or module, wherever they are: `reward.functions.0.name` -> value.

    Raises:
        ConfigError: this version has other settings, or an interpolation, which may stand for a name, is not resolved.
    """
    return _named(dataclasses.asdict(settings_from(tree)))


def _named(tree: dict[str, object]) -> dict[str, str]:
    plugins = tree.get("plugins")
    of_plugins = plugins if isinstance(plugins, list) else ()
    return {f"plugins.{i}": str(each) for i, each in enumerate(of_plugins)} | dict(_functions(tree))


def _functions(tree: object, place: str = "", key: str = "") -> Iterator[tuple[str, str]]:
    """Yield each value that names a function in a file or module, with its place; `key` is the setting's last name."""
    if isinstance(tree, (dict, list)):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _functions(value, f"{place}.{name}".lstrip("."), key if isinstance(tree, list) else str(name))
    elif isinstance(tree, str) and (".py:" in tree or tree.endswith(".py") or (key in FUNCTION_KEYS and ":" in tree)):
        yield place, tree


def check_trust(config: Config, given: Sequence[str], remedy: str) -> None:
    """Check that no stored setting lets the code of a model's folder run.

    Args:
        config: loaded settings, with those of the command line.
        given: keys that the command line sets.
        remedy: how it says so; `{}` is the key.

    Raises:
        ConfigError: one does, and the command line does not.
    """
    for key in _trusted(config):
        if not any(key == each or key.startswith(f"{each}.") for each in given):
            raise ConfigError(
                f"the run's settings have {key}=true, which runs Python files of the model's folder; if you trust who "
                f"made it, {remedy.format(key)}"
            )


def _trusted(config: Config) -> Iterator[str]:
    if config.model.trust_remote_code:
        yield "model.trust_remote_code"
    for i, function in enumerate(config.reward.functions):
        if function.kwargs.get("trust_remote_code") is True:
            yield f"reward.functions.{i}.kwargs.trust_remote_code"
