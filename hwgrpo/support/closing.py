"""Closing several things, each whatever the others do."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable


def close_all(*closings: Callable[[], None]) -> None:
    """Call all of these functions, then raise the first error that one of them had.

    An error that propagates through the caller is the reason to close, so an error of closing must not replace it. What
    is not raised is logged.
    """
    first: Exception | None = None
    on_its_way = sys.exc_info()[0] is not None
    for close in closings:
        try:
            close()
        except Exception as error:
            if first is None and not on_its_way:
                first = error
            else:
                logging.getLogger(__name__).warning("closing after an error: %s: %s", type(error).__name__, error)
    if first is not None:
        raise first
