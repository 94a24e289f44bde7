"""scripts/test.sh runs every folder of tests once, refuses unknown groups, and fails where a test fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
RUNNER = REPO / "scripts" / "test.sh"


def groups() -> dict[str, list[str]]:
    listed = subprocess.run(["bash", RUNNER, "--list"], capture_output=True, text=True, check=True).stdout
    return {name: folders for name, *folders in map(str.split, listed.splitlines())}


def test_every_folder_of_tests_is_in_exactly_one_group():
    folders = {path.relative_to(REPO / "tests").parts[0] for path in (REPO / "tests").rglob("test_*.py")}
    assert not [*(REPO / "tests").glob("test_*.py")], "a test file lies in tests/ itself: no group runs it"
    assert sorted(folder for of_group in groups().values() for folder in of_group) == sorted(folders)


def test_an_unknown_group_is_refused_with_the_list_of_groups():
    result = subprocess.run(["bash", RUNNER, "unti"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "'unti'" in result.stderr
    assert all(name in result.stderr for name in groups())


def test_a_group_fails_if_one_of_its_tests_fails_or_it_has_none(tmp_path: Path):
    for folder in ("scripts", "tests/perf", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(RUNNER, tmp_path / "scripts")
    shutil.copy(REPO / "tests" / "groups.txt", tmp_path / "tests")
    (tmp_path / "scripts" / "setup.sh").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def run() -> tuple[int, str]:
        command = ["bash", tmp_path / "scripts" / "test.sh", "perf"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)
        return done.returncode, done.stdout.splitlines()[-1]

    file = tmp_path / "tests" / "perf" / "test_some.py"
    file.write_text("def test_good(): pass\n")
    assert run() == (0, "1 passed, 0 failed, 0 skipped")
    file.write_text("def test_good(): pass\ndef test_wrong(): assert False\n")
    assert run() == (1, "1 passed, 1 failed, 0 skipped")
    file.unlink()
    assert run() == (1, "0 passed, 0 failed, 0 skipped")
