"""Starting several processes of the project: by torchrun, or forked from one that has imported it."""

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support.processes import preloaded

ROOT = Path(__file__).resolve().parents[3]


def variables(packages: Iterable[Path] = (), **extra: str) -> dict[str, str]:
    """Return the variables of a process that finds the project and more folders of packages, with one thread."""
    folders = [*(ROOT / folder for folder in (".", "backends", "kernels")), *packages]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1", **extra}


def torchrun(ranks: int, *words: str, packages: Iterable[Path] = (), **extra: str) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --nproc-per-node RANKS WORDS` to its end, one thread per process, with more folders of packages.

    For tests of what torchrun does; `forked` gives the same ranks without seconds of imports for each.
    """
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *words],
        env=variables(packages, **extra),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def forked(
    ranks: int, *words: str, packages: Iterable[Path] = (), also: Sequence[str] = (), **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run WORDS by ranks as `torchrun` does, or as one process (0 ranks); see `preloaded.run` and its `also`."""
    return preloaded.run(ranks, *words, env=variables(packages, **extra), also=also)
