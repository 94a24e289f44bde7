"""docs/recipes.md is what the planner says now."""

from tests.docs.pages import REPO
from tests.support.processes.launch import forked


def test_the_table_of_recipes_is_current():
    done = forked(0, str(REPO / "scripts/generate_recipe_table.py"), "--check")
    assert done.returncode == 0, done.stdout + done.stderr
