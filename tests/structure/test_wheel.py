"""The wheel holds the three packages, their type marker and the recipes, and works without the repository."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-w", str(out), "-q"]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    [path] = out.glob("hwgrpo-*-py3-none-any.whl")
    return path


def test_the_wheel_holds_every_module_of_the_three_packages_and_nothing_else_of_the_repository(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        path.relative_to(REPO / parent).as_posix()
        for parent, package in (("", "hwgrpo"), ("backends", "hwgrpo_backends"), ("kernels", "hwgrpo_kernels"))
        for path in (REPO / parent / package).rglob("*")
        if path.suffix in (".py", ".html", ".css", ".js") or path.name == "py.typed"
    }
    assert {"hwgrpo/py.typed", "hwgrpo_backends/py.typed", "hwgrpo_kernels/py.typed"} <= expected
    assert "hwgrpo/report/assets/page.html" in expected
    assert expected <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"hwgrpo", "hwgrpo_backends", "hwgrpo_kernels"}
    assert not [name for name in names if name.startswith("hwgrpo/") and Path(name).name.startswith("test_")]


def test_the_wheel_holds_the_recipes(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = [path.relative_to(REPO / "configs").as_posix() for path in (REPO / "configs").rglob("*.*")]
    assert {"tiny_sort.yaml", "models/Qwen3-8B.json"} <= set(recipes)
    assert {f"hwgrpo/recipes/{recipe}" for recipe in recipes} <= names


def test_the_wheel_holds_the_records_of_hardware(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    records = [path.name for path in (REPO / "benchmarks/results/hardware").glob("*.json")]
    assert records
    assert {f"hwgrpo/hardware/{record}" for record in records} <= names


def test_the_installed_wheel_runs_away_from_the_repository(wheel, tmp_path):
    target = tmp_path / "installed"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, wheel], check=True)
    env = {**os.environ, "PYTHONPATH": str(target)}
    code = "import hwgrpo as h, hwgrpo_backends as b, hwgrpo_kernels as k; print(h.__file__, b.__file__, k.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert all(Path(file).is_relative_to(target) for file in where.stdout.split()), where.stdout
    help_text = subprocess.run(
        [sys.executable, "-m", "hwgrpo", "--help"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    ).stdout
    assert "train" in help_text
    assert (target / "bin" / "hwgrpo").exists()
