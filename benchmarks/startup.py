"""Time of `hwgrpo --help` and `hwgrpo detect` as processes, including the start of Python.

The commands alternate. The first run of each, which may read from a disk, is a warm-up. Wall time is what a user
waits; CPU time excludes other work on the machine.

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
"""Arguments of `hwgrpo` -> time limit of the command, in seconds."""
NO_BACKEND = 1
"""Exit code of `detect` if no backend can be selected; its work is the same."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if a median is above its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="measured runs of each command (default 10)")
    parser.add_argument("--smoke", action="store_true", help="one run of each; ignores the targets")
    args = parser.parse_args(argv)
    runs = 1 if args.smoke else args.runs
    if runs < 1:
        parser.error(f"--runs {runs}: give 1 or more")
    commands: dict[str, tuple[str, ...]] = {f"hwgrpo {' '.join(arguments)}": arguments for arguments in TARGETS}
    commands["python -c pass"] = ()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(runs + 1):
        for name, arguments in commands.items():
            times = run(["-m", "hwgrpo", *arguments] if arguments else ["-c", "pass"])
            if number:
                seconds[name].append(times)
    print("| seconds | wall | min | CPU | min | target |\n|---|---|---|---|---|---|")
    missed = False
    for name, arguments in commands.items():
        wall, cpu = zip(*seconds[name], strict=True)
        target = TARGETS.get(arguments)
        missed |= target is not None and median(wall) > target
        numbers = " | ".join(f"{value:.3f}" for value in (median(wall), min(wall), median(cpu), min(cpu)))
        print(f"| {name} | {numbers} | {target if target else ''} |")
    print(f"\nmedians of {runs} runs; load {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    return int(missed and not args.smoke)


def run(arguments: list[str]) -> tuple[float, float]:
    """Run Python with these arguments; return its wall and CPU seconds, including its children."""
    environment = {**os.environ, "PYTHONPATH": PACKAGES}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    began = time.perf_counter()
    process = os.posix_spawn(
        sys.executable, [sys.executable, *arguments], environment, file_actions=[(os.POSIX_SPAWN_DUP2, nowhere, 1)]
    )
    _, status, usage = os.wait4(process, 0)
    wall = time.perf_counter() - began
    os.close(nowhere)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, NO_BACKEND):
        raise SystemExit(f"{' '.join(arguments)} failed: exit code {code}")
    return wall, usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
