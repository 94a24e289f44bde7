"""The page's table of settings that exclude each other is what the check of a run says now."""

import subprocess
import sys

from tests.docs.pages import REPO


def test_the_table_of_combinations_is_current():
    command = [sys.executable, "scripts/generate_combination_table.py", "--check"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
