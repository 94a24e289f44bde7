"""The thread pool of the OpenMP runtime that torch has loaded, for compiled functions.

Threads of a function's own would cost as much as a decode step's attention, and a second runtime's would compete with
torch's for the cores.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

import torch

MAPS = Path("/proc/self/maps")
"""Linux' list of the files that this process has loaded."""

_NAMES = ("libgomp", "libomp", "libiomp5")
_FUNCTION = "GOMP_parallel"
"""Of GCC's runtime; LLVM's and Intel's have it, too."""


@cache
def parallel_function() -> int | None:
    """Return the address of the runtime's `GOMP_parallel`; None: no runtime is found, and functions run in one thread.

    It takes (function, its argument, number of threads, 0), and returns after all threads have called the function.
    """
    if not MAPS.exists():
        return None
    loaded = {line.split(maxsplit=5)[-1] for line in MAPS.read_text().splitlines() if "/" in line}
    runtimes = sorted(each for each in loaded if os.path.basename(each).startswith(_NAMES))
    home = str(Path(torch.__file__).parent.parent)  # a process may have several: torch's own comes first
    for path in sorted(runtimes, key=lambda each: not each.startswith(home)):
        try:
            return ctypes.cast(getattr(ctypes.CDLL(path), _FUNCTION), ctypes.c_void_p).value
        except (OSError, AttributeError):  # deleted since, or another library of such a name
            continue
    return None
