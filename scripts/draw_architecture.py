"""Draw the layers of hwgrpo and their imports: docs/architecture.svg.

    .venv/bin/python scripts/draw_architecture.py            # writes the picture
    .venv/bin/python scripts/draw_architecture.py --check    # exits with 1 if the picture is out of date

The layers and their order are those of the import contracts in pyproject.toml; the imports are read from the code.
"""

from __future__ import annotations

import re
import sys
import textwrap
import tomllib
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import grimp

REPO = Path(__file__).resolve().parent.parent
PICTURE = REPO / "docs" / "architecture.svg"
CORE, INSIDE = "hwgrpo", "hwgrpo.training"
BELOW = ("hwgrpo_backends", "hwgrpo_kernels")
WIDTH, MARGIN, GAP, LINE, NAME = 960, 12, 8, 15, 22
STYLE = """
    text { font: 12px sans-serif; fill: #333 } .name { font: bold 14px sans-serif; fill: #111 }
    rect { fill: #f3f6fa; stroke: #8aa0b8 } .inside { fill: #fff } .below { fill: #eef7ee; stroke: #86ab86 }
"""


def layers(container: str) -> list[list[str]]:
    """Return the packages of each layer, from top to bottom, by the import contract for `container`."""
    settings = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    [contract] = [each for each in settings["contracts"] if each.get("containers") == [container]]
    return [[name.strip("() ") for name in re.split("[|:]", layer)] for layer in contract["layers"]]


def imports(graph: grimp.ImportGraph, container: str) -> dict[str, list[str]]:
    """Return box -> imported boxes, for the packages of a container and the two lower packages."""
    boxes = {name: f"{container}.{name}" for layer in layers(container) for name in layer} | {
        name: name for name in BELOW
    }
    modules = {box: {package, *graph.find_descendants(package)} for box, package in boxes.items()}
    imported_boxes = {}
    for box, own in modules.items():
        imported = {target for module in own for target in graph.find_modules_directly_imported_by(module)}
        imported_boxes[box] = [other for other, theirs in modules.items() if other != box and imported & theirs]
    return imported_boxes


def box(svg: Element, x: float, y: float, width: float, height: float, kind: str, name: str, lines: list[str]) -> None:
    """Draw a box with its name and lines of text."""
    size = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}", "rx": "4"}
    SubElement(svg, "rect", size | {"class": kind})
    SubElement(svg, "text", {"x": f"{x + 8:g}", "y": f"{y + NAME - 4:g}", "class": "name"}).text = name
    for i, line in enumerate(lines):
        SubElement(svg, "text", {"x": f"{x + 8:g}", "y": f"{y + NAME + 12 + LINE * i:g}"}).text = line


def rows(svg: Element, x: float, y: float, width: float, container: str, graph: grimp.ImportGraph, kind: str) -> float:
    """Draw the layers of a container below each other and return the y coordinate below the last one."""
    imported = imports(graph, container)
    top_layer = layers(container)[0]
    for layer in layers(container):
        if container == INSIDE and layer == top_layer:
            layer = [", ".join(layer)]
            imported[layer[0]] = sorted({each for name in top_layer for each in imported[name]} - {*top_layer})
        each = (width - GAP * (len(layer) - 1)) / len(layer)
        wrapped = [
            textwrap.wrap("imports " + (", ".join(imported[name]) or "nothing here"), int(each / 6.6)) for name in layer
        ]
        height = NAME + LINE * max(map(len, wrapped)) + 6
        inner = INSIDE.rpartition(".")[2]
        for i, (name, lines) in enumerate(zip(layer, wrapped, strict=True)):
            left = x + i * (each + GAP)
            if container == CORE and name == inner:
                top = y + height
                end = rows(svg_inside := Element("g"), left + 8, top, each - 16, INSIDE, graph, "inside")
                height = end - y
                box(svg, left, y, each, height, kind, name, lines)
                svg.append(svg_inside)
            else:
                box(svg, left, y, each, height, kind, name, lines)
        y += height + GAP
    return y


def draw() -> str:
    """Return the picture."""
    graph = grimp.build_graph(CORE, *BELOW, include_external_packages=False, cache_dir=None)
    svg = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"})
    SubElement(svg, "title").text = "The layers of hwgrpo, each importing only those below it"
    SubElement(svg, "style").text = STYLE
    y = rows(svg, MARGIN, MARGIN, WIDTH - 2 * MARGIN, CORE, graph, "layer")
    each = (WIDTH - 2 * MARGIN - GAP) / 2
    for i, name in enumerate(BELOW):
        box(svg, MARGIN + i * (each + GAP), y, each, NAME + LINE + 6, "below", name, ["imports nothing of hwgrpo"])
    y += NAME + LINE + 6 + MARGIN
    svg.set("viewBox", f"0 0 {WIDTH} {y:g}")
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def main(arguments: list[str]) -> int:
    """Write the picture, or check that it is current."""
    picture = draw()
    if arguments == ["--check"]:
        if PICTURE.is_file() and PICTURE.read_text(encoding="utf-8") == picture:
            return 0
        print(f"{PICTURE.relative_to(REPO)} is out of date: run .venv/bin/python scripts/draw_architecture.py")
        return 1
    PICTURE.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
