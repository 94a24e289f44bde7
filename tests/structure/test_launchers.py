"""The launchers are what their generator writes, and hand everything on to set-up and `hwgrpo train`."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("generate_launchers", REPO / "scripts" / "generate_launchers.py")
assert _spec is not None
assert _spec.loader is not None
generator = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generator)
TEXTS = generator.launchers()


def test_the_launchers_in_scripts_are_what_the_generator_writes():
    there = {path.name: path.read_text() for path in (REPO / "scripts").glob("run_*.sh")}
    assert there == TEXTS, "run `python scripts/generate_launchers.py`"


def test_there_is_one_launcher_for_each_device_and_one_that_looks():
    assert set(TEXTS) == {"run_tiny_sort.sh"} | {f"run_tiny_sort_{name}.sh" for name in ("cpu", "cuda", "rocm", "npu")}


@pytest.fixture
def stubbed(tmp_path):
    """A repository whose set-up and `hwgrpo` only say how they were called."""
    repo = tmp_path / "a repo"
    (repo / "scripts").mkdir(parents=True)
    (repo / ".venv" / "bin").mkdir(parents=True)
    for name, text in TEXTS.items():
        (repo / "scripts" / name).write_text(text)
    (repo / "scripts" / "setup.sh").write_text('echo setup "$@"; exit "${SETUP_STATUS:-0}"\n')
    command = repo / ".venv" / "bin" / "hwgrpo"
    command.write_text('#!/bin/sh\nprintf "<%s>" "$@"; echo " cann=$CANN"\n')
    command.chmod(0o755)
    return repo


def launch(repo, name, *arguments, **env):
    return subprocess.run(
        ["bash", repo / "scripts" / name, *arguments],
        cwd="/",
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "rocm", "npu"])
def test_a_launcher_sets_up_for_its_device_then_trains_with_the_callers_settings_last(stubbed, device):
    name = "run_tiny_sort.sh" if device == "auto" else f"run_tiny_sort_{device}.sh"
    result = launch(stubbed, name, "rollout.n=16", "data.train=my file.jsonl")
    config = stubbed / "configs" / "tiny_sort.yaml"
    assert result.stdout.splitlines() == [
        "setup" if device == "auto" else f"setup --backend {device}",
        f"<train><{config}><backend.name={device}><rollout.n=16><data.train=my file.jsonl> cann=",
    ]
    assert result.returncode == 0


def test_a_launcher_stops_when_set_up_fails(stubbed):
    result = launch(stubbed, "run_tiny_sort_cuda.sh", SETUP_STATUS="1")
    assert result.returncode == 1
    assert "train" not in result.stdout


@pytest.mark.parametrize("device, sourced", [("auto", True), ("npu", True), ("cuda", False)])
def test_the_launchers_that_may_meet_an_npu_read_canns_variables(stubbed, device, sourced):
    name = "run_tiny_sort.sh" if device == "auto" else f"run_tiny_sort_{device}.sh"
    cann = stubbed / "set_env.sh"
    cann.write_text('export CANN="found${UNSET_BEFORE}"\n')
    script = stubbed / "scripts" / name
    script.write_text(script.read_text().replace("/usr/local/Ascend/ascend-toolkit/set_env.sh", f'"{cann}"'))
    assert launch(stubbed, name).stdout.endswith("cann=found\n" if sourced else "cann=\n")
