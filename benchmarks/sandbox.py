"""Programs per second that the sandbox runs, at each protection level that this host allows.

    python benchmarks/sandbox.py
    python benchmarks/sandbox.py --workers 2 --programs 1000

Small programs, so that it is the sandbox that is measured: one that prints a number, and one with a function and an
assert, which needs two processes. Beside the rate on this machine, which other work slows down, the table has the CPU
time that a program costs.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hwgrpo.errors import ConfigError
from hwgrpo.sandbox.limits import Limits
from hwgrpo.sandbox.protection import LEVELS
from hwgrpo.sandbox.sandbox_pool import SandboxPool
from hwgrpo.support.child_processes import descendants

JOBS: dict[str, Mapping[str, Any]] = {
    "prints a number": {"source": "print(int(input()) + 1)", "inputs": ["1"]},
    "has a function and an assert": {
        "source": "def f(x): return x + 1",
        "tests": {"setup": "", "asserts": ["assert f(1) == 2"]},
    },
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every level with every program, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--programs", type=int, default=500, help="programs per level (default 500)")
    parser.add_argument("--smoke", action="store_true", help="a few programs by one worker")
    args = parser.parse_args(argv)
    if args.smoke:
        args.workers, args.programs = 1, 4
    print(
        f"{args.workers} workers, Linux {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    )
    load = os.getloadavg()[0]
    print(f"load of the machine before: {load:.1f} on {len(os.sched_getaffinity(0))} cores\n")
    print("| level | program | programs per second | CPU ms per program |\n|---|---|---|---|")
    for level in LEVELS:
        try:
            pool = SandboxPool(level, Limits(), args.workers)
        except ConfigError:
            print(f"| {level} | not allowed by this host | | |")
            continue
        for name, job in JOBS.items():
            rate, cost = measure(pool, job, args.programs)
            print(f"| {level} | {name} | {rate:.0f} | {cost:.1f} |")
        pool.close()


def measure(pool: SandboxPool, job: Mapping[str, Any], programs: int) -> tuple[float, float]:
    """Return programs per second, and the CPU time of each in ms, in all processes of the workers."""
    pool.run([job] * 2 * programs.bit_length())
    used, began = _cpu_seconds(), time.perf_counter()
    results = pool.run([job] * programs)
    seconds, used = time.perf_counter() - began, _cpu_seconds() - used
    assert all(run["reason"] == "" for (run,) in results), results[0]
    return programs / seconds, 1000 * used / programs


def _cpu_seconds() -> float:
    """Return the CPU time of this process's descendants and of those of theirs that have ended."""
    while True:
        ticks = 0
        try:
            for each in descendants(os.getpid()):
                fields = Path(f"/proc/{each}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))
        except (FileNotFoundError, ProcessLookupError):
            continue  # one has just ended: its time is its parent's now, which may have been read before
        return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
