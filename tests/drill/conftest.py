"""The table of a fault drill: what was done to a run, what it did, and what was lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

ROWS = pytest.StashKey[list[tuple[str, str, str]]]()
Told = Callable[[str, str, str], None]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Told:
    """Put a row into the table: the fault, what happened, what was lost."""
    rows = request.config.stash[ROWS]
    return lambda fault, happened, lost: rows.append((fault, happened, lost))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    terminalreporter.section("fault drill")
    for fault, happened, lost in rows:
        terminalreporter.line(f"{fault:<{widths[0]}}  {happened:<{widths[1]}}  lost: {lost}")
