"""Functions of the user's own: `path/to/file.py:function` where a setting takes a registered name."""

from __future__ import annotations

import asyncio
import dis
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hwgrpo.errors import ConfigError, error_text, escaped, nearest, shown

_OURS = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent), "<frozen importlib")
"""Folders of the code that calls functions of users."""
LINE = 200
"""Characters of a line of code that a message shows."""
FORM = "path/to/file.py:function"

_plugins: list[str] = []


def split_name(name: str, default: str | None = None) -> tuple[str | None, str]:
    """Return the file and the function that a setting names; (None, name) for a registered name.

    Args:
        name: a registered name, `path/to/file.py:function`, or `path/to/file.py`.
        default: the function that a file alone stands for; None: a file alone is not enough.
    """
    file, _, function = name.rpartition(":") if not name.endswith(".py") else (name, "", default or "")
    return (file, function) if file.endswith(".py") else (None, name)


def names_a_file(name: str) -> bool:
    """Return whether a setting names a function in a file."""
    return split_name(name)[0] is not None


def load_function(name: str, key: str, default: str | None = None) -> Callable[..., Any]:
    """Return the function, or class, that `path/to/file.py:function` names.

    Args:
        name: the value of the setting.
        key: the setting, for messages.
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
    found = getattr(module, function, None)
    if not callable(found):
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
    return found


def _home(value: Any) -> str | None:
    return getattr(getattr(value, "function", value), "__module__", None)


def import_file(path: Path, setting: str) -> ModuleType:
    """Run a Python file as a module; one that is loaded already is not run again, so its functions share state.

    Args:
        path: the file.
        setting: the setting and its value, for messages.

    Raises:
        ConfigError: running the file failed.
    """
    module_name = f"hwgrpo_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
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


def import_plugins(names: Sequence[str]) -> None:
    """Import the Python files and modules of the setting `plugins`, which register components of their own.

    Raises:
        ConfigError: one is not there, or running it failed.
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
            except BaseException as error:  # a module that exits must not pass for the end of the run
                if not is_own(error):
                    raise
                raise ConfigError(
                    f"{setting}: importing the module failed: {described(error)}; name a module that this environment "
                    "has, or a .py file"
                ) from error
        if name not in _plugins:
            _plugins.append(name)


def imported_plugins() -> tuple[str, ...]:
    """Return the plugins of this process, for processes that it starts."""
    return tuple(_plugins)


def with_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], positional: int, key: str
) -> Callable[..., Any]:
    """Return a function with some keyword arguments given.

    Args:
        function: of a user, or registered.
        arguments: what the setting `key` holds.
        positional: how many arguments it is called with beside them.
        key: the setting, for messages.

    Raises:
        ConfigError: it does not take these arguments.
    """
    try:
        inspect.signature(function).bind(*[None] * positional, **arguments)
    except TypeError as error:
        called = f"{getattr(function, '__name__', type(function).__name__)}{inspect.signature(function)}"
        raise ConfigError(
            f"{key}={shown(dict(arguments))}: {called} is called with {positional} arguments and these: {error}"
        ) from error
    return functools.partial(function, **arguments) if arguments else function


def arguments_of(name: str, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a file's function's own arguments from `kwargs`, which holds function name -> arguments."""
    file, function = split_name(name)
    return {} if file is None else kwargs.get(function) or {}


def is_own(error: BaseException) -> bool:
    """Tell whether a function itself raised an error; neither Ctrl-C nor a cancelled asyncio task did.

    Python raises KeyboardInterrupt for Ctrl-C at whatever instruction a program is, but never at a `raise` statement.
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


def described(error: BaseException) -> str:
    """Return an exception's class, what it says, and the line of the function's file that it came from."""
    text = error_text(error)
    return f"{type(error).__name__}{f': {text}' if text else ''}{place_of(error)}"


def place_of(error: BaseException) -> str:
    """Return the line of the function's own file that an exception came from; "" where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    entered = next((frame for frame in frames if not frame.filename.startswith(_OURS)), None)
    if entered is None:
        return ""
    last = [frame for frame in frames if frame.filename == entered.filename][-1]
    return f" at {last.filename}:{last.lineno}" + (f", `{escaped(last.line, LINE)}`" if last.line else "")
