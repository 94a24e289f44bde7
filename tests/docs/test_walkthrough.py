"""The walk-through does what it says: each of its blocks runs as written, and the model learns."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hwgrpo.data.published import PUBLISHED
from tests.docs.pages import code, page, table
from tests.support.processes.preloaded_programs import programs

REPO = Path(__file__).parents[2]
PAGE = REPO / "docs" / "own-data.md"


def blocks() -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Yield a function that runs a block in one folder, with this Python and its hwgrpo on the path."""
    folder = tmp_path_factory.mktemp("walk")
    tools = tmp_path_factory.mktemp("bin")
    (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "python").chmod(0o755)
    source = os.pathsep.join(str(REPO / part) for part in (".", "backends", "kernels"))
    # TERM=dumb: the page is read by people, and tests read what they would see without a live panel
    env = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": source, "TERM": "dumb"}

    def run(block: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=folder, env=env, text=True, capture_output=True
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    run.folder = folder  # pyright: ignore[reportFunctionMemberAccess]
    with programs(tools):
        yield run


@pytest.mark.slow
def test_every_block_of_the_walk_through_runs_and_the_model_learns(shell):
    outputs = [shell(block) for block in blocks()]
    assert len(outputs) == 7
    assert "1,000 prompts" in "".join(outputs)
    summary = json.loads((shell.folder / "runs/mine/summary.json").read_text())
    greedy = next(row for row in summary["validation"] if row["metric"] == "greedy")
    assert greedy["after"] > greedy["before"] + 0.3
    page = (shell.folder / "runs/mine/report.html").read_text(encoding="utf-8")
    assert "share_right" in page


@pytest.mark.slow
def test_the_mistake_that_the_page_suggests_is_named_with_its_remedy(shell):
    suggested = "hwgrpo train mine.yaml rollout.temprature=2 --dry-run"
    assert f"`{suggested}`" in PAGE.read_text(encoding="utf-8")
    with pytest.raises(AssertionError, match=r"Did you mean rollout\.temperature"):
        shell(suggested)


def test_the_published_datasets_are_on_the_page_with_their_splits_and_rewards():
    rows = {code(row["name"])[0]: row for row in table(page("own-data.md"), "name", "splits written")}
    assert list(rows) == [*PUBLISHED]
    for name, dataset in PUBLISHED.items():
        row = rows[name]
        assert code(row["dataset, subset"]) == [dataset.hub, *([dataset.subset] if dataset.subset else [])]
        assert row["splits written"] == ", ".join(dataset.splits)
        assert code(row["reward"]) == ([dataset.reward] if dataset.reward else [])


def test_the_conversion_of_own_files_on_the_page_makes_a_validation_split(shell):
    [block] = [block for block in blocks() if "hwgrpo data convert" in block]
    shutil.rmtree(shell.folder / "data/questions", ignore_errors=True)  # of the whole walk-through
    assert "2 rows, none bad" in shell(block)
    assert (shell.folder / "data/questions/validation.parquet").is_file()
