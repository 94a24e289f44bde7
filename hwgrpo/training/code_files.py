"""The user's Python files and functions that a run calls: copied to its folder, and compared by checksum on resume."""

from __future__ import annotations

import functools
import hashlib
import inspect
from pathlib import Path
from typing import Any

from hwgrpo.config import Config
from hwgrpo.config.named_files import function_settings
from hwgrpo.support.given_objects import find_object, is_object, name_of
from hwgrpo.user_code import split_name

FOLDER = "code"
"""A run's folder with the copies, whose names contain their checksums."""


def code_files(config: Config) -> dict[str, Path]:
    """Return setting -> file, for the settings that name a function in a file."""
    files = {setting.key: split_name(setting.name)[0] for setting in function_settings(config)}
    return {key: Path(file).expanduser() for key, file in files.items() if file is not None}


def checksums(config: Config) -> dict[str, str]:
    """Return setting -> SHA-256 of its code; missing files, and objects without source, are skipped."""
    return {key: _checksum(code) for key, (_, code) in _codes(config).items()}


def keep_copies(config: Config, run_dir: Path) -> None:
    """Copy the code into a run's folder; copies from earlier starts stay."""
    for name, code in set(_codes(config).values()):
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        (folder / f"{_checksum(code)[:12]}-{name}").write_bytes(code)


def source_of(function: Any) -> str | None:
    """Return the source of a function, or of the class of a callable object; None where Python does not have it."""
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = type(function)
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):  # typed into an interpreter, or built in
        return None


def _codes(config: Config) -> dict[str, tuple[str, bytes]]:
    """Return setting -> (name of the file, its content)."""
    codes = {key: (file.name, file.read_bytes()) for key, file in code_files(config).items() if file.is_file()}
    for setting in function_settings(config):
        if is_object(setting.name):
            source = source_of(find_object(setting.name, setting.key))
            if source is not None:
                codes[setting.key] = f"{name_of(setting.name)}.py", source.encode()
    return codes


def _checksum(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()
