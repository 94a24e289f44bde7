"""What lies beside the code for those who report, release and test: versions agree, workflows call what is there."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import hwgrpo

REPO = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))
TORCH_VERSIONS = REPO / "scripts" / "test_torch_versions.sh"


def promised() -> list[str]:
    """Return the minor versions of torch that the package accepts."""
    [torch] = [each for each in map(Requirement, PROJECT["dependencies"]) if each.name == "torch"]
    return [f"2.{minor}" for minor in range(100) if torch.specifier.contains(f"2.{minor}.0")]


def test_the_version_is_the_same_everywhere():
    changelog = (REPO / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text(encoding="utf-8"))
    newest, date = re.findall(r"^## ([\d.]+) \(([\d-]+)\)$", changelog, flags=re.MULTILINE)[0]
    assert [hwgrpo.__version__, newest, citation["version"]] == [PROJECT["version"]] * 3
    assert str(citation["date-released"]) == date
    assert changelog.index("\n## Unreleased\n") < changelog.index(f"\n## {newest} ")


def test_workflows_call_scripts_that_are_there():
    steps = [
        step
        for file in WORKFLOWS
        for job in yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].values()
        for step in job["steps"]
    ]
    called = {name for step in steps for name in re.findall(r"\bbash (\S+)", step.get("run", ""))}
    assert called == {".ci/run", "scripts/test_torch_versions.sh"}
    assert [name for name in called if not (REPO / name).is_file()] == []


def test_the_matrix_and_the_script_have_the_promised_versions_of_torch():
    matrix = yaml.safe_load((REPO / ".github/workflows/torch.yml").read_text(encoding="utf-8"))["jobs"]["unit"]
    assert matrix["strategy"]["matrix"]["torch"] == promised()
    done = subprocess.run(["bash", TORCH_VERSIONS, "--dry-run"], capture_output=True, text=True, check=True)
    assert re.findall(r"^torch (\S+)  not run: a dry run$", done.stdout, flags=re.MULTILINE) == promised()
    assert "tests/algorithms" in done.stdout
    refused = subprocess.run(["bash", TORCH_VERSIONS, "2.1"], capture_output=True, text=True)
    assert (refused.returncode, "torch 2.1 is not promised" in refused.stderr) == (2, True)


STAND_IN = """#!/usr/bin/env bash
case "$*" in
    *"index versions torch"*) echo "torch (2.13.0)"; echo "Available versions: 2.13.0+cpu, 2.12.1, 2.1.0" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *pytest*) [[ $0 != *2.12* ]] ;;
esac
"""


def test_a_version_that_fails_and_one_without_a_wheel_are_named(tmp_path: Path):
    for name in ("scripts/test_torch_versions.sh", "pyproject.toml", "tests/groups.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((REPO / name).read_text())
    (tmp_path / "scripts/constraints").symlink_to(REPO / "scripts/constraints")
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(*versions: str) -> tuple[int, list[str]]:
        command = ["bash", tmp_path / "scripts/test_torch_versions.sh", *versions]
        env = os.environ | {"PYTHON": str(python), "HWGRPO_TORCH_INDEX": ""}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines()[-len(versions) :]

    missing = "torch 2.10  not run: no wheel of it for this Python and platform at the configured index"
    assert run("2.10", "2.13") == (0, [missing, "torch 2.13  passed"])
    assert run("2.12", "2.13") == (1, ["torch 2.12  FAILED", "torch 2.13  passed"])
    assert run("2.10") == (1, [missing]), "nothing was tested"


def test_the_constraints_of_a_release_are_what_is_installed_here():
    command = [sys.executable, "scripts/generate_release_constraints.py", "--check"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.py", b"a = 1", "does not end with a newline"),
        ("a.md", b"a\n\n", "ends with an empty line"),
        ("a.yaml", b"a: [1\n", "cannot be read"),
        ("a.json", b"{\n", "cannot be read"),
        ("a.csv", b"0123456789\n" * 50_000, "has 550,000 bytes"),
    ],
)
def test_a_file_that_a_commit_should_not_have_is_named(tmp_path: Path, name: str, content: bytes, problem: str):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "b.yaml").write_text("a: 1\n---\nb: 2\n")
    command = [sys.executable, "scripts/check_files.py", str(tmp_path / name), str(tmp_path / "b.yaml")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 1)
    assert f"{name}: {problem}" in done.stdout


def test_a_package_has_the_address_of_the_repository_that_it_is_built_from(monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("project_urls", REPO / "scripts" / "project_urls.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hook = module.ProjectUrls(str(REPO), {})
    for repository, urls in ((None, {}), ("someone/hwgrpo", {"Issues": "https://git.example/someone/hwgrpo/issues"})):
        monkeypatch.setenv("GITHUB_SERVER_URL", "https://git.example")
        monkeypatch.setenv("GITHUB_REPOSITORY", repository or "")
        metadata: dict = {}
        hook.update(metadata)
        assert urls.items() <= metadata.get("urls", {}).items()
        assert bool(metadata) == bool(repository)
