"""Waits between the attempts of a request, and a limit on requests per minute."""

from __future__ import annotations

import email.utils
import hashlib
import threading
import time
from collections.abc import Mapping


def backoff(attempt: int, first: float, longest: float, request: bytes) -> float:
    """Return the seconds to wait after a failed attempt: doubled each time, times 0.5 to 1.

    The factor depends on the request and the attempt alone, so that it is the same in a repeated run, while requests
    that failed together are not sent again together.

    Args:
        attempt: number of the attempt that failed, from 0.
        first: seconds after the first one.
        longest: most seconds.
        request: identifies the request.
    """
    digest = hashlib.sha256(b"%d:" % attempt + request).digest()
    return min(longest, first * 2.0**attempt) * (0.5 + 0.5 * int.from_bytes(digest[:4]) / 2**32)


def retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a server asks to wait in the header Retry-After; 0 without a valid one.

    Args:
        headers: of a response, with names in lower case; the value is a number of seconds or a date (RFC 9110).
    """
    value = headers.get("retry-after", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return 0.0
    return max(0.0, seconds) if seconds < float("inf") else 0.0


class RateLimit:
    """At most one request in each interval; thread-safe.

    Args:
        per_minute: requests per minute; None: no limit.
    """

    def __init__(self, per_minute: float | None) -> None:
        self._interval = 0.0 if per_minute is None else 60.0 / per_minute
        self._lock = threading.Lock()
        self._next = 0.0

    def reserve(self, now: float) -> float:
        """Return the seconds from `now` to the time that a request may be sent, and reserve that time."""
        with self._lock:
            start = max(now, self._next)
            self._next = start + self._interval
        return start - now
