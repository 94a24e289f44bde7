"""Documents of `hwgrpo bench kernels` as one SVG picture: a group of bars per case, a colour per chip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from hwgrpo.bench.kernels.compare import LETTERS, Row, described, shared_shapes, shortened, unlike
from hwgrpo.bench.kernels.kernel_tables import milliseconds

WIDTH, MARGIN = 960, 24
BARS, LONGEST = 236, 420
"""Start of the bars, and length of the longest of a case; its label follows."""
PITCH, THICK, GAP = 19, 14, 14
"""From bar to bar, of a bar, and between cases."""
NAME, SIDE, LINE = 28, 16, 110
"""Maximum characters of a case, an implementation and a line, so that texts do not overlap."""

COLORS = (("#2463d6", "#6ea8ff"), ("#c2500a", "#ff9d57"), ("#12805c", "#4fd0a0"), ("#8b3fc4", "#c79bff"))
"""On light and on dark ground, the first four of a report's curves (page.css)."""
GROUND, TEXT, MUTED, WARN = (
    ("#ffffff", "#181c23"),
    ("#1b2028", "#e6e9ee"),
    ("#59626f", "#9aa4b2"),
    ("#8a5200", "#f0b85a"),
)
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", "DejaVu Sans", sans-serif'

Fastest = tuple[str, float]
"""An implementation and its median, in seconds."""


def draw_comparison(names: Sequence[str], documents: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> str | None:
    """Return an SVG of our fastest implementation of each case on each chip.

    Args:
        names: names of the documents.
        documents: from `read_document`.
        rows: from `compare_documents`.

    Returns:
        The picture, or None where no shape has a time of ours in two documents.
    """
    found = {shape: _fastest(rows, shape) for shape in shared_shapes(rows)}
    if not any(len([each for each in sides if each]) > 1 for cases in found.values() for sides in cases.values()):
        return None
    svg = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "width": str(WIDTH)})
    SubElement(svg, "title").text = "Kernels side by side"
    SubElement(svg, "style").text = _style()
    SubElement(svg, "rect", {"class": "ground", "width": "100%", "height": "100%"})
    y = _heading(svg, names, documents)
    for shape, cases in found.items():
        y += 30
        _text(svg, MARGIN, y, shape, "text bold")
        y += 12
        for case, sides in cases.items():
            _group(svg, y, case, sides)
            y += PITCH * len(sides) + GAP
    svg.set("height", str(y + MARGIN - GAP))
    svg.set("viewBox", f"0 0 {WIDTH} {y + MARGIN - GAP}")
    for child in svg:
        child.tail = "\n"
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _fastest(rows: Sequence[Row], shape: str) -> dict[str, list[Fastest | None]]:
    """Return case -> our fastest implementation in each document; without cases that none has one of."""
    found: dict[str, list[Fastest | None]] = {}
    for row in rows:
        if row.shape != shape:
            continue
        best = found.setdefault(row.case, [None] * len(row.found))
        for number, side in enumerate(row.found):
            if side is not None and side["group"] == "ours":
                before = best[number]
                if before is None or side["median_s"] < before[1]:
                    best[number] = row.side, side["median_s"]
    return {case: best for case, best in found.items() if any(best)}


def _heading(svg: Element, names: Sequence[str], documents: Sequence[Mapping[str, Any]]) -> int:
    """Draw the title and a key of the colours; return the lowest line's y."""
    y = MARGIN + 14
    _text(svg, MARGIN, y, "Kernels side by side", "text title")
    y += 22
    subtitle = (
        "Times of our fastest implementations, each case on its own scale: shorter is faster, 2x is twice as fast as A."
    )
    _text(svg, MARGIN, y, subtitle, "muted")
    if unlike(documents):
        y += 18
        _text(svg, MARGIN, y, "Dtypes or clocks differ, so the bars compare unlike things.", "warn")
    y += 10
    for number, (name, document) in enumerate(zip(names, documents, strict=True)):
        y += 18
        key = {"class": f"c{number + 1}", "x": str(MARGIN), "y": str(y - 10), "width": "11", "height": "11", "rx": "2"}
        SubElement(svg, "rect", key)
        _text(svg, MARGIN + 20, y, f"{LETTERS[number]}  {name}", "text bold")
        y += 16
        _text(svg, MARGIN + 20, y, described(document), "muted")
    return y


def _group(svg: Element, top: int, case: str, sides: Sequence[Fastest | None]) -> None:
    """Draw a case: its name, and a bar or a remark per document."""
    _text(svg, MARGIN, top + (PITCH * len(sides)) // 2 + 2, case, "text", NAME)
    longest = max(each[1] for each in sides if each)
    first = sides[0]
    for number, each in enumerate(sides):
        y = top + PITCH * number
        if each is None:
            _text(svg, BARS, y + 11, f"not in {LETTERS[number]}", "muted")
            continue
        side, seconds = each
        long = max(2.0, LONGEST * seconds / longest)
        place = {"x": str(BARS), "y": str(y), "width": f"{long:.1f}", "height": str(THICK), "rx": "2"}
        SubElement(svg, "rect", {"class": f"bar c{number + 1}", **place})
        label = _text(svg, round(BARS + long + 7, 1), y + 11, f"{milliseconds(seconds)} ms", "text")
        if first is not None and number:
            SubElement(label, "tspan", {"class": "bold", "dx": "8"}).text = _times(first[1] / seconds)
        SubElement(label, "tspan", {"class": "muted", "dx": "8"}).text = shortened(side, SIDE)


def _times(ratio: float) -> str:
    """Return a ratio with two digits at least: 0.012x, 0.51x, 1.51x, 15.1x, 1,510x."""
    digits = 0 if ratio >= 100 else 1 if ratio >= 10 else 2 if ratio >= 0.1 else 3
    return f"{ratio:,.{digits}f}x"


def _text(svg: Element, x: float, y: float, text: str, names: str, most: int = LINE) -> Element:
    """Add a line of text, cut to `most` characters; the tooltip has the full text."""
    element = SubElement(svg, "text", {"class": names, "x": str(x), "y": str(y)})
    element.text = shortened(text, most)
    if len(text) > most:
        SubElement(element, "title").text = shortened(text, len(text))
    return element


def _style() -> str:
    named = {"ground": GROUND, "text": TEXT, "muted": MUTED, "warn": WARN}
    named |= {f"c{number}": color for number, color in enumerate(COLORS, 1)}
    light, dark = ("".join(f".{name}{{fill:{colors[k]}}}" for name, colors in named.items()) for k in (0, 1))
    return (
        f"text{{font:12px {FONT};font-variant-numeric:tabular-nums;white-space:pre}}text.title{{font-size:18px}}"
        f".title,.bold{{font-weight:600}}{light}@media(prefers-color-scheme:dark){{{dark}}}"
    )
