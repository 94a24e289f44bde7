"""The backend's variables are set before torch is imported, or a warning says once what to do."""

import os
import subprocess
import sys

import pytest
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.cli import backend_selection
from hwgrpo.config import Config
from tests.support.processes.launch import ROOT

NAME = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
CODE = f"""
import os, sys
import datasets
import hwgrpo.trl
from hwgrpo.cli.backend_selection import prepare_host
from hwgrpo.config import Config
print("HWGRPO_BACKEND_SELECTED" in os.environ)
prepare_host(Config())
print(os.environ["{NAME}"], "HWGRPO_BACKEND_SELECTED" in os.environ)
"""


def test_a_script_that_imports_it_first_is_not_warned():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ONEDNN", "HWGRPO"))}
    environment["HWGRPO_BACKEND"] = "cpu"
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["False", "64", "True"]
    assert "already imported" not in done.stderr


def test_a_late_import_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name in (NAME, "HWGRPO_ENV_APPLIED", "HWGRPO_BACKEND_SELECTED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(backend_selection, "_reported", set())
    monkeypatch.setenv("RANK", "0")
    for name in {*BACKEND.env_train} - {NAME}:
        monkeypatch.setenv(name, "1")  # of the user's own: whichever test ran before, one variable is missing
    config = Config()
    config.backend.name = "cpu"
    for _ in range(2):
        backend_selection.prepare_host(config)
        monkeypatch.delenv(NAME)
    warned = capsys.readouterr().err
    assert warned.count("torch is already imported") == 1
    assert f"export {NAME}=64 before you start Python, or import hwgrpo.trl before torch" in warned
