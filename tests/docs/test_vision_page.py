"""The page about images in prompts: its commands run and print what it shows, its figures are the code's."""

import base64
import io
import json
import re
import shlex

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from hwgrpo.agents.tool_results import pack_result, unpack_result
from hwgrpo.agents.tool_schema import make_schema
from hwgrpo.cli.main import main
from hwgrpo.config.document import entries
from hwgrpo.config.schema import VISION_PARTS
from hwgrpo.data.image_urls import SECONDS
from hwgrpo.data.images import BOMB_PIXELS, FORMATS, LONGEST_RATIO, PAYLOADS
from hwgrpo.data.thumbnails import LONGEST_SIDE
from hwgrpo.models.vision import MOST_REMEMBERED, UNSUPPORTED
from hwgrpo.report.inlined_images import MOST_BYTES
from hwgrpo.rollout.local.architectures import predict_fallback
from hwgrpo.support.framed_messages import MAX_MESSAGE_BYTES
from tests.docs.pages import blocks, code, page, section, table
from tests.support.models.tiny_image_prompts import picture
from tests.support.models.vision_families import VISION_FAMILIES

PAGE = page("vision.md")


QUICK = ("data.validation_max_rows=8", "trainer.validation_n=0")


def run(block, capsys, *overrides):
    """Run the commands of a block, `train` with overrides; return what the last one printed."""
    for command in re.findall(r"^hwgrpo (.*)$", block, re.MULTILINE):
        capsys.readouterr()
        assert main([*shlex.split(command), *(overrides if command.startswith("train ") else ())]) == 0, command
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_rows():
    """Write the rows of the page; return the block that does."""
    [block] = blocks(section(PAGE, "Data"), "bash")
    [(name, program)] = re.findall(r"^cat > (\S+) <<'(?:END_OF_FILE)'\n(.*?)^END_OF_FILE$", block, re.M | re.S)
    assert f"python {name}" in block
    exec(compile(program, name, "exec"), {})
    return block


def test_the_tool_that_shows_a_part_of_a_picture_is_described_and_called(here):
    made: dict = {}
    [program] = blocks(section(PAGE, "Turns that show images"), "python")
    exec(program, made)
    make_schema(made["crop"], {}, "the page")
    (here / "a.png").write_bytes(picture(64, 48))
    result = unpack_result(pack_result(made["crop"]("a.png", 8, 4, 24, 14), 100, "middle"), 0.0)
    [block] = result.blocks
    assert (result.text, Image.open(io.BytesIO(base64.b64decode(block["base64"]))).size) == ("16 x 10:", (32, 20))
    assert f"{MAX_MESSAGE_BYTES >> 20} MiB at most for a result" in PAGE


def test_a_trained_model_is_reported_evaluated_and_asked_about_an_image(here, capsys, monkeypatch):
    make_rows()
    run(section(PAGE, "Images in prompts"), capsys, "model.path=builtin://tiny?task=squares&steps=2&batch=4", *QUICK)
    monkeypatch.setattr("sys.stdin", io.StringIO("what?\n"))
    shown = run(section(PAGE, "What you see"), capsys)
    assert shown[0] == f"image {here / '0.png'}"
    assert shown[-1].startswith("policy: ")
    assert [*(here / "out-images").iterdir()]
    assert "data:image/png;base64," in (here / "runs/squares/report.html").read_text()
    [most] = re.findall(r"`observe.logged_images` \((\d+); 0: none\)", PAGE)
    assert int(most) == int({entry.key: entry.default for entry in entries()}["observe.logged_images"])
    assert f"Beyond {MOST_BYTES >> 20} MiB (`--image-mb`)" in PAGE
    assert f"at most {LONGEST_SIDE} pixels" in PAGE


def test_a_policy_that_looks_is_trained(capsys):
    look = section(PAGE, "Turns that show images")
    run(look, capsys, "model.path=builtin://tiny?task=look&steps=2&batch=4", *QUICK)


def test_the_rows_of_the_page_are_inspected_as_it_shows(capsys):
    block = make_rows()
    expected = blocks(PAGE, "text")[0].splitlines()
    assert run(block, capsys)[: len(expected)] == expected


def test_geometry_is_converted_and_inspected(here, capsys):
    folder = here / "geometry3k" / "data"
    folder.mkdir(parents=True)
    row = {"problem": "<image>Find x.", "answer": "3", "images": [{"bytes": picture(), "path": None}]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "train-00000-of-00001.parquet")
    assert "data/geo3k/train.parquet: 1 rows, none bad" in run(blocks(section(PAGE, "Geometry3K"), "bash")[0], capsys)
    run(blocks(section(PAGE, "Geometry3K"), "bash")[1], capsys)


def test_what_a_plan_counts_is_what_the_command_prints(capsys):
    rows = table(PAGE, "seconds of encoding in a step")
    assert [code(row["`model.train_vision`"]) for row in rows] == [[part] for part in VISION_PARTS]
    [command] = re.findall(r"^hwgrpo (plan .*)$", section(PAGE, "Geometry3K"), re.MULTILINE)
    for row, part in zip(rows, VISION_PARTS, strict=True):
        capsys.readouterr()
        assert main([*shlex.split(command), f"model.train_vision={part}", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        [chip] = plan["chips"]
        update = chip["components"]["update"]
        [activations] = [size for name, size in update.items() if "patches" in name] or [0]
        assert float(row["seconds of encoding in a step"]) == round(chip["seconds"]["images"], 1)
        assert float(row["GiB of activations of patches"]) == round(activations / 2**30, 2)
        assert f"each image has {plan['image_tokens']:,} tokens" in PAGE
    assert MOST_REMEMBERED == 2**30, "the page says 1 GiB"


def test_figures_and_names_are_those_of_the_code():
    defaults = {entry.key: entry.default for entry in entries()}
    rows = table(section(PAGE, "Data"), "setting", "default")
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
    rows = [
        (row["family"], row["`model_type`"].strip("`"), row["layout"], row["decoding"])
        for row in table(PAGE, "family", "layout")
    ]
    decoding = {True: "lean step", False: "own forward"}
    assert rows == [
        (name, each.config().model_type, each.layouts[0], decoding[predict_fallback(each.config(), 100) is None])
        for name, each in VISION_FAMILIES.items()
    ]
    assert {row["`model_type`"].strip("`"): row["why not"] for row in table(PAGE, "why not")} == UNSUPPORTED
