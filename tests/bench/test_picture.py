"""The picture of `hwgrpo bench compare --svg`."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from hwgrpo.bench.kernels import bar_chart
from hwgrpo.bench.kernels.bar_chart import draw_comparison
from hwgrpo.bench.kernels.compare import compare_documents
from hwgrpo.cli.main import main

SVG = "{http://www.w3.org/2000/svg}"
REPO = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def side(name: str, seconds: float | None, group: str = "ours") -> dict[str, Any]:
    return {"name": name, "group": group, "median_s": seconds, "share_of_ceiling": 0.5}


def document(cases: dict[str, list[dict[str, Any]]], device: str = "a chip", vocab: int = 3) -> dict[str, Any]:
    found = [{"name": name, "sides": sides} for name, sides in cases.items()]
    return {
        "schema": "hwgrpo.bench.kernels/1",
        "machine": {"device": device, "backend": "cpu", "arch": "x", "torch": "2", "hwgrpo": "0"},
        "dtype": "float32",
        "clock": "processor",
        "ceiling": {"flops_per_s": 1e12},
        "shapes": [{"name": "A", "N": 1, "H": 2, "V": vocab, "cases": found}],
    }


def draw(*documents: dict[str, Any]) -> Element:
    drawn = draw_comparison([f"{n}.json" for n in range(len(documents))], documents, compare_documents(*documents))
    assert drawn is not None
    return ElementTree.fromstring(drawn)


def bars(svg: Element) -> list[tuple[str, float, float]]:
    """Return (colour, y, width) of each bar."""
    found = (each for each in svg.iter(f"{SVG}rect") if each.get("class", "").startswith("bar "))
    return [(each.attrib["class"].split()[1], float(each.attrib["y"]), float(each.attrib["width"])) for each in found]


def texts(svg: Element) -> list[str]:
    return ["|".join(each.itertext()) for each in svg.iter(f"{SVG}text")]


def test_there_is_a_bar_per_case_and_chip_in_the_chip_s_colour_whose_length_is_its_time():
    cases = [f"case{number}" for number in range(12)]
    times = (0.4, 0.1, 0.2, 0.8)
    svg = draw(*(document({case: [side("torch", seconds)] for case in cases}) for seconds in times))
    found = bars(svg)
    assert [color for color, *_ in found] == ["c1", "c2", "c3", "c4"] * 12
    assert [width / bar_chart.LONGEST for *_, width in found[:4]] == pytest.approx([0.5, 0.125, 0.25, 1.0], abs=0.01)
    assert [text for text in texts(svg) if text in cases] == cases


def test_a_bar_is_of_our_fastest_and_says_its_time_its_name_and_how_many_times_as_fast_as_the_first():
    first = document({"c": [side("slow", 9.0), side("torch", 2.0), side("eager", 0.1, "baseline")]})
    second = document({"c": [side("triton", 0.004), side("torch", 0.5), side("TRL", 0.001, "peer")]})
    assert {"2,000 ms|torch", "4.00 ms|500x|triton"} <= set(texts(draw(first, second)))


def test_a_chip_that_lacks_a_case_is_named_in_its_place():
    svg = draw(document({"c": [side("torch", 1.0)], "d": [side("torch", 1.0)]}), document({"c": [side("torch", 1.0)]}))
    assert [color for color, *_ in bars(svg)] == ["c1", "c2", "c1"]
    assert texts(svg).count("not in B") == 1


def test_nothing_lies_on_something_else_and_all_is_within_the_picture():
    cases = {f"{'long' * 9}{number}": [side("long" * 9, 1234.5 / 7**number)] for number in range(12)}
    svg = draw(*(document(cases, device="chip " * 40) for _ in range(4)))
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    rows = sorted({(y, y + bar_chart.THICK) for _, y, _ in bars(svg)})
    assert len(rows) == 48
    assert all(before[1] < after[0] for before, after in pairwise(rows))
    lines = sorted(float(each.attrib["y"]) for each in svg.iter(f"{SVG}text") if each.get("x") == str(bar_chart.MARGIN))
    assert all(after - before >= 12 for before, after in pairwise(lines))
    for each in svg.iter(f"{SVG}text"):
        parts = [each.text or "", *(part.text or "" for part in each.iter(f"{SVG}tspan"))]
        x = float(each.attrib["x"])
        end = x + 7.4 * sum(map(len, parts)) + 8 * (len(parts) - 1)  # DejaVu Sans, a wide one, in 12px
        assert end < (bar_chart.BARS if parts[0].startswith("long") else width), parts
        assert float(each.attrib["y"]) < height - 4


def test_names_are_escaped_and_control_characters_are_none_of_xml_s():
    odd = '<script>"&\x00\x1b\ud800</script>'
    svg = draw(*(document({odd: [side(odd, 1.0)]}, device=odd) for _ in range(2)))
    assert not list(svg.iter(f"{SVG}script"))
    assert '<script>"&???</script>' in texts(svg)
    assert any(text.startswith('<script>"&???</script> (cpu, x), float32') for text in texts(svg))


def test_it_has_colours_for_light_and_dark_ground_and_they_are_the_report_s():
    style = draw(*[document({"c": [side("torch", 1.0)]})] * 2).findtext(f"{SVG}style") or ""
    light, dark = style.split("@media(prefers-color-scheme:dark)")
    report = (REPO / "hwgrpo/report/assets/page.css").read_text(encoding="utf-8")
    for number in range(1, 5):
        colors = re.search(rf"--s{number}: light-dark\((#\w+), (#\w+)\)", report)
        assert colors is not None
        assert f".c{number}{{fill:{colors[1]}}}" in light
        assert f".c{number}{{fill:{colors[2]}}}" in dark
    assert ".ground{fill:#ffffff}" in light
    assert ".ground{fill:#181c23}" in dark


def test_it_loads_nothing_from_elsewhere():
    drawn = ElementTree.tostring(draw(*[document({"c": [side("torch", 1.0)]})] * 2), encoding="unicode")
    assert set(re.findall(r"https?://[^\"]+", drawn)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in drawn
    assert "@import" not in drawn


def command(*words: str) -> int:
    for name, seconds in (("a", 1.0), ("b", 2.0)):
        Path(f"{name}.json").write_text(json.dumps(document({"row_stats": [side("torch", seconds)]})))
    return main(["bench", "compare", "a.json", "b.json", *words])


def test_the_command_writes_it_beside_the_table(capsys: pytest.CaptureFixture[str]):
    assert command("--svg", "both.svg") == 0
    shown = capsys.readouterr().out
    assert "0.50x" in shown
    assert shown.endswith("wrote both.svg\n")
    assert len(bars(ElementTree.parse("both.svg").getroot())) == 2


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--svg", "a.json"], ["--svg a.json", "already exists", "remove it first"]),
        (
            ["--svg", "no/such/folder/x.svg"],
            ["--svg no/such/folder/x.svg cannot be written", "existing, writable folder"],
        ),
        (["--svg", "."], ["--svg . cannot be written", "use a file"]),
        (["--svg", "c.svg", "--json", "c.svg"], ["--svg c.svg", "--json"]),
    ],
)
def test_a_file_that_cannot_be_written_or_is_there_is_refused_before_anything_is_shown(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
):
    assert command(*words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    for part in parts:
        assert part in shown.err.strip().splitlines()[-1]
    assert json.loads(Path("a.json").read_text())["schema"] == "hwgrpo.bench.kernels/1"
    assert not Path("c.svg").exists()


@pytest.mark.parametrize(
    "other", [document({"row_stats": [side("torch", 1.0)]}, vocab=4), document({"d": [side("x", 1)]})]
)
def test_without_a_case_in_common_nothing_is_drawn(other: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    Path("a.json").write_text(json.dumps(document({"row_stats": [side("torch", 1.0)]})))
    Path("b.json").write_text(json.dumps(other))
    assert main(["bench", "compare", "a.json", "b.json", "--svg", "c.svg"]) == 2
    assert "--svg c.svg: no case was timed in two of these files at one shape" in capsys.readouterr().err
    assert not Path("c.svg").exists()
