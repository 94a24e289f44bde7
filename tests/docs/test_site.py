"""The documentation builds as a site without a warning, and links and names on its pages lead to what is there."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from hwgrpo.cli.main import COMMANDS
from hwgrpo.config.document import entries
from hwgrpo.data.row_schema import GROUND_TRUTH_KEYS
from hwgrpo.migrate.tables.verl_names import OLDER, ROWS
from tests.docs.pages import DOCS, FENCED, REPO, anchors, links, page

PAGES = sorted(DOCS.rglob("*.md"))
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


def test_the_site_builds_and_asks_no_other_host(tmp_path: Path):
    done = build(REPO, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {file.parent.name for file in tmp_path.rglob("index.html")}
    assert {page.stem for page in PAGES} - built == {"index"}
    for file in tmp_path.rglob("*.html"):
        asked = re.findall(
            r'<(?:script|img|iframe)[^>]* src="(https?:[^"]*)|<link[^>]* href="(https?:[^"]*)', file.read_text()
        )
        assert asked == [], file
        assert "../benchmarks" not in file.read_text()


def texts(files: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Yield each page and its text."""
    for file in files:
        yield file, file.read_text(encoding="utf-8")


def test_links_lead_to_files_and_headings():
    for file, text in texts([*PAGES, *OTHERS]):
        for target in links(text):
            path, _, anchor = target.partition("#")
            there = (file.parent / path).resolve() if path else file
            assert there.exists(), (file.name, target)
            assert not anchor or anchor in anchors(there.read_text(encoding="utf-8")), (file.name, target)


def test_the_settings_that_pages_name_are_there():
    columns = set(GROUND_TRUTH_KEYS)  # verl's has the name of a section
    for file, text in texts(PAGES):
        named = re.findall(r"`([a-z_]+\.[a-z_.]+)(?:=[^`]*)?`", FENCED.sub("", text))
        own = {name.partition(".kwargs.")[0] for name in named if name.split(".")[0] in SECTIONS}
        files = {name for name in own if name.endswith((".json", ".md", ".py"))}
        assert own - files - columns - SETTINGS - SECTIONS - VERL == set(), file.name


def test_the_files_that_pages_name_are_there():
    for file, text in texts(PAGES):
        for path, name in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)(?::(\w+))?`", text):
            places = [REPO / path, REPO / "backends" / path, REPO / "kernels" / path]
            found = [place for place in places if place.exists()]
            assert found, (file.name, path)
            defined = rf"^(def|class) {name}\b|^{name}\b"
            assert not name or re.search(defined, found[0].read_text(), re.MULTILINE), (file.name, name)


def test_lists_and_tables_are_set_off_by_an_empty_line():
    """Without it the site shows them as one paragraph."""
    for file, text in texts(PAGES):
        for before, line in itertools.pairwise(FENCED.sub("", text).splitlines()):
            begins = re.match(r"- |\d+\. |\|", line)
            goes_on = re.match(r"- |\d+\. |\||  ", before)
            assert not (begins and before.strip() and not goes_on), (file.name, line)


def test_the_first_page_leads_to_every_page_and_names_every_command():
    text = page("index.md")
    pages = {file.relative_to(DOCS).as_posix() for file in PAGES} - {"index.md"}
    assert {link.partition("#")[0] for link in links(text)} == pages
    assert set(re.findall(r"^\| `hwgrpo ([\w-]+)", text, flags=re.MULTILINE)) == set(COMMANDS)
