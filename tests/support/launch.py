"""Starting several processes of the project by torchrun."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def torchrun(ranks: int, *words: str, packages: Iterable[Path] = (), **extra: str) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --nproc-per-node RANKS WORDS` to its end, one thread per process, with more folders of packages."""
    folders = [*(ROOT / folder for folder in (".", "backends", "kernels", "tests/support")), *packages]
    path = os.pathsep.join(map(str, folders))
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *words],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
