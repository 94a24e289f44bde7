"""The page about the architecture names files that are there, and its picture is drawn from the present imports."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from hwgrpo.training.stages.stage import Stages

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))
from trace_step import figures  # noqa: E402

PAGE = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
LINES = re.compile(r"^ +([\d,]+) \S+\.py$", flags=re.MULTILINE)


def test_the_picture_is_current():
    done = subprocess.run([sys.executable, "scripts/draw_architecture.py", "--check"], cwd=REPO, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_the_files_of_the_main_path_are_there():
    files = re.findall(r"^\| \[`([\w/]+\.py)`\]\(\.\./\1\) \|", PAGE, flags=re.MULTILINE)
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
    tables = len(re.findall(r"^\|---", asked, flags=re.MULTILINE))
    assert len(rows) == len(re.findall(r"^\| ", asked, flags=re.MULTILINE)) - tables > 0
    for file, name in rows:
        text = (REPO / file).read_text(encoding="utf-8")
        assert re.search(rf"^ *(def|class) {name}\b|^{name}\b", text, flags=re.MULTILINE), (file, name)


def test_the_slots_of_a_step_are_on_the_page_in_their_order():
    assert re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE) == [field.name for field in fields(Stages)]


def test_every_name_on_the_page_is_in_its_package():
    """A name after a file that the page names without its folder, as in "`restore.py`, `verify`"."""
    code = [path for root in ("hwgrpo", "backends", "kernels") for path in (REPO / root).rglob("*.py")]
    pairs = re.findall(r"`((?:\w+/)*\w+\.py)`(?:\]\([^)]*\))?, `([\w.]+)`", PAGE)
    named = [(file, name) for file, name in pairs if not name.endswith(".py")]
    assert named
    for file, name in named:
        defined = re.compile(rf"^ *(def|class) {name.split('.')[-1]}\b|^{name}\b", flags=re.MULTILINE)
        found = [path.read_text(encoding="utf-8") for path in code if f"/{path.relative_to(REPO)}".endswith(f"/{file}")]
        assert any(map(defined.search, found)), (file, name)
