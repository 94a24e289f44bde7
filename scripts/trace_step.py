"""Trace two steps of `hwgrpo train tiny_sort`: which files and functions a step executes, and what a start takes.

.venv/bin/python scripts/trace_step.py             # prints the table of docs/architecture.md
.venv/bin/python scripts/trace_step.py --write     # writes it into that page
.venv/bin/python scripts/trace_step.py --files     # and the step's files with the lines of their executed functions
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

REPO = Path(__file__).resolve().parent.parent
PAGE = REPO / "docs" / "architecture.md"
PACKAGES = tuple(f"{REPO}{os.sep}{folder}{os.sep}" for folder in ("hwgrpo", "backends", "kernels"))
STEP = ("hwgrpo/training/loop.py", "train_step")
MARKS = ("<!-- trace -->\n\n", "\n<!-- end of trace -->")


class Trace:
    """Functions of the project that were called, before the first step and in steps."""

    def __init__(self) -> None:
        self.started: set[CodeType] = set()
        self.stepped: set[CodeType] = set()
        self.calls: set[tuple[str, str]] = set()
        """(caller's file, called file), of calls in a step between two files."""
        self._phase = self.started
        self._files: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Note a call; the argument of `sys.setprofile`."""
        del arg
        code = frame.f_code
        file = self._file(code)
        if not file or code.co_name.startswith("<"):  # a module, lambda, comprehension: part of the function around it
            return
        if (file, code.co_name) == STEP:
            if event == "return":
                self._phase = set()  # between steps: validation, the end
                return
            self._phase = self.stepped
        if event != "call":
            return
        self._phase.add(code)
        if self._phase is self.stepped and (caller := self._caller(frame)) not in ("", file):
            self.calls.add((caller, file))

    def _caller(self, frame: FrameType) -> str:
        """Return the file of the nearest function of the project that called a frame, or ""."""
        above = frame.f_back
        while above is not None:
            if file := self._file(above.f_code):
                return file
            above = above.f_back
        return ""

    def _file(self, code: CodeType) -> str:
        """Return a function's file, relative to the repository; "" for one of another project."""
        if code not in self._files:
            name = code.co_filename
            self._files[code] = os.path.relpath(name, REPO) if name.startswith(PACKAGES) else ""
        return self._files[code]

    def lines(self) -> Counter[str]:
        """Return file -> lines of its functions that a step executed, functions inside others counted once."""
        numbers: dict[str, set[int]] = {}
        for code in self.stepped:
            own = [line for *_, line in code.co_lines() if line is not None]
            numbers.setdefault(self._file(code), set()).update(range(min(own), max(own) + 1))
        return Counter({file: len(each) for file, each in numbers.items()})

    def start_files(self) -> int:
        """Return the number of files with functions executed before the first step."""
        return len({self._file(code) for code in self.started})


def main(argv: Sequence[str] | None = None) -> int:
    """Train under the trace, and print or write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(REPO)}")
    parser.add_argument("--files", action="store_true", help="print the step's files too")
    args = parser.parse_args(argv)
    trace = Trace()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr), _profiled(trace):
        from hwgrpo.cli.main import main as hwgrpo

        settings = ("backend.name=cpu", "trainer.max_steps=2", "trainer.validate_at_start=false", "trainer.threads=1")
        status = hwgrpo(["train", "tiny_sort", f"trainer.output_dir={folder}/run", *settings])
    if status:
        return status
    lines = trace.lines()
    if args.files:
        for file, count in lines.most_common():
            print(f"{count:6,} {file}")
    table = _table(trace, lines)
    if args.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}{table}{MARKS[1]}{rest.split(MARKS[1])[1]}", encoding="utf-8")
    print(table, end="")
    return 0


def figures(text: str) -> dict[str, int]:
    """Return measure -> figure of the table in a text."""
    rows = re.findall(r"^\| ([a-z][^|]*) \| ([\d,]+) \|$", text, flags=re.MULTILINE)
    return {name: int(figure.replace(",", "")) for name, figure in rows}


def _table(trace: Trace, lines: Counter[str]) -> str:
    modules = [
        each for each in list(sys.modules.values()) if (getattr(each, "__file__", None) or "").startswith(PACKAGES)
    ]
    measures = {
        "files with a function that a step executes": len(lines),
        "functions that a step executes": len(trace.stepped),
        "lines of these functions": lines.total(),
        "pairs of files, one of which calls the other in a step": len(trace.calls),
        "files with a function that the start executes": trace.start_files(),
        "modules imported in the whole run": len(modules),
    }
    rows = [f"| {name} | {figure:,} |" for name, figure in measures.items()]
    return "\n".join(["| of `hwgrpo train tiny_sort`, one process | number |", "|---|---|", *rows, ""])


@contextlib.contextmanager
def _profiled(trace: Trace) -> Iterator[None]:
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


if __name__ == "__main__":
    sys.exit(main())
