"""The table of a fault drill: what was done to a run, what it did, and what was lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

DRILL = "fault drill"
"""Name of the property of a test's report that holds its row: with it rows come from every worker."""
Told = Callable[[str, str, str], None]


@pytest.fixture
def told(record_property: Callable[[str, object], None]) -> Told:
    """Put a row into the table: the fault, what happened, what was lost."""
    return lambda fault, happened, lost: record_property(DRILL, (fault, happened, lost))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = [
        row
        for report in terminalreporter.stats.get("passed", ())
        for name, row in report.user_properties
        if name == DRILL
    ]
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    terminalreporter.section(DRILL)
    for fault, happened, lost in rows:
        terminalreporter.line(f"{fault:<{widths[0]}}  {happened:<{widths[1]}}  lost: {lost}")
