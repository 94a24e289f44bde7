"""Every folder of tests belongs to a group of scripts/test.sh, so that CI runs it once."""

from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_folder_of_tests_is_in_exactly_one_group():
    groups = [line.split() for line in (TESTS / "groups.txt").read_text(encoding="utf-8").splitlines()]
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert not [*TESTS.glob("test_*.py")], "a test file lies in tests/ itself: no group runs it"
    assert sorted(folder for _, _, *of_group in groups for folder in of_group) == sorted(folders)
