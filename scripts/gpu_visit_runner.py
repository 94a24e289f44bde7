"""Run the items of `scripts/gpu_visit.sh`, each under its own time limit, and write the results down.

Needs nothing but Python's standard library, so that a broken installation is a result, too. An item is a process of its
own. In a dry run it is forked from one process that has torch, whose import takes longer than most items.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]
NOT_HERE, NO_PARITY, TIMED_OUT = 5, 6, 124
CODES = "0: passed; 124 and 137: time limit; 5: it cannot run here; 6: no parity"
RESERVE = 5
"""Seconds that are kept for the archive."""
GRACE = 10
"""Seconds between the signal that asks an item to end and the one that ends it."""
DRY = "dry: "
"""Begins each result of a dry run, which is no measurement."""


class Item(NamedTuple):
    """One entry of the visit."""

    name: str
    expected: int
    """Seconds on an H100 with a warm file cache: estimates until a visit has written them down."""
    limit: int
    """Seconds after which it is ended."""
    what: str
    measures: bool = False
    """Whether it reports a speed, so that it needs a passed parity."""
    pytest: bool = False
    """Whether it runs tests."""
    by_name: bool = False
    """Whether it runs only if it is named."""


ITEMS = (
    Item("parity", 60, 150, "training steps of several model families compared with fp64"),
    Item("facts", 15, 60, "chip, driver, versions, commit"),
    Item("decode", 45, 90, "decode step by rows and capacity, with and without device graphs; sampling; kernels", True),
    Item("update", 100, 180, "update by layout, fused modules and cuDNN attention; new lengths; kernels", True),
    Item("step", 80, 150, "bench step of the shape of Qwen2.5-0.5B, 32 prompts x 8 responses x 512 tokens", True),
    Item("resume", 50, 100, "a killed and resumed run compared bit by bit with one that was not killed"),
    Item("fused", 50, 100, "fused modules on models, fp32 beside a CPU, device graphs: tests", pytest=True),
    Item("ragged", 80, 130, "tiny_sort with responses of many lengths, cuDNN attention on and off", True),
    Item("trl", 120, 190, "a step of TRL beside ours, 32 prompts x 8 responses x 128 tokens", True),
    Item("head", 80, 120, "bench kernels of the LM head at 3,584 hidden units", True),
    Item("lora", 60, 100, "decode step of the shape of Qwen2.5-7B with LoRA, its adapters apart and merged", True),
    Item("kernels", 10, 60, "the kernels that are selected here"),
    Item("tests", 400, 540, "the tests that run on this device", pytest=True),
    Item("record", 300, 540, "the hardware record, scripts/record_hardware.py"),
    Item("sanitizer", 120, 540, "the row kernels under compute-sanitizer", pytest=True),
)  # fmt: skip
BENCH = {"A": (60, 540), "B": (200, 540), "C": (330, 540)}
"""Shape -> expected seconds and limit of `hwgrpo bench kernels`."""
REAL = Item("real", 900, 1800, "200 steps of smollm2_135m_gsm8k", True, by_name=True)


def all_items(shapes: Sequence[str]) -> dict[str, Item]:
    """Return the items in order of value, by name."""
    benches = [
        Item(f"bench-{shape}", *BENCH.get(shape, (120, 540)), f"bench kernels of shape {shape}", True)
        for shape in shapes
    ]
    return {item.name: item for item in (*ITEMS, *benches, REAL)}


@dataclass
class Line:
    """A line of steps.tsv."""

    name: str
    code: int
    seconds: int
    log: str
    result: str

    @classmethod
    def read(cls, file: Path) -> list[Line]:
        """Return the lines of all calls until now; lines of earlier versions have no result."""
        rows = [line.split("\t") for line in file.read_text().splitlines()] if file.exists() else []
        return [cls(row[0], int(row[1]), int(row[2].split()[0]), row[3], "\t".join(row[4:])) for row in rows]

    def text(self) -> str:
        return f"{self.name}\t{self.code}\t{self.seconds} s\t{self.log}\t{self.result}\n"


Start = Callable[[str, Path, float], int]
"""(item, log, seconds) -> exit code: run an item, and end it after so many seconds (`TIMED_OUT`)."""


@dataclass
class Visit:
    """Runs items and writes down what became of them."""

    out: Path
    start: Start
    items: dict[str, Item]
    minutes: float | None = None
    dry: bool = False
    clock: Callable[[], float] = time.monotonic

    def run(self, names: Sequence[str]) -> int:
        """Run the items, or without names all but those that must be named; return the exit code."""
        end = None if self.minutes is None else self.clock() + 60 * self.minutes - RESERVE
        left_out: list[str] = []
        failed = False
        chosen = names or [name for name, item in self.items.items() if not item.by_name or self.dry]
        for name in chosen:
            item = self.items.get(name)
            limit = float(os.environ.get("LIMIT", item.limit if item else 60))
            if item is not None and end is not None:
                left = end - self.clock()
                if left < min(item.expected, limit):
                    left_out.append(f"{name}: it takes about {item.expected} s, and {max(left, 0):.0f} s were left")
                    continue
                limit = min(limit, left)
            print(f"== {name} ==", flush=True)
            line = self._run_item(name, item, limit)
            self.add(line)
            failed |= line.code != 0 and (line.code != NOT_HERE or name in names)
            self._write_summary(left_out)
        failed |= not self._write_summary(left_out)
        print(f"\nitem, exit code ({CODES}), time, log in {self.out}, result")
        print("".join(line.text() for line in Line.read(self.table)), end="")
        for each in left_out:
            print(f"left out: {each}")
        print(f"all of it: {self.archive}")
        return int(failed)

    def _write_summary(self, left_out: Sequence[str]) -> bool:
        """Write summary and archive; a disk that is full ends no visit."""
        try:
            self.write_summary(left_out)
        except OSError as error:
            print(f"scripts/gpu_visit.sh: {self.archive} cannot be written: {error.strerror}", flush=True)
            self.archive.with_suffix(".part").unlink(missing_ok=True)
            return False
        return True

    def _run_item(self, name: str, item: Item | None, limit: float) -> Line:
        log = self.out / f"{name}.log"
        began = self.clock()
        if item is None:
            log.write_text(f"scripts/gpu_visit.sh: unknown item '{name}'; --list prints the items\n")
            code = 2
        elif item.measures and not self.has_parity():
            log.write_text(
                f"the item parity has not passed in {self.out}: run `bash scripts/gpu_visit.sh {self.out} parity` "
                "and mend what differs\n"
            )
            code = NO_PARITY
        else:
            code = self.start(name, log, limit)
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join(lines[-25:]), flush=True)
        results = [line.removeprefix("result: ") for line in lines if line.startswith("result: ")]
        if results:
            result = results[-1]
        elif code in (TIMED_OUT, 128 + signal.SIGKILL):
            result = f"no result within {limit:.0f} s"
        else:
            result = "" if code == 0 else (lines or [""])[-1]
        return Line(name, code, round(self.clock() - began), log.name, (DRY if self.dry else "") + result)

    def has_parity(self) -> bool:
        """Return whether the last parity passed; that of a dry run is none for a measurement."""
        last = next((line for line in reversed(Line.read(self.table)) if line.name == "parity"), None)
        return last is not None and last.code == 0 and last.result.startswith(DRY) == self.dry

    @property
    def table(self) -> Path:
        return self.out / "steps.tsv"

    @property
    def archive(self) -> Path:
        return self.out.with_name(f"{self.out.name}.tar.gz")

    def add(self, line: Line) -> None:
        with self.table.open("a") as file:
            file.write(line.text())

    def write_summary(self, left_out: Sequence[str]) -> None:
        """Write summary.md and the archive of the folder."""
        facts = {}
        with contextlib.suppress(FileNotFoundError, ValueError):  # cut off, as by a full disk: the item says so
            facts = json.loads((self.out / "facts.json").read_text())
        head = [f"- {key}: {value}" for key, value in facts.items()] or ["- the item facts has not run"]
        if self.dry:
            head.insert(0, "- a dry run with tiny sizes on a CPU: nothing here is a measurement")
        rows = [
            f"| {line.name} | {line.result.replace('|', ';')} | {line.seconds} | {line.code} |"
            for line in Line.read(self.table)
        ]
        table = ["| item | result | seconds | exit code |", "|---|---|---|---|", *rows]
        missing = ["", "Left out:", "", *(f"- {each}" for each in left_out)] if left_out else []
        text = ["# GPU visit", "", *head, "", *table, "", f"Exit codes: {CODES}.", *missing]
        (self.out / "summary.md").write_text("\n".join(text) + "\n")
        partial = self.archive.with_suffix(".part")
        with tarfile.open(partial, "w:gz") as archive:
            archive.add(self.out, self.out.name)
        partial.replace(self.archive)


def start_process(command: Sequence[str], log: Path, seconds: float, grace: float = GRACE) -> int:
    """Run a command and end it, with the processes that it started, after some seconds; return its exit code."""
    with log.open("wb") as file:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, cwd=REPO
        )
    return _wait(child.pid, lambda: child.poll(), seconds, grace)


def start_fork(work: Callable[[], int], log: Path, seconds: float, grace: float = GRACE) -> int:
    """Run a function in a fork of this process, otherwise as `start_process`."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(REPO)
        end_fork(work)

    def poll() -> int | None:
        done, status = os.waitpid(child, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if done else None

    return _wait(child, poll, seconds, grace)


def end_fork(work: Callable[[], int]) -> None:
    """End a forked process with the exit code of its work, without the rest of its parent's program."""
    code: int = 1
    try:
        code = work()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, poll: Callable[[], int | None], seconds: float, grace: float) -> int:
    """Wait for the leader of a process group; end the group after some seconds."""
    end = time.monotonic() + seconds
    wanted = [signal.SIGTERM, signal.SIGKILL]
    code = None
    try:
        while code is None:
            code = poll()
            if code is None and time.monotonic() > end:
                if not wanted:
                    break
                os.killpg(child, wanted.pop(0))
                end = time.monotonic() + grace
            time.sleep(0.02)
    finally:
        _end_group(child)
    if len(wanted) < 2 or code is None:
        return TIMED_OUT if wanted else 128 + signal.SIGKILL
    return code if code >= 0 else 128 - code


