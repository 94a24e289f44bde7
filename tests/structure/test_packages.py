"""The three packages: what they import, which way they depend on each other, and what their folders must not hold."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PACKAGES = ("hwgrpo", "backends/hwgrpo_backends", "kernels/hwgrpo_kernels")


def run(*command, cwd=REPO, path=REPO):
    """Run a command with the packages of the checkout `path` importable, and nothing else of this process's set-up."""
    folders = [str(path / Path(package).parent) for package in PACKAGES]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "PYTHONPATH": ":".join(folders), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def misplaced_init_files(root):
    """Return the `__init__.py` that would turn the folders `backends` or `kernels` themselves into packages.

    transformers looks for a package named `kernels`; run from the repository root it would find ours and break.
    """
    return [
        str(path.relative_to(root)) for name in ("backends", "kernels") for path in (root / name).glob("__init__.py")
    ]


@pytest.fixture
def copied(tmp_path):
    """A copy of what makes the three packages, to be violated."""
    for package in PACKAGES:
        shutil.copytree(REPO / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_folders_backends_and_kernels_are_no_packages():
    assert misplaced_init_files(REPO) == []


def test_an_init_file_in_kernels_or_backends_is_found(copied):
    (copied / "kernels" / "__init__.py").touch()
    (copied / "backends" / "__init__.py").touch()
    assert misplaced_init_files(copied) == ["backends/__init__.py", "kernels/__init__.py"]


def test_transformers_works_from_the_repository_root():
    # `-c` puts the current folder first on sys.path, so a package `kernels` there would be the one found.
    result = run(sys.executable, "-c", "from transformers import Qwen3ForCausalLM; print(Qwen3ForCausalLM.__name__)")
    assert result.stdout == "Qwen3ForCausalLM\n", result.stderr


def heavy_modules(package, path=REPO):
    result = run(sys.executable, "-c", f"import sys, {package}; print(*sorted(sys.modules))", path=path, cwd=path)
    assert result.returncode == 0, result.stderr
    loaded = result.stdout.split()
    assert package in loaded
    return [name for name in ("torch", "triton", "transformers", "numpy") if name in loaded]


@pytest.mark.parametrize("package", ["hwgrpo", "hwgrpo.api", "hwgrpo_backends"])
def test_importing_the_package_loads_neither_torch_nor_triton(package):
    assert heavy_modules(package) == []


def test_a_planted_torch_import_is_noticed(copied):
    with (copied / "hwgrpo" / "__init__.py").open("a") as file:
        file.write("\nimport torch\n")
    assert "torch" in heavy_modules("hwgrpo", path=copied)


def test_checked_settings_load_no_room_until_one_is_named():
    result = run(
        sys.executable,
        "-c",
        "import sys\nfrom hwgrpo.config import load_config\nload_config('tiny_sort')\nprint(*sys.modules)",
    )
    assert result.returncode == 0, result.stderr
    rooms = ("hwgrpo.migrate", "hwgrpo.trl", "hwgrpo.sandbox")
    assert [name for name in result.stdout.split() if name.startswith(rooms)] == []


def import_contracts(root):
    """Return (all kept, what import-linter printed)."""
    result = run(Path(sys.executable).parent / "lint-imports", "--no-cache", cwd=root, path=root)
    return result.returncode == 0, result.stdout + result.stderr


def test_the_import_contracts_hold():
    kept, output = import_contracts(REPO)
    assert kept, output
    assert re.search(r"Contracts: [1-9]\d* kept, 0 broken", output)


@pytest.mark.parametrize(
    "module, planted",
    [
        ("backends/hwgrpo_backends", "hwgrpo.errors"),
        ("kernels/hwgrpo_kernels", "hwgrpo.registry"),
        ("backends/hwgrpo_backends", "hwgrpo_kernels"),
        ("kernels/hwgrpo_kernels", "hwgrpo_backends"),
        ("hwgrpo/config", "hwgrpo.training.loop"),
        ("hwgrpo/rewards", "hwgrpo.algorithms.kl"),
        ("hwgrpo/rewards", "hwgrpo.sandbox.limits"),
        ("hwgrpo/data", "hwgrpo.migrate.names_here"),
        ("hwgrpo/config", "hwgrpo.data.sources"),
        ("hwgrpo/training/policy", "hwgrpo.training.strategies.ddp"),
        ("hwgrpo/training/update", "hwgrpo.training.feed.prompt_source"),
    ],
)
def test_an_import_against_the_arrows_breaks_a_contract(copied, module, planted):
    (copied / module / "planted.py").write_text(f"import {planted}\n")
    kept, output = import_contracts(copied)
    assert not kept
    assert f"{Path(module).name}.planted -> {planted}" in output


def test_an_import_circle_breaks_a_contract(copied):
    with (copied / "hwgrpo/rollout/requests.py").open("a") as file:
        file.write("\nimport hwgrpo.rollout.local.engine\n")
    kept, output = import_contracts(copied)
    assert not kept
    assert "No cycles are allowed in hwgrpo.rollout" in output
