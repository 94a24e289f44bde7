"""The page about the architecture names files that are there, and its picture is drawn from the present imports."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))
from trace_step import figures  # noqa: E402

PAGE = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
LINES = re.compile(r"^ +([\d,]+) \S+\.py$", flags=re.MULTILINE)


def test_the_picture_is_current():
    done = subprocess.run([sys.executable, "scripts/draw_architecture.py", "--check"], cwd=REPO, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_the_files_of_the_main_path_are_there():
    files = re.findall(r"^\| `([\w/]+\.py)` \|", PAGE, flags=re.MULTILINE)
    assert [name for name in files if not (REPO / name).is_file()] == []
    assert len(files) == len(set(files)) > 0


def test_the_figures_of_a_step_are_what_a_trace_counts():
    """Within a tenth: the page is not written anew for every function."""
    command = [sys.executable, "scripts/trace_step.py", "--files"]
    printed = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    traced, published = figures(printed), figures(PAGE)
    assert list(published) == list(traced)
    assert published == pytest.approx(traced, rel=0.1)
    assert " hwgrpo/training/loop.py\n" in printed
    assert traced["lines of these functions"] == sum(int(count.replace(",", "")) for count in LINES.findall(printed))


def test_what_engineers_ask_first_is_a_file_and_a_name_in_it():
    rows = re.findall(r"^\| [^|]+\? \| .*?\]\(\.\./([\w/.]+)\), `(\w+)`", PAGE, flags=re.MULTILINE)
    asked = PAGE.partition("## What engineers ask first")[2].partition("\n## ")[0]
    assert len(rows) == len(re.findall(r"^\| ", asked, flags=re.MULTILINE)) - 1 > 0
    for file, name in rows:
        text = (REPO / file).read_text(encoding="utf-8")
        assert re.search(rf"^ *(def|class) {name}\b|^{name}\b", text, flags=re.MULTILINE), (file, name)


def test_what_the_page_points_at_is_there():
    for name, file in (
        ("_build", "training/setup.py"),
        ("_saver", "training/setup.py"),
        ("class Prefetcher", "training/feed/prefetcher.py"),
    ):
        assert name in (REPO / "hwgrpo" / file).read_text(encoding="utf-8")
