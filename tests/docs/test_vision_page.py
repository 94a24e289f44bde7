"""The page about images in prompts: its commands run and print what it shows, its figures are the code's."""

import re
import shlex

import pyarrow
import pyarrow.parquet
import pytest

from hwgrpo.cli.main import main
from hwgrpo.config.document import entries
from hwgrpo.data.image_urls import SECONDS
from hwgrpo.data.images import BOMB_PIXELS, FORMATS, LONGEST_RATIO, PAYLOADS
from hwgrpo.models.vision import UNSUPPORTED
from tests.docs.pages import blocks, code, page, table
from tests.support.models.tiny_image_prompts import picture
from tests.support.models.vision_families import VISION_FAMILIES

PAGE = page("vision.md")


def run(block, capsys):
    """Run the commands of a block; return what the last one printed."""
    for command in re.findall(r"^hwgrpo (.*)$", block, re.MULTILINE):
        capsys.readouterr()
        assert main(shlex.split(command)) == 0, command
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_rows_of_the_page_are_inspected_as_it_shows(capsys):
    block = blocks(PAGE, "bash")[0]
    [(name, program)] = re.findall(r"^cat > (\S+) <<'(?:END_OF_FILE)'\n(.*?)^END_OF_FILE$", block, re.M | re.S)
    assert f"python {name}" in block
    exec(compile(program, name, "exec"), {})
    expected = blocks(PAGE, "text")[0].splitlines()
    assert run(block, capsys)[: len(expected)] == expected


def test_geometry_is_converted_and_inspected(here, capsys):
    folder = here / "geometry3k" / "data"
    folder.mkdir(parents=True)
    row = {"problem": "<image>Find x.", "answer": "3", "images": [{"bytes": picture(), "path": None}]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "train-00000-of-00001.parquet")
    assert "data/geo3k/train.parquet: 1 rows, none bad" in run(blocks(PAGE, "bash")[1], capsys)


def test_figures_and_names_are_those_of_the_code():
    defaults = {entry.key: entry.default for entry in entries()}
    rows = table(PAGE, "setting", "default")
    assert len(rows) == 3
    for row in rows:
        assert float(row["default"].replace(",", "")) == float(defaults[code(row["setting"])[0]])
    assert f"more than {BOMB_PIXELS:,} pixels" in PAGE
    assert f"a ratio of {LONGEST_RATIO} or more" in PAGE
    assert f"within {SECONDS:g} s" in PAGE
    [formats] = re.findall(r"^(PNG.*) are read\.", PAGE, re.MULTILINE)
    assert {name.upper() for name in re.findall(r"\w+", formats)} == {*FORMATS, "AND"}
    named = {name for row in table(PAGE, "in the column, or in a block") for name in re.findall(r'"(\w+)":', str(row))}
    assert named == {*PAYLOADS}


def test_families_and_refused_types_are_those_of_the_code():
    rows = {row["family"]: (row["`model_type`"].strip("`"), row["layout"]) for row in table(PAGE, "family", "layout")}
    families = {name: (each.config().model_type, each.layouts[0]) for name, each in VISION_FAMILIES.items()}
    assert rows == families
    assert {row["`model_type`"].strip("`"): row["why not"] for row in table(PAGE, "why not")} == UNSUPPORTED
