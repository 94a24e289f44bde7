"""Messages in a pipe: the length in 8 bytes, then the body."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

HEADER = 8
MAX_MESSAGE_BYTES = 64 << 20
"""Limit on a message from a process, in bytes."""


def frame_message(body: bytes) -> bytes:
    """Return a message prefixed by its length."""
    return len(body).to_bytes(HEADER, "big") + body


class Reader:
    """Incremental parser of the messages in a pipe."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """Append received bytes; yield the complete messages.

        Raises:
            ValueError: invalid bytes, or a message larger than `MAX_MESSAGE_BYTES`.
        """
        self._buffer += chunk
        while len(self._buffer) >= HEADER:
            size = int.from_bytes(self._buffer[:HEADER], "big")
            if size > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {size} bytes")
            if len(self._buffer) < HEADER + size:
                return
            body = bytes(self._buffer[HEADER : HEADER + size])
            del self._buffer[: HEADER + size]
            try:
                message = json.loads(body)
            except RecursionError as error:
                raise ValueError("a message that is nested too deeply") from error
            if not isinstance(message, dict):
                raise ValueError("a message of an unknown form")
            yield message
