"""Files and folders in settings: whether they exist, and the nearest existing ones.

Nothing heavy is imported, so that a wrong path is reported before a model's libraries are loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hwgrpo.errors import ConfigError, nearest, shown

_GGUF_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def with_home(value: Any) -> Any:
    """Return a path, or each of a list of paths, with the home folder for a leading `~`; anything else unchanged.

    A shell does so itself at the start of a word, but not in `trainer.output_dir=~/runs`, and not in quotes.
    """
    if isinstance(value, list):
        return [with_home(each) for each in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~") else value


def check_path(path: str | None, key: str) -> None:
    """Check that the operating system accepts a path, whether it exists or not.

    Args:
        path: value of a setting; None passes.
        key: the setting, for messages.

    Raises:
        ConfigError: the name is too long, another user's home is unknown, or a folder on the way may not be read.
    """
    if path is None:
        return
    try:
        os.stat(Path(path).expanduser())
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ConfigError(f"{key}={shown(path)}: {error.strerror}; name another file or folder") from error
    except RuntimeError as error:  # from expanduser
        raise ConfigError(f"{key}={shown(path)}: there is no such user's home; write the path out") from error
    except ValueError as error:
        raise ConfigError(f"{key}={shown(path)} is not a file name ({error}); name another one") from error


def did_you_mean(path: Path, wanted: Callable[[Path], bool] = Path.exists) -> str:
    """Return " Did you mean x?" for a path that is not there, or "" where nothing resembles it.

    Args:
        path: the named path; its folder may be misspelt, too.
        wanted: entries that can be suggested.
    """
    try:
        near = _nearest_path(path, wanted)
    except OSError:  # an unreadable folder: the hint is not worth another error
        near = None
    return f" Did you mean {near}?" if near else ""


def same_spelling(path: Path, wanted: Callable[[Path], bool] = Path.exists, *, stem: bool = False) -> Path | None:
    """Return an entry next to `path` that differs from it in case, dashes, dots and underscores only.

    Args:
        path: the named path, which does not exist.
        wanted: entries that can be suggested.
        stem: whether an entry's suffix may be left out.
    """
    for entry in _siblings(path, wanted):
        if _spelling(path.name) in (_spelling(entry.name), _spelling(entry.stem) if stem else None):
            return entry
    return None


def find_model(path: str, key: str) -> Path | None:
    """Return the folder of a model or tokenizer, a model's GGUF file, or None for what can only be a hub name.

    Args:
        path: value of the setting.
        key: "model.path" or "model.tokenizer", for messages.

    Raises:
        ConfigError: it looks like a folder and is none, or is not in Hugging Face format, or has several GGUF files.
    """
    check_path(path, key)
    folder = Path(path).expanduser()
    is_model = key == "model.path"
    if is_model and (file := find_gguf(folder)) is not None:
        return file
    if folder.is_dir():
        if is_model and (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            raise ConfigError(
                f"{key}={path!r} contains a LoRA adapter, not a model: "
                "set model.path to the model it was trained on and model.lora.adapter to this folder"
            )
        needed = "config.json" if is_model else "tokenizer_config.json"
        if not (folder / needed).is_file():
            raise ConfigError(f"{key}={path!r}: the folder has no {needed}, so it is not in Hugging Face format")
        return folder
    if folder.exists():
        raise ConfigError(f"{key}={path!r} is a file; use its folder")
    # A hub name is `name` or `owner/name`; anything else must be a folder.
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ConfigError(
            f"{key}={path!r}: there is no such folder (looked for {folder.absolute()})."
            f"{did_you_mean(folder, Path.is_dir)}"
        )
    if near := same_spelling(folder, Path.is_dir):
        raise ConfigError(f"{key}={path!r}: there is no such folder. Did you mean {near}?")
    return None


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that is a model's path, or the only one of a folder without other weights; None if neither.

    Raises:
        ConfigError: the folder has several, or the file is one shard of a model.
    """
    files = [path] if path.is_file() and path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if not files or any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    if any(_GGUF_SHARD.search(file.name) for file in files):
        raise ConfigError(
            f"model.path={str(path)!r} is a GGUF model in several shards, e.g. {files[0].name}: merge them "
            "(llama-gguf-split --merge FIRST_SHARD MERGED.gguf) and set model.path to the merged file"
        )
    if len(files) > 1:
        raise ConfigError(
            f"model.path={str(path)!r} has several GGUF files ({', '.join(file.name for file in files)}): "
            "set model.path to one of the files"
        )
    return files[0]


def _siblings(path: Path, wanted: Callable[[Path], bool]) -> list[Path]:
    """Return the entries of the parent folder of `path`; none where it does not exist."""
    return sorted(entry for entry in path.parent.iterdir() if wanted(entry)) if path.parent.is_dir() else []


def _nearest_path(path: Path, wanted: Callable[[Path], bool]) -> Path | None:
    if not path.parent.is_dir():
        folder = _nearest_path(path.parent, Path.is_dir)
        if folder is None:
            return None
        path = folder / path.name
        if wanted(path):
            return path
    entries = {_spelling(entry.name): entry for entry in _siblings(path, wanted)}
    near = nearest(_spelling(path.name), entries)
    return entries[near] if near else None


def _spelling(name: str) -> str:
    return re.sub(r"[-_. ]", "", name).lower()
