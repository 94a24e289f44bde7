"""docs/profiling.md: its items are those of scripts/gpu_visit.sh, and its commands are commands."""

import shlex
import sys

from tests.docs.pages import REPO, blocks, page, table

sys.path.insert(0, str(REPO / "scripts"))

import gpu_visit_runner as runner

PAGE = page("profiling.md")
ITEMS = runner.all_items("ABC")


def test_the_table_has_the_items_of_the_visit():
    rows = [(f"`{item.name}`", item.what, str(item.expected), str(item.limit)) for item in ITEMS.values()]
    assert [tuple(row.values()) for row in table(PAGE, "item", "what", "s", "limit")] == rows


def test_the_visits_of_the_page_name_items_and_options():
    lines = [line for block in blocks(PAGE, "bash") for line in block.splitlines() if "gpu_visit.sh" in line]
    visits = [shlex.split(line, comments=True) for line in lines]
    assert len(visits) == 4
    for words in visits:
        assert words[:2] == ["bash", "scripts/gpu_visit.sh"]
        options = runner.arguments_of(words[2:])
        assert str(options.out) == "OUT"
        assert set(options.items) <= set(ITEMS)
