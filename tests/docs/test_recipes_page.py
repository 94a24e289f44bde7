"""docs/recipes.md is what the planner says now."""

import subprocess
import sys

from tests.docs.pages import REPO


def test_the_table_of_recipes_is_current():
    command = [sys.executable, "scripts/generate_recipe_table.py", "--check"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
