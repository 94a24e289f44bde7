"""How long `hwgrpo --help` and `hwgrpo detect` take as whole processes, Python's own start included.

The commands take turns, and each one's first run, which may read from a disk, is not counted. Wall time is what a user
waits; processor time leaves out what other work on the machine took.

    python benchmarks/startup.py --runs 20
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

REPO = Path(__file__).resolve().parents[1]
PACKAGES = os.pathsep.join(str(REPO / folder) for folder in (".", "backends", "kernels"))
TARGETS: dict[tuple[str, ...], float] = {("--help",): 0.3, ("detect",): 0.5}
"""Words after `hwgrpo` -> seconds that the command may take."""
REFUSED = 1
"""What `detect` exits with where no backend can be chosen; it has done its work then, too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 when a median is above its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="runs of each command that count (default 10)")
    parser.add_argument("--smoke", action="store_true", help="one run of each, held to no target")
    args = parser.parse_args(argv)
    runs = 1 if args.smoke else args.runs
    if runs < 1:
        parser.error(f"--runs {runs}: give 1 or more")
    commands: dict[str, tuple[str, ...]] = {f"hwgrpo {' '.join(words)}": words for words in TARGETS}
    commands["python -c pass"] = ()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(runs + 1):
        for name, words in commands.items():
            took = run(["-m", "hwgrpo", *words] if words else ["-c", "pass"])
            if number:
                seconds[name].append(took)
    print("| seconds | wall | min | CPU | min | target |\n|---|---|---|---|---|---|")
    missed = False
    for name, words in commands.items():
        wall, cpu = zip(*seconds[name], strict=True)
        target = TARGETS.get(words)
        missed |= target is not None and median(wall) > target
        numbers = " | ".join(f"{value:.3f}" for value in (median(wall), min(wall), median(cpu), min(cpu)))
        print(f"| {name} | {numbers} | {target if target else ''} |")
    print(f"\nmedians of {runs} runs; load {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    return int(missed and not args.smoke)


def run(words: list[str]) -> tuple[float, float]:
    """Run Python with these words and return its wall and processor seconds, children of it included."""
    environment = {**os.environ, "PYTHONPATH": PACKAGES}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    began = time.perf_counter()
    process = os.posix_spawn(
        sys.executable, [sys.executable, *words], environment, file_actions=[(os.POSIX_SPAWN_DUP2, nowhere, 1)]
    )
    _, status, usage = os.wait4(process, 0)
    wall = time.perf_counter() - began
    os.close(nowhere)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, REFUSED):
        raise SystemExit(f"{' '.join(words)} failed: exit code {code}")
    return wall, usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
