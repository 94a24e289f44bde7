"""Draw the README's pictures from a run of `hwgrpo train tiny_sort`, and print the run's final summary.

    python scripts/draw_readme_pictures.py                   # docs/images/live.svg and docs/images/report.png
    python scripts/draw_readme_pictures.py --smoke           # 8 steps, into a temporary folder

`live.svg` is the live panel in the middle of the run; `report.png` is the report page in a headless Chromium.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / folder) for folder in (".", "backends", "kernels")]

from rich.console import Console  # noqa: E402
from rich.terminal_theme import MONOKAI  # noqa: E402

from hwgrpo.cli.main import main as hwgrpo  # noqa: E402
from hwgrpo.observe.completions import Sample  # noqa: E402
from hwgrpo.observe.console import panel  # noqa: E402
from hwgrpo.observe.summary import plain_summary  # noqa: E402
from tests.report.chromium import Browser  # noqa: E402

IMAGES = REPO / "docs" / "images"
COLUMNS = 112
PAGE = (1280, 1040)
"""Pixels of the report's picture."""
SETTINGS = ["trainer.validate_every=10"]
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }}
.{unique_id}-title {{ font: bold 18px system-ui, sans-serif }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""rich's SVG template without the fonts that it loads from the network."""


class RecordedPanel(panel.LivePanel):
    """The live panel of a run, drawn into a file at one step."""

    picture: Path
    at_step: int

    def __init__(self, console: Console, title: str, total_steps: int) -> None:
        self._recorder = Console(
            record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor"
        )
        super().__init__(Console(file=io.StringIO()), title, total_steps)

    def step(self, step: int, values: Mapping[str, Any], sample: Sample | None) -> None:
        super().step(step, values, sample)
        if step == self.at_step:
            self._recorder.print(self.view)
            text = self._recorder.export_svg(
                title=" ".join(["hwgrpo train tiny_sort", *SETTINGS]), theme=MONOKAI, code_format=SVG, unique_id="live"
            )
            self.picture.write_text(text, encoding="utf-8")

    def summary(self, summary: Mapping[str, Any]) -> None:
        self.close()
        print(plain_summary(summary))


def draw(images: Path, run: Path, settings: Sequence[str], at_step: int) -> None:
    """Train in the folder `run` and write both pictures."""
    RecordedPanel.picture, RecordedPanel.at_step = images / "live.svg", at_step
    panel.LivePanel = RecordedPanel
    try:
        code = hwgrpo(
            ["train", "tiny_sort", f"trainer.output_dir={run}", "observe.progress=rich", *SETTINGS, *settings]
        )
    finally:
        panel.LivePanel = RecordedPanel.__base__
    if code or hwgrpo(["report", str(run)]):
        sys.exit("the run or its report failed")
    with Browser() as browser:
        browser.open(run / "report.html", width=PAGE[0], height=PAGE[1])
        browser.screenshot(images / "report.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="8 steps, drawn into a temporary folder")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # so that the pictures show the folder name that readers get: runs/tiny_sort
        images = Path(folder) if options.smoke else IMAGES
        images.mkdir(exist_ok=True)
        draw(
            images, Path("runs/tiny_sort"), ["trainer.max_steps=8"] if options.smoke else [], 4 if options.smoke else 30
        )
        for file in (images / "live.svg", images / "report.png"):
            print(f"{file}: {file.stat().st_size / 1000:.0f} kB")
        os.chdir(REPO)
    return 0


if __name__ == "__main__":
    sys.exit(main())
