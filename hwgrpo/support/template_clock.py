"""The date that chat templates with a clock write: one for all prompts of a run."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from hwgrpo.errors import ConfigError, shown


def clock_options(template_date: str | None) -> dict[str, Any]:
    """Return the arguments of a chat template that set its clock to `data.template_date`; none where that is null."""
    date = read_date(template_date)
    return {} if date is None else {"strftime_now": date.strftime}


def read_date(value: str | None) -> datetime | None:
    """Return `data.template_date` as a date.

    Raises:
        ConfigError: it is none.
    """
    if value is None:
        return None
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"data.template_date={shown(value)} is no date; write it as 2026-07-31, or with a time as 2026-07-31T12:00"
        ) from error


def present_date() -> str:
    """Return the present as a value of `data.template_date`."""
    return datetime.now().isoformat(timespec="seconds")
