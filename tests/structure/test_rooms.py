"""Every package lists its files, and every file's name means one thing."""

import ast
import re
from collections import Counter
from pathlib import Path

REPO = Path(__file__).parents[2]
PACKAGES = [REPO / "hwgrpo", REPO / "backends/hwgrpo_backends", REPO / "kernels/hwgrpo_kernels"]
ROOMS = [
    file.parent
    for package in PACKAGES
    for file in package.rglob("__init__.py")
    if len([*file.parent.glob("*.py")]) > 2 and file.parent.name not in ("cli", "hwgrpo_vllm")
]
"""Packages of several files; a command's file is named as the command, and `hwgrpo_vllm` is a part of vLLM's server."""

SEVERAL = {
    "__init__",
    "__main__",
    "engine",  # of a folder of engines
    "registry",  # of settings, backends, kernels
    "entry_points",  # the two lower packages do not import each other
    "testing",  # what vendors call: hwgrpo_backends.testing, hwgrpo_kernels.testing
    "report",  # the command, and the package it calls
    "reward_model",  # the command that trains one, and the reward that loads it
}


def listed(room: Path) -> set[str]:
    """Return the files and folders that a package's docstring names."""
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    text = re.sub(r"`[^`]*`", "", text)
    return set(re.findall(r"(?<![\w.])\w+\.py\b|\w+/(?!\w)", text))


def held(room: Path) -> set[str]:
    """Return the modules and packages of a folder."""
    files = {file.name for file in room.glob("*.py") if file.name not in ("__init__.py", "__main__.py")}
    return files | {f"{file.parent.name}/" for file in room.glob("*/__init__.py")}


def test_a_package_lists_its_files():
    for room in ROOMS:
        named = listed(room)
        assert held(room) - named == set(), f"{room} does not list them"
        assert {name for name in named if not (room / name).exists()} == set(), f"not in {room}"


def test_a_file_name_means_one_thing():
    counts = Counter(file.stem for package in PACKAGES for file in package.rglob("*.py"))
    assert {name for name, count in counts.items() if count > 1} - SEVERAL == set()
