"""The three packages: what they import, which way they depend on each other, and what their folders must not hold."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PACKAGES = ("hwgrpo", "backends/hwgrpo_backends", "kernels/hwgrpo_kernels")


def run(*command):
    """Run a command with the packages of this checkout importable, and nothing else of this process's set-up."""
    folders = [str(REPO / Path(package).parent) for package in PACKAGES]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(REPO), "PYTHONPATH": ":".join(folders), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_the_folders_backends_and_kernels_are_no_packages():
    """transformers looks for a package named `kernels`; run from the repository root it would find ours and break."""
    assert [name for name in ("backends", "kernels") if (REPO / name / "__init__.py").exists()] == []


def test_transformers_works_from_the_repository_root():
    # `-c` puts the current folder first on sys.path, so a package `kernels` there would be the one found.
    result = run(sys.executable, "-c", "from transformers import Qwen3ForCausalLM; print(Qwen3ForCausalLM.__name__)")
    assert result.stdout == "Qwen3ForCausalLM\n", result.stderr


@pytest.mark.parametrize("package", ["hwgrpo", "hwgrpo.api", "hwgrpo_backends"])
def test_importing_the_package_loads_neither_torch_nor_triton(package):
    result = run(sys.executable, "-c", f"import sys, {package}; print(*sorted(sys.modules))")
    loaded = result.stdout.split()
    assert package in loaded, result.stderr
    assert [name for name in ("torch", "triton", "transformers", "numpy") if name in loaded] == []


def test_the_import_contracts_hold():
    result = run(Path(sys.executable).parent / "lint-imports", "--no-cache")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"Contracts: [1-9]\d* kept, 0 broken", result.stdout)


def test_checked_settings_load_no_room_until_one_is_named():
    result = run(
        sys.executable,
        "-c",
        "import sys\nfrom hwgrpo.config import load_config\nload_config('tiny_sort')\nprint(*sys.modules)",
    )
    assert result.returncode == 0, result.stderr
    rooms = ("hwgrpo.migrate", "hwgrpo.trl", "hwgrpo.sandbox", "hwgrpo.research")
    assert [name for name in result.stdout.split() if name.startswith(rooms)] == []
