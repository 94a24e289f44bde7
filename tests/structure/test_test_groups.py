"""Every folder of tests is in exactly one group of scripts/test.sh, so that no test is left out unnoticed."""

import subprocess
from pathlib import Path

REPO = Path(__file__).parents[2]
RUNNER = REPO / "scripts" / "test.sh"


def groups():
    listed = subprocess.run(["bash", RUNNER, "--list"], capture_output=True, text=True, check=True).stdout
    return {name: folders for name, *folders in map(str.split, listed.splitlines())}


def test_every_test_folder_is_in_a_group_and_every_folder_of_a_group_exists():
    there = {str(path.relative_to(REPO / "tests").parent) for path in (REPO / "tests").rglob("test_*.py")}
    top = {folder.split("/")[0] for folder in there}
    grouped = {folder for folders in groups().values() for folder in folders}
    assert "." not in top, "a test file lies in tests/ itself: move it into a folder that a group runs"
    assert top - grouped == set(), "folders of tests that no group in scripts/test.sh runs"
    assert grouped - top == set(), "folders in scripts/test.sh that hold no test"


def test_no_folder_is_in_two_groups():
    folders = [folder for folders in groups().values() for folder in folders]
    assert len(folders) == len(set(folders))


def test_an_unknown_group_is_refused_with_the_list_of_groups():
    result = subprocess.run(["bash", RUNNER, "unti"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "'unti'" in result.stderr
    assert all(name in result.stderr for name in groups())
