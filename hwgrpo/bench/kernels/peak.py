"""Memory that a case takes beyond its inputs and results.

An accelerator's allocator keeps count. On the host it is the resident set of a process made for it: the highest mark is
reset before each side, so that it excludes earlier sides. Run as a module, this is that process: it reads a
request as JSON on stdin and writes one line per side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from hwgrpo_backends.device import Device
from hwgrpo_kernels import Shape

from hwgrpo.bench.kernels.cases import CASES
from hwgrpo.bench.kernels.exact import Result
from hwgrpo.bench.kernels.problem import PROBLEMS

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc raises these by itself, and then keeps freed memory, which the next side would get without a trace."""
Name = tuple[str, str]
"""Of a case and a side."""


def can_measure_host() -> bool:
    """Whether this system resets the highest mark of a resident set (Linux does)."""
    return STATUS.exists() and os.access(RESET, os.W_OK)


def device_peak(device: Device, work: Callable[[], Result]) -> int | None:
    """Return the peak of bytes beyond earlier allocations and the results; None where the device has no counter."""
    device.synchronize()
    device.reset_peak()
    before = device.memory().allocated
    result = work()
    device.synchronize()
    peak = device.memory().peak
    return None if before is None or peak is None else max(0, peak - before - _size(result))


def host_peaks(shape: Shape, dtype: torch.dtype, wanted: Iterable[Name]) -> dict[Name, int]:
    """Return the same for sides on the host, each run once in its own process.

    Raises:
        RuntimeError: that process failed.
    """
    request = {
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "wanted": [list(each) for each in wanted],
    }
    path = os.pathsep.join(each for each in sys.path if each)
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(request),
        env={**os.environ, **MALLOC, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the process that measures memory failed:\n{done.stderr.strip()[-2000:]}")
    return {(case, side): peak for case, side, peak in map(json.loads, done.stdout.splitlines())}


def resident_peak(work: Callable[[], Result]) -> int:
    """Return how far this process's resident set rose while it worked, beyond the results."""
    RESET.write_text("5")
    before = _status("VmRSS")
    result = work()
    return max(0, _status("VmHWM") - before - _size(result))


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def _size(result: Result) -> int:
    return sum(each.nbytes for each in result.values())


def _serve() -> None:
    request = json.loads(sys.stdin.read())
    torch.set_num_threads(request["threads"])
    dtype, host = getattr(torch, request["dtype"]), torch.device("cpu")
    shape, tiny = Shape(*request["shape"]), Shape(8, 128, 256)
    wanted = {tuple(each) for each in request["wanted"]}
    for kind, make in PROBLEMS.items():
        cases = [case for case in CASES if case.kind == kind and any(case.name == name for name, _ in wanted)]
        if not cases:
            continue
        for case in cases:  # imports and set-up belong to no side
            for side in case.sides(case, make(tiny, dtype, host)):
                if side.work is not None and (case.name, side.name) in wanted:
                    with side.in_force():
                        side.work()
        problem = make(shape, dtype, host)
        for case in cases:
            for side in case.sides(case, problem):
                if side.work is not None and (case.name, side.name) in wanted:
                    with side.in_force():
                        print(json.dumps([case.name, side.name, resident_peak(side.work)]), flush=True)


if __name__ == "__main__":
    _serve()