def _end_group(leader: int) -> None:
    """End the processes that an item left behind: the next one has the device for itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def has_pytest() -> bool:
    """Return whether this interpreter finds pytest."""
    import importlib.util

    return importlib.util.find_spec("pytest") is not None


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments of the script; a wrong one ends the program with 2."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_visit.sh", description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT")
    parser.add_argument("items", nargs="*", metavar="ITEM")
    parser.add_argument("--minutes", type=float, metavar="N")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_intermixed_args(words)
    if options.out is None and not options.list:
        parser.error("name a folder for the results: bash scripts/gpu_visit.sh OUT")
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: use more than 0")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Run the visit; return its exit code."""
    options = arguments_of(words)
    items = all_items(os.environ.get("SHAPES", "A B C").split())
    if options.list:
        for item in items.values():
            print(f"{item.name:<10} {item.expected:5d} s, at most {item.limit:4d} s  {item.what}")
        return 0
    tests = [name for name in options.items or items if name in items and items[name].pytest]
    if tests and options.minutes is None and not has_pytest():
        print(
            f"scripts/gpu_visit.sh: {sys.executable} has no pytest, which {', '.join(tests)} need: run "
            "`bash scripts/setup.sh --dev`, or name other items",
            file=sys.stderr,
        )
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    if any(line.result.startswith(DRY) != options.dry for line in Line.read(out / "steps.tsv")):
        held = "measurements" if options.dry else "a dry run"
        print(f"scripts/gpu_visit.sh: {out} holds {held}: name another folder", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="hwgrpo-visit-") as work:
        start = (_dry_start if options.dry else _start)(out, Path(work))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that items are ended and `work` is removed
        return Visit(out, start, items, options.minutes, options.dry).run(options.items)


def _start(out: Path, work: Path) -> Start:
    """Return how items are started: as programs."""
    program = str(REPO / "scripts" / "gpu_visit_items.py")
    return lambda name, log, seconds: start_process([sys.executable, program, name, str(out), str(work)], log, seconds)


def _dry_start(out: Path, work: Path) -> Start:
    """Return how a dry run starts items: as forks of this process, once it has imported what they need."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import gpu_visit_items as items

    items.preload()
    arguments = [str(out), str(work), "--dry"]
    return lambda name, log, seconds: start_fork(lambda: items.main([name, *arguments]), log, seconds)


if __name__ == "__main__":
    sys.exit(main())
