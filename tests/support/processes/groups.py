"""The groups of tests as pytest markers, and how the tests of several groups share one run of pytest.

`tests/groups.txt` has a line per group: its name, how `scripts/test.sh` runs it, its folders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[2]
ONE_WORKER = ("vllm", "simulated_npu")
"""Folders whose files share what is expensive to start: one worker runs all of a folder. Elsewhere one runs a file."""
BY_PARAMETER = ("tests/compile/test_binaries.py",)
"""Files in which one worker runs all cases of a first parameter: of a chip, for which it compiles each kernel once."""


def group_of_folder() -> dict[str, str]:
    """Return the group of each folder of tests."""
    lines = [line.split() for line in (TESTS / "groups.txt").read_text().splitlines()]
    return {folder: group for group, _, *folders in lines for folder in folders}


def pytest_configure(config: pytest.Config) -> None:
    for group in sorted({*group_of_folder().values()}):
        config.addinivalue_line("markers", f"{group}: tests of this group; see scripts/test.sh --list")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its group; a report of the run says which tests are slow."""
    groups = group_of_folder()
    for item in items:
        if item.path.is_relative_to(TESTS):
            item.add_marker(groups[item.path.relative_to(TESTS).parts[0]])
        if item.get_closest_marker("slow"):
            item.user_properties.append(("slow", ""))
    if hasattr(config, "workerinput"):
        begin_with_slow_files(items)


def begin_with_slow_files(items: list[pytest.Item]) -> None:
    """Sort files with slow tests before all others: one that a worker begins last would keep it alone for minutes."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler that keeps the tests of a scope on one worker."""
    dist = config.getoption("dist")
    if dist not in ("loadfile", "loadgroup"):
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid, dist)

    return ByScope(config, log)


def scope_of(nodeid: str, dist: str) -> str:
    """Return what the tests that stay on one worker have in common.

    Args:
        nodeid: of a test.
        dist: "loadfile": a file, or a folder of `ONE_WORKER`. "loadgroup": the first parameter of a test in a file of
            `BY_PARAMETER`, each other test by itself. (xdist 3.8 loses the groups of its marks with pytest 9.2.)
    """
    file, _, test = nodeid.partition("::")
    if dist == "loadgroup":
        return test.partition("[")[2].partition("-")[0] if file in BY_PARAMETER else nodeid
    folder = file.removeprefix("tests/").split("/")[0]
    return folder if folder in ONE_WORKER else file
