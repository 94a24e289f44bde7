"""A checkpoint's manifest: read it, and check its checksum and the values that a resumed run needs.

The checksum is in a file next to the manifest, in the format of `sha256sum`. Earlier versions wrote none; for their
manifests only types and ranges are checked.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hwgrpo.config.stored_settings import stored_tree
from hwgrpo.errors import CheckpointError, ConfigError
from hwgrpo.support.template_clock import read_date
from hwgrpo.training.checkpoint import checkpoint_files, shard_files

SCHEMA = "hwgrpo.checkpoint/2"
_DIGEST = re.compile(r"(?:[0-9a-f]{2})+:.+")
"""Salt and digest of a value that is not stored."""


class Manifest(NamedTuple):
    """A checked manifest."""

    content: dict[str, Any]
    sha256: str
    """Checksum of the file's bytes."""
    note: str | None
    """Why its checksum was not checked; None if it was."""


def read(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged or of another format; the message names the file.
    """
    path = folder / checkpoint_files.MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder}: not a checkpoint, it has no {checkpoint_files.MANIFEST}") from error
    except OSError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    note = _check_checksum(folder, data)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    _check(path, content)
    return Manifest(content, hashlib.sha256(data).hexdigest(), note)


def _check_checksum(folder: Path, data: bytes) -> str | None:
    """Compare a manifest's bytes with its checksum file; return a note if there is none."""
    path = folder / checkpoint_files.CHECKSUM
    try:
        expected = path.read_bytes()
    except FileNotFoundError:
        return f"there is no {path}, as in checkpoints of earlier versions: the manifest is used without a checksum"
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if expected != checkpoint_files.checksum_line(data).encode():
        raise CheckpointError(
            f"{folder / checkpoint_files.MANIFEST} is damaged, or its checksum in {checkpoint_files.CHECKSUM} is: "
            "they do not match"
        )
    return None


def _check(path: Path, content: Any) -> None:
    if not isinstance(content, dict) or "schema" not in content:
        raise CheckpointError(f"{path} is damaged: it lacks keys of a manifest")
    if content["schema"] != SCHEMA:
        raise CheckpointError(f"{path} has schema {content['schema']!r}; this version reads {SCHEMA}")
    kinds = {"state": dict, "parameters": dict, "files": dict}
    if not all(isinstance(content.get(key), kind) for key, kind in kinds.items()):
        raise CheckpointError(f"{path} is damaged: it lacks keys of a manifest")
    for name in content["files"]:
        if name != Path(name).name or name == "..":
            raise CheckpointError(f"{path} is damaged: the file {name!r} leaves the folder")
    require = _Requirements(path, content)
    require("step", shard_files.is_count)
    folder_step = checkpoint_files.step_of(path.parent)
    if folder_step not in (None, content["step"]):
        raise CheckpointError(f"{path} is of step {content['step']}, its folder is named for step {folder_step}")
    require("world_size", lambda value: shard_files.is_count(value) and value > 0)
    shard_files.check_table(path, content["parameters"], content["files"])
    rng_files = map(checkpoint_files.rng_file, range(content["world_size"]))
    missing = next((name for name in rng_files if name not in content["files"]), None)
    if missing is not None:
        raise CheckpointError(f"{path} is damaged: it does not list {missing}")
    _check_state(require, content["state"])


def _check_state(require: _Requirements, state: Mapping[str, Any]) -> None:
    count = shard_files.is_count
    require("state.sampler", lambda value: isinstance(value, dict))
    require("state.sampler.size", count)
    require("state.sampler.seed", lambda value: isinstance(value, int))
    require("state.sampler.shuffle", lambda value: isinstance(value, bool))
    require("state.sampler.epoch", count)
    require("state.sampler.position", lambda value: count(value) and value <= state["sampler"]["size"])
    require("state.updates_done", count)
    require("state.config", _is_settings)
    if "skipped_in_a_row" in state:  # the keys from here on are newer than the format
        require("state.skipped_in_a_row", count)
    if "secrets" in state:
        require("state.secrets", _are_digests)
    if "code" in state:
        require("state.code", lambda value: isinstance(value, dict))
        for name in state["code"]:
            require(f"state.code.{name}", lambda value: isinstance(value, str))
    if "data" in state:
        require("state.data", lambda value: isinstance(value, dict))
        for name in state["data"]:
            require(f"state.data.{name}", _is_fingerprint)
    if "resumes" in state:
        require(
            "state.resumes", lambda value: isinstance(value, list) and all(isinstance(each, dict) for each in value)
        )
    if "template_date" in state:
        require("state.template_date", _is_date)


class _Requirements:
    """Raises CheckpointError if the value of a dotted key of a manifest is missing or fails a test."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self._path, self._content = path, content

    def __call__(self, key: str, passes: Callable[[Any], bool]) -> None:
        value: Any = self._content
        for part in key.split(".", maxsplit=2):
            if not isinstance(value, dict) or part not in value:
                raise CheckpointError(f"{self._path} is damaged: it has no {key}")
            value = value[part]
        if not passes(value):
            shown = repr(value)
            shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
            raise CheckpointError(f"{self._path} is damaged: {key}={shown} is not a valid value")


def _is_settings(value: Any) -> bool:
    try:
        # Not resolved: a variable in them may be unset here.
        return isinstance(value, str) and isinstance(stored_tree(value), dict)
    except (OmegaConfBaseException, YAMLError, ValueError):
        return False


def _are_digests(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) and _DIGEST.fullmatch(each) for each in value.values())


def _is_fingerprint(value: Any) -> bool:
    hashes = isinstance(value, dict) and [value.get("sha256"), value.get("text_sha256", "")]  # text: newer
    return bool(hashes) and shard_files.is_count(value.get("rows")) and all(isinstance(each, str) for each in hashes)


def _is_date(value: Any) -> bool:
    try:
        return read_date(value) is not None
    except ConfigError:
        return False
