"""`hwgrpo report`: write the report page of a run."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from hwgrpo.errors import ConfigError

HELP = "write one HTML page of a run: curves, groups of completions, configuration"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folder", metavar="RUN", help="folder of a run, finished or not")
    parser.add_argument("--output", metavar="FILE", help="file to write (default RUN/report.html)")
    parser.add_argument(
        "--completions",
        type=int,
        metavar="N",
        help="maximum number of completions on the page, full steps spread over the run (default 20000; 0: none)",
    )
    parser.add_argument(
        "--image-mb",
        type=float,
        metavar="MIB",
        help="maximum size of the images on the page, in MiB (default 16; 0: none)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path; return the exit code."""
    from hwgrpo.report.inlined_images import MOST_BYTES
    from hwgrpo.report.page import FILE, MOST_COMPLETIONS, write_report

    folder = Path(args.folder)
    output = Path(args.output) if args.output else folder / FILE
    most = MOST_COMPLETIONS if args.completions is None else args.completions
    if most < 0:
        raise ConfigError(f"--completions {most}: use 0 or more")
    image_bytes = MOST_BYTES if args.image_mb is None else args.image_mb * 2**20
    if not 0 <= image_bytes < math.inf:
        raise ConfigError(f"--image-mb {args.image_mb:g}: use 0 or more")
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; use a file, e.g. {output / FILE}")
    write_report(folder, output, most, int(image_bytes))
    print(f"wrote {output} ({_size(output.stat().st_size)})")
    if args.open:
        import webbrowser

        if not webbrowser.open(output.resolve().as_uri()):
            print("no browser could be started; open the file yourself")
    return 0


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"
