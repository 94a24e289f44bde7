"""Write scripts/constraints/release.txt: the exact versions of every package that `pip install hwgrpo` brings.

`python scripts/generate_release_constraints.py` writes the versions of its own environment, which `scripts/setup.sh`
made and `.ci/run` tests; --check exits with 1 if the file lacks one of them. Set-up installs within the file, so that
they agree. For newer versions empty the file, run `bash scripts/setup.sh --dev --fresh`, test, and write it again.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

FILE = Path(__file__).parent / "constraints" / "release.txt"
HEADER = """\
# Every package that an installation of hwgrpo has, in the version that the tests ran with on a CPU:
#   pip install hwgrpo -c release.txt
# Written by `python scripts/generate_release_constraints.py`. common.txt includes it, and has the direct requirements.
"""
OF_A_DEVICE = ("nvidia-", "cuda-", "triton", "pytorch-triton")
"""Begin the names of packages that a build of torch for a device brings, in the versions that it needs."""


def closure(distribution: str) -> dict[str, str]:
    """Return name -> version of all packages that an installed distribution requires, directly or not."""
    found: dict[str, str] = {}
    asked: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(distribution)]
    while left:
        requirement = left.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in asked:
            continue
        asked.add((name, extras))
        found[name] = metadata.version(name)
        for line in metadata.requires(name) or ():
            needed = Requirement(line)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                left.append(needed)
    return found


def text() -> str:
    """Return what the file has to say of this environment."""
    versions = {name: Version(version).public for name, version in sorted(closure("hwgrpo").items())}
    own = ("hwgrpo", *OF_A_DEVICE)
    return HEADER + "".join(f"{name}=={version}\n" for name, version in versions.items() if not name.startswith(own))


def main() -> int:
    if "--check" not in sys.argv[1:]:
        FILE.write_text(text(), encoding="utf-8")
        return 0
    written = FILE.read_text(encoding="utf-8").splitlines()
    differing = [line for line in text().splitlines() if line not in written]
    print(*(f"not in {FILE.name}: {line}" for line in differing), sep="\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
