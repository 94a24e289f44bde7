"""The page about the architecture names files that are there, and its picture is drawn from the present imports."""

import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
PAGE = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_picture_is_current():
    done = subprocess.run([sys.executable, "scripts/draw_architecture.py", "--check"], cwd=REPO, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_the_files_of_the_main_path_are_there():
    files = re.findall(r"^\| `([\w/]+\.py)` \|", PAGE, flags=re.MULTILINE)
    assert [name for name in files if not (REPO / name).is_file()] == []
    assert len(files) == len(set(files)) > 0


def test_what_the_page_points_at_is_there():
    for name, file in (
        ("_build", "training/setup.py"),
        ("_saver", "training/setup.py"),
        ("class Prefetcher", "training/feed/prefetcher.py"),
    ):
        assert name in (REPO / "hwgrpo" / file).read_text(encoding="utf-8")
