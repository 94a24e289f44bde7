"""`hwgrpo report`: a run as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from hwgrpo.errors import ConfigError

HELP = "write one HTML page of a run: curves, groups of completions, configuration"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folder", metavar="RUN", help="folder of a run; it may still be going on")
    parser.add_argument("--output", metavar="FILE", help="file to write (default RUN/report.html)")
    parser.add_argument(
        "--completions",
        type=int,
        metavar="N",
        help="the most completions on the page, entire steps spread over the run (default 20000; 0 for none)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(args: argparse.Namespace) -> int:
    """Write the page and say where; return the exit code."""
    from hwgrpo.report.page import FILE, MOST_COMPLETIONS, write_report

    folder = Path(args.folder)
    output = Path(args.output) if args.output else folder / FILE
    most = MOST_COMPLETIONS if args.completions is None else args.completions
    if most < 0:
        raise ConfigError(f"--completions {most}: give 0 or more")
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name a file, e.g. {output / FILE}")
    write_report(folder, output, most)
    print(f"wrote {output} ({_size(output.stat().st_size)})")
    if args.open:
        import webbrowser

        if not webbrowser.open(output.resolve().as_uri()):
            print("no browser could be started; open the file in one by hand")
    return 0


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"
