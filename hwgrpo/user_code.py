"""User-defined functions: `path/to/file.py:function` in place of a registered name."""

from __future__ import annotations

import asyncio
import dis
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hwgrpo.errors import ConfigError, error_text, escaped, nearest

_OURS = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent), "<frozen importlib")
"""Folders of the code that calls user-defined functions."""
LINE = 200
"""Longest line of code in a message, in characters."""
FORM = "path/to/file.py:function"
MODULE_PREFIX = "hwgrpo_user_"
"""Of the names of modules that are the user's files."""

_plugins: list[str] = []


def split_name(name: str, default: str | None = None) -> tuple[str | None, str]:
    """Return the file and the function in a setting; (None, name) for a registered name.

    Args:
        name: a registered name, `path/to/file.py:function`, or `path/to/file.py`.
        default: function of a file without one; None: a function is required.
    """
    file, _, function = name.rpartition(":") if not name.endswith(".py") else (name, "", default or "")
    return (file, function) if file.endswith(".py") else (None, name)


def names_a_file(name: str) -> bool:
    """Return whether a setting names a function in a file."""
    return split_name(name)[0] is not None


def load_function(name: str, key: str, default: str | None = None) -> Callable[..., Any]:
    """Return the function or class at `path/to/file.py:function`.

    Args:
        name: value of the setting.
        key: key of the setting, for messages.
        default: as for `split_name`.

    Raises:
        ConfigError: there is no such file or function, or running the file failed.
    """
    file, function = split_name(name, default)
    assert file is not None, name
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        near = nearest(path.name, [child.name for child in path.parent.glob("*.py")])
        hint = f" Did you mean {near!r}?" if near else ""
        raise ConfigError(f"{key}={name!r}: no file {path}; relative paths start at the working directory.{hint}")
    module = import_file(path, f"{key}={name!r}")
    loaded = getattr(module, function, None)
    if not callable(loaded):
        own = [
            each
            for each, value in vars(module).items()
            if not each.startswith("_") and callable(value) and _home(value) == module.__name__
        ]
        near = nearest(function, own)
        hint = f" Did you mean {near!r}?" if near else ""
        raise ConfigError(
            f"{key}={name!r}: the file has no function {function!r}; it has: {', '.join(own) or 'none'}.{hint}"
        )
    return loaded


def _home(value: Any) -> str | None:
    return getattr(getattr(value, "function", value), "__module__", None)


def import_file(path: Path, setting: str) -> ModuleType:
    """Import a Python file as a module; a loaded file is not run again, so its functions share state.

    Args:
        path: the file.
        setting: key and value of the setting, for messages.

    Raises:
        ConfigError: running the file failed.
    """
    module_name = _module_name(path)
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickles look their module up there
    try:
        # The loader would run bytecode that it finds, even of a file that was changed within the same second.
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    except BaseException as error:  # a file that calls exit must not look like the end of the run
        sys.modules.pop(module_name, None)
        if not raised_by_user_code(error):
            raise
        raise ConfigError(f"{setting}: running the file failed: {describe_error(error)}") from error
    return module


def _module_name(path: Path) -> str:
    return f"{MODULE_PREFIX}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


def import_plugins(names: Sequence[str]) -> None:
    """Import the Python files and modules in the setting `plugins`, which register components.

    Raises:
        ConfigError: one does not exist, or running it failed.
    """
    for i, name in enumerate(names):
        setting = f"plugins.{i}={name!r}"
        if name.endswith(".py"):
            path = Path(name).expanduser().resolve()
            if not path.is_file():
                raise ConfigError(f"{setting}: no file {path}; relative paths start at the working directory")
            import_file(path, setting)
            name = str(path)
        else:
            try:
                importlib.import_module(name)
            except BaseException as error:  # a module that calls exit must not look like the end of the run
                if not raised_by_user_code(error):
                    raise
                raise ConfigError(
                    f"{setting}: importing the module failed: {describe_error(error)}; name a module of this "
                    "environment, or a .py file"
                ) from error
        if name not in _plugins:
            _plugins.append(name)


def imported_plugins() -> tuple[str, ...]:
    """Return the plugins imported in this process, for its child processes."""
    return tuple(_plugins)


def plugin_modules() -> set[str]:
    """Return the names of the modules of plugins that are files."""
    return {_module_name(Path(name)) for name in _plugins if name.endswith(".py")}


def arguments_of(name: str, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a user-defined function from `kwargs`: function name -> arguments."""
    file, function = split_name(name)
    return {} if file is None else kwargs.get(function) or {}


def raised_by_user_code(error: BaseException) -> bool:
    """Return whether a user-defined function raised an error itself, unlike Ctrl-C or a cancelled asyncio task.

    For Ctrl-C, Python raises KeyboardInterrupt at any instruction except a `raise` statement.
    """
    if isinstance(error, Exception):
        return True
    if not isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_filename.startswith(_OURS):
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def describe_error(error: BaseException) -> str:
    """Return an exception's class, its message, and its line in the user's file."""
    text = error_text(error)
    return f"{type(error).__name__}{f': {text}' if text else ''}{source_line(error)}"


def source_line(error: BaseException) -> str:
    """Return the source line of an exception in the user's file; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    entered = next((frame for frame in frames if not frame.filename.startswith(_OURS)), None)
    if entered is None:
        return ""
    last = [frame for frame in frames if frame.filename == entered.filename][-1]
    return f" at {last.filename}:{last.lineno}" + (f", `{escaped(last.line, LINE)}`" if last.line else "")
