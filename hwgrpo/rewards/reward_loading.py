"""A reward's name -> its function: registered, or from a Python file."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hwgrpo.catalog import REWARDS
from hwgrpo.errors import ConfigError, choice_error, nearest
from hwgrpo.rewards.failures import described, is_own

DEFAULT_FUNCTION = "compute_score"


def load_function(name: str, key: str) -> tuple[str, Callable[..., Any]]:
    """Find a reward function.

    Args:
        name: a registered name, `path/to/file.py:function`, or `path/to/file.py` (its `compute_score`).
        key: the setting, for messages ("reward.functions[0].name").

    Returns:
        (short name for metrics, the function).

    Raises:
        ConfigError: nothing by that name; the message lists what there is.
    """
    file, function = split_name(name)
    if file is None:
        if name not in REWARDS:
            error = choice_error(key, name, REWARDS.names())
            raise ConfigError(f"{error} A function of your own is named path/to/file.py:function.")
        return name, REWARDS.load(name)
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        near = nearest(path.name, [child.name for child in path.parent.glob("*.py")])
        hint = f" Did you mean {near!r}?" if near else ""
        raise ConfigError(f"{key}={name!r}: no file {path}; relative paths start at the working directory.{hint}")
    module = _import_file(path, f"{key}={name!r}")
    found = getattr(module, function, None)
    if not callable(found):
        own = [
            word
            for word, value in vars(module).items()
            if not word.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        near = nearest(function, own)
        hint = f" Did you mean {near!r}?" if near else ""
        raise ConfigError(
            f"{key}={name!r}: the file has no function {function!r}; it has: {', '.join(own) or 'none'}.{hint}"
        )
    return function, found


def split_name(name: str) -> tuple[str | None, str]:
    """Return the file of a reward's name (None for a registered one) and what metrics call the function."""
    file, _, function = name.rpartition(":") if not name.endswith(".py") else (name, "", DEFAULT_FUNCTION)
    return (file, function) if file.endswith(".py") else (None, name)


def _import_file(path: Path, setting: str) -> ModuleType:
    """Run a Python file as a module; one that is loaded already is not run again, so its functions share state."""
    module_name = f"hwgrpo_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickles look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # a file that exits must not pass for the end of the run
        sys.modules.pop(module_name, None)
        if not is_own(error):
            raise
        raise ConfigError(f"{setting}: running the file failed: {described(error)}") from error
    return module
