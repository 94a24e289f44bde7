"""The page's table of settings that exclude each other is what the check of a run says now."""

from tests.docs.pages import REPO
from tests.support.processes.launch import forked


def test_the_table_of_combinations_is_current():
    done = forked(0, str(REPO / "scripts/generate_combination_table.py"), "--check")
    assert done.returncode == 0, done.stdout + done.stderr
