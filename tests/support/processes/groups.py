"""The groups of tests as pytest markers, and how the tests of several groups share one run of pytest.

`tests/groups.txt` has a line per group: its name, how `scripts/test.sh` runs it, its folders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[2]
ONE_WORKER = ("vllm",)
"""Folders whose files share what is expensive to start: one worker runs all of a folder. Elsewhere one runs a file."""


def group_of_folder() -> dict[str, str]:
    """Return the group of each folder of tests."""
    lines = [line.split() for line in (TESTS / "groups.txt").read_text().splitlines()]
    return {folder: group for group, _, *folders in lines for folder in folders}


def pytest_configure(config: pytest.Config) -> None:
    for group in sorted({*group_of_folder().values()}):
        config.addinivalue_line("markers", f"{group}: tests of this group; see scripts/test.sh --list")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its group; a report of the run says which tests are slow."""
    groups = group_of_folder()
    for item in items:
        if item.path.is_relative_to(TESTS):
            item.add_marker(groups[item.path.relative_to(TESTS).parts[0]])
        if item.get_closest_marker("slow"):
            item.user_properties.append(("slow", ""))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler that keeps the tests of a file, or of such a folder, on one worker."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFileOrFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            folder = file.removeprefix("tests/").split("/")[0]
            return folder if folder in ONE_WORKER else file

    return ByFileOrFolder(config, log)
