"""Replies of a service on disk: each is paid for once, by all ranks and later runs."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from hwgrpo.errors import ConfigError


class ReplyCache:
    """A folder with a file for each reply.

    Args:
        folder: made if it is missing; relative paths start at the working directory.
        key: the reward's setting, for messages.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(self, folder: str, key: str) -> None:
        self._folder = Path(folder).expanduser().absolute()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self._folder, os.W_OK):
                raise PermissionError("no permission to write")
        except OSError as error:
            raise ConfigError(f"{key}.kwargs.cache={folder!r} cannot be written: {error}") from error

    def read(self, name: str) -> Any | None:
        """Return a stored reply; None if there is none, or its file is damaged."""
        try:
            return json.loads(self._path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def write(self, name: str, reply: Any) -> None:
        """Store a reply; other processes see it complete or not at all.

        Raises:
            OSError: the disk is full, or the like.
        """
        path = self._path(name)
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
        try:
            partial.write_text(json.dumps(reply), encoding="utf-8")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / f"{name}.json"


def cache_name(body: Any) -> str:
    """Return the name under which the reply to a request is stored: a hash of its body."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
