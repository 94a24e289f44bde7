"""Packages that a few slow tests need and no environment has: fetched once, each set into a folder of its own."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes.launch import ROOT
from tests.support.processes.made_once import made_once

FETCHED = ROOT / "build" / "fetched"  # git ignores build/


def fetched(name: str, packages: Sequence[str]) -> Path:
    """Return the folder with `packages`, without what they depend on, in the versions of scripts/constraints/NAME.txt.

    Raises:
        RuntimeError: pip could not get them.
    """
    pins = ROOT / "scripts" / "constraints" / f"{name}.txt"
    texts = [path.read_text() for path in (pins, *map(pins.with_name, ("common.txt", "release.txt")))]
    digest = hashlib.sha256(repr((sys.version_info[:2], sorted(packages), texts)).encode()).hexdigest()[:12]
    folder = FETCHED / f"{name}-{digest}"

    def install(there: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(there)]
        done = subprocess.run(
            [*command, "-c", str(pins), *packages],
            env={**os.environ, "DS_BUILD_OPS": "0"},  # DeepSpeed is built from source; its ops wait until they are used
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"this test needs {', '.join(packages)} as in {pins}, and pip cannot get them. Let it reach an index "
                "that has them (PIP_INDEX_URL, PIP_FIND_LINKS), or leave slow tests out with -m 'not slow'. pip said:\n"
                + done.stderr[-2000:]
            )

    return made_once(folder, install)
