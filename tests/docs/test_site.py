"""The documentation builds as a site without a warning, and links and names on its pages lead to what is there."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hwgrpo.cli.main import COMMANDS
from hwgrpo.config.document import entries
from hwgrpo.data.row_schema import GROUND_TRUTH_KEYS
from hwgrpo.migrate.tables.verl_names import OLDER, ROWS
from tests.docs.pages import DOCS, FENCED, REPO, anchors, links, page

PAGES = sorted(DOCS.glob("*.md"))
OTHERS = [REPO / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
SETTINGS = {entry.key.replace("[]", "") for entry in entries()}
SECTIONS = {key.rpartition(".")[0] for key in SETTINGS} | {key.split(".")[0] for key in SETTINGS}
VERL = {key.removesuffix(".*").rstrip(".") for key in (*ROWS, *OLDER, *OLDER.values())}
"""Settings of verl, and sections of them."""
FOLDERS = "hwgrpo|backends|kernels|configs|benchmarks|scripts|tests|docs|hwgrpo_backends|hwgrpo_kernels"


def build(repo: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=repo, env=env, capture_output=True, text=True)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return a copy of what the site is built from, to be damaged."""
    shutil.copytree(DOCS, tmp_path / "docs")
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPO / "scripts" / "mkdocs_links.py", tmp_path / "scripts")
    shutil.copy(REPO / "mkdocs.yml", tmp_path)
    return tmp_path


def test_the_site_builds_and_asks_no_other_host(tmp_path: Path):
    done = build(REPO, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {file.parent.name for file in tmp_path.glob("*/index.html")}
    assert {page.stem for page in PAGES} - built == {"index"}
    for file in tmp_path.rglob("*.html"):
        asked = re.findall(
            r'<(?:script|img|iframe)[^>]* src="(https?:[^"]*)|<link[^>]* href="(https?:[^"]*)', file.read_text()
        )
        assert asked == [], file
        assert "../benchmarks" not in file.read_text()


@pytest.mark.parametrize("damage", ["[gone](gone.md)", "[gone](grpo.md#gone)"], ids=["a page", "a heading"])
def test_a_link_that_leads_nowhere_ends_the_build(damage: str, copied: Path):
    with (copied / "docs" / "index.md").open("a") as file:
        file.write(f"\n{damage}\n")
    done = build(copied, copied / "site")
    assert done.returncode != 0
    assert "gone" in done.stdout + done.stderr


def test_a_page_that_the_navigation_lacks_ends_the_build(copied: Path):
    (copied / "docs" / "forgotten.md").write_text("# Forgotten\n")
    done = build(copied, copied / "site")
    assert done.returncode != 0
    assert "forgotten.md" in done.stdout + done.stderr


@pytest.mark.parametrize("file", [*PAGES, *OTHERS], ids=lambda file: file.name)
def test_links_lead_to_files_and_headings(file: Path):
    text = file.read_text(encoding="utf-8")
    for target in links(text):
        path, _, anchor = target.partition("#")
        there = (file.parent / path).resolve() if path else file
        assert there.exists(), target
        assert not anchor or anchor in anchors(there.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_the_settings_that_a_page_names_are_there(file: Path):
    named = re.findall(r"`([a-z_]+\.[a-z_.]+)(?:=[^`]*)?`", FENCED.sub("", file.read_text(encoding="utf-8")))
    own = {name.partition(".kwargs.")[0] for name in named if name.split(".")[0] in SECTIONS}
    files = {name for name in own if name.endswith((".json", ".md", ".py"))}
    columns = set(GROUND_TRUTH_KEYS)  # verl's has the name of a section
    assert own - files - columns - SETTINGS - SECTIONS - VERL == set()


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_the_files_that_a_page_names_are_there(file: Path):
    text = file.read_text(encoding="utf-8")
    for path, name in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)(?::(\w+))?`", text):
        places = [REPO / path, REPO / "backends" / path, REPO / "kernels" / path]
        found = [place for place in places if place.exists()]
        assert found, path
        assert not name or re.search(rf"^(def|class) {name}\b|^{name}\b", found[0].read_text(), re.MULTILINE), name


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_lists_and_tables_are_set_off_by_an_empty_line(file: Path):
    """Without it the site shows them as one paragraph."""
    lines = FENCED.sub("", file.read_text(encoding="utf-8")).splitlines()
    for before, line in itertools.pairwise(lines):
        begins = re.match(r"- |\d+\. |\|", line)
        goes_on = re.match(r"- |\d+\. |\||  ", before)
        assert not (begins and before.strip() and not goes_on), line


def test_the_first_page_leads_to_every_page_and_names_every_command():
    text = page("index.md")
    assert {link.partition("#")[0] for link in links(text)} == {file.name for file in PAGES} - {"index.md"}
    assert set(re.findall(r"^\| `hwgrpo ([\w-]+)", text, flags=re.MULTILINE)) == set(COMMANDS)
