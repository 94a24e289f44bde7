"""Images on the page: each distinct one once, within a limit, beside their prompt or turn, and no other file."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from hwgrpo.cli.main import main
from hwgrpo.data.thumbnails import make_thumbnail
from hwgrpo.observe.logged_images import LoggedImages
from hwgrpo.report.compact_completions import read_completions
from hwgrpo.report.page import write_report
from tests.report.chromium import Browser


def logged(folder: Path, *images: Image.Image):
    return LoggedImages(folder / "images", 100).records([make_thumbnail(image) for image in images])


def line(uid="0:1", **values):
    return {
        "step": 1,
        "uid": uid,
        "prompt": "p",
        "response": "yes",
        "reward": 1.0,
        "advantage": 0.5,
        "length": 1,
        **values,
    }


def pixel(source: str) -> tuple[int, ...]:
    content = base64.b64decode(source.partition(",")[2])
    found = Image.open(io.BytesIO(content)).convert("RGB").getpixel((0, 0))
    assert isinstance(found, tuple)
    return found


RED, BLUE = Image.new("RGB", (40, 30), "red"), Image.new("RGB", (640, 480), "blue")
TURNS = [
    {"role": "assistant", "content": "look"},
    {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]},
    {"role": "assistant", "content": "more"},
]


def test_a_group_has_its_images_and_each_distinct_one_is_kept_once(make_run):
    folder = make_run(None, None)
    red, blue = logged(folder, RED, BLUE)
    make_run(None, [line(images=[red, blue]), line(images=[red, blue]), line("0:2"), line("0:3", images=[blue])])
    data = read_completions(folder, 100)
    assert data["groups"]["images"] == {0: [0, 1], 2: [1]}
    assert [(pixel(source), *size) for source, *size in data["images"]] == [
        ((255, 0, 0), 40, 30),
        ((0, 0, 255), 640, 480),
    ]
    assert (data["images_left"], data["rows"]["images"]) == (0, {})


def test_turns_have_the_images_that_they_show_and_a_response_the_others(make_run):
    folder = make_run(None, None)
    images = logged(folder, RED, BLUE, Image.new("RGB", (9, 9), "green"))
    outcome = {"messages": TURNS, "stop": "done", "turn_rewards": [0, 1]}
    make_run(None, [line(observed_images=images, outcome=outcome), line(observed_images=images[:1])])
    rows = read_completions(folder, 100)["rows"]
    turns = rows["outcomes"][0]["turns"]
    assert [turn.get("images") for turn in turns] == [None, [0, 1], None]
    assert turns[1]["text"] == "a"
    assert rows["images"] == {0: [2], 1: [0]}


def test_images_beyond_the_limit_are_counted_and_have_their_size_alone(make_run):
    folder = make_run(None, None)
    first, second = logged(folder, Image.effect_noise((300, 300), 90).convert("RGB"), BLUE)
    make_run(None, [line(images=[first, second])])
    size = (folder / first["file"]).stat().st_size
    assert (folder / second["file"]).stat().st_size < size
    for limit, kept in ((0, [False, False]), (size - 1, [False, True]), (size, [True, False]), (2 * size, [True] * 2)):
        data = read_completions(folder, 100, limit)
        assert [source is not None for source, *_ in data["images"]] == kept
        assert data["images_left"] == kept.count(False)
        assert data["images"][1][1:] == (640, 480)


def test_a_stranger_s_folder_shows_no_other_file(make_run, tmp_path):
    folder = make_run(None, None)
    secret = tmp_path / "secret.png"
    BLUE.save(secret)
    [red] = logged(folder, RED)
    name = "0" * 24
    (folder / "images" / f"{name}.png").symlink_to(secret)
    (folder / "images" / f"{'1' * 24}.png").write_text("<svg onload=alert(1)>")
    (folder / "images" / f"{'2' * 24}.png").write_bytes(secret.read_bytes() + bytes(2 << 20))
    files = [f"images/{digit * 24}.png" for digit in "0123"]
    files += [
        str(secret),
        "../secret.png",
        f"images/../images/{name}.png",
        "images/",
        "images/../../secret.png",
        7,
        None,
        ["a"],
    ]
    make_run(None, [line(images=[{"file": file} for file in files] + [red])])
    images = read_completions(folder, 100)["images"]
    assert [source is not None for source, *_ in images] == [False] * len(files) + [True]
    (folder / "images").rename(tmp_path / "moved")
    (folder / "images").symlink_to(tmp_path / "moved")
    assert not any(source for source, *_ in read_completions(folder, 100)["images"])


@pytest.mark.parametrize("size", ["-1", "nan", "inf"])
def test_a_size_that_is_none_is_refused(make_run, capsys, size):
    assert main(["report", str(make_run([{"step": 1}])), "--image-mb", size]) == 2
    assert "--image-mb" in capsys.readouterr().err


def test_the_command_limits_the_images(make_run):
    folder = make_run([{"step": 1, "reward": 1.0}], None)
    make_run(None, [line(images=logged(folder, RED))])
    for size, found in (("0", False), ("1", True)):
        assert main(["report", str(folder), "--image-mb", size]) == 0
        assert ("data:image/png;base64," in (folder / "report.html").read_text()) == found


@pytest.mark.slow
def test_a_browser_draws_the_images_beside_prompt_and_turn(make_run):
    folder = make_run([{"step": 1, "reward": 1.0}], None)
    red, blue = logged(folder, RED, BLUE)
    missing = {"file": None, "width": 1920, "height": 1080}
    outcome = {"messages": TURNS, "stop": "done", "turn_rewards": [0, 1]}
    completions = [line(images=[red, blue, missing], outcome=outcome, observed_images=[blue, red]), line("0:2")]
    make_run(None, completions)
    write_report(folder, folder / "report.html")
    with Browser() as browser:
        browser.open(folder / "report.html", tab="groups")
        browser.wait_for("document.images.length === 5 && [...document.images].every((each) => each.naturalWidth > 0)")
        assert browser.evaluate("[...document.querySelectorAll('.detail img')].map((each) => each.naturalWidth)") == [
            *(40, 256),
            *(256, 40),
        ]
        assert browser.texts(".detail > .pictures figcaption") == ["1: 40 × 30", "2: 640 × 480", "3: 1,920 × 1,080"]
        assert browser.texts(".unseen") == ["no thumbnail"]
        assert browser.texts(".turn.tool figcaption") == ["1: 640 × 480", "2: 40 × 30"]
        assert browser.evaluate("document.querySelectorAll('.row > img').length") == 1
        browser.evaluate("document.querySelectorAll('.row')[1].click()")
        browser.settle()
        [shown] = browser.texts(".detail")
        assert "Promptp1 completion" in shown, "nothing stands where there are no images"
        assert browser.complaints() == []
