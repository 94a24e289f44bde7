"""`hwgrpo detect` in a process of its own: output, JSON schema and exit status."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
RUN = """
import argparse, sys
from hwgrpo.cli import detect
parser = argparse.ArgumentParser()
detect.add_arguments(parser)
code = detect.run(parser.parse_args(sys.argv[1:]))
assert "torch" not in sys.modules
raise SystemExit(code)
"""


def detect(*arguments, path=(), **variables):
    folders = [*path, *(ROOT / part for part in (".", "backends", "kernels"))]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HWGRPO_") and not k.endswith("VISIBLE_DEVICES")}
    environ = {**clean, "PYTHONPATH": os.pathsep.join(map(str, folders)), **variables}
    command = [sys.executable, "-c", RUN, *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def test_the_choice_is_printed_as_versioned_json_with_every_candidate():
    result = detect("--json", "--backend", "cpu")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema"] == "hwgrpo.detect/1"
    assert (document["requested"], document["selected"]) == ("cpu", "cpu")
    assert {candidate["name"] for candidate in document["candidates"]} == {"cpu", "cuda", "npu", "rocm"}
    for candidate in document["candidates"]:
        assert set(candidate) == {"name", "verdict", "reason", "fix", "devices"}
        assert candidate["verdict"] in ("ok", "unverified", "unusable")
    assert document["facts"]["torch_version"] == torch.__version__
    assert document["facts"]["torch"] is None


def test_a_probe_asks_torch_in_another_process():
    document = json.loads(detect("--json", "--probe", "--backend", "cpu").stdout)
    assert document["facts"]["torch"]["version"] == torch.__version__
    verdicts = {candidate["name"]: candidate["verdict"] for candidate in document["candidates"]}
    assert verdicts["cpu"] == "ok"


def test_the_table_says_what_was_chosen_and_why_the_others_were_not():
    result = detect("--backend", "cpu")
    assert result.returncode == 0
    assert "* cpu" in result.stdout
    assert "backend: cpu (requested: cpu)" in result.stdout
    assert all(name in result.stdout for name in ("cuda", "rocm", "npu"))


@pytest.mark.parametrize(
    "command", [("detect", "--backend", "npu"), ("env", "--backend", "rocm")], ids=["detect", "env"]
)
def test_what_a_terminal_has_no_room_for_goes_below_and_a_pipe_gets_whole_lines(command):
    run = [sys.executable, "-m", "hwgrpo", *command]
    folders = os.pathsep.join(str(ROOT / part) for part in (".", "backends", "kernels"))
    environ = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"PYTHONPATH": folders}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    with subprocess.Popen(run, env=environ, stdout=theirs) as process:
        os.close(theirs)
        shown = _all_of(ours)
    os.close(ours)
    piped = subprocess.run(run, env=environ, capture_output=True, text=True, check=False)
    assert process.returncode == piped.returncode
    assert max(map(len, shown.splitlines())) <= 80 < max(map(len, piped.stdout.splitlines()))
    assert shown.split() == piped.stdout.split()


def _all_of(terminal):
    parts = []
    try:
        while part := os.read(terminal, 65536):
            parts.append(part)
    except OSError:  # what Linux says when the other end is closed
        pass
    return b"".join(parts).decode()


def test_a_backend_that_cannot_work_is_refused_with_status_1():
    result = detect("--json", "--backend", "npu")
    assert result.returncode == 1
    document = json.loads(result.stdout)
    assert document["selected"] is None
    assert "backend='npu'" in document["error"]
    assert detect(HWGRPO_BACKEND="npu").returncode == 1


def test_a_name_that_does_not_exist_is_a_usage_error_with_a_suggestion():
    result = detect("--backend", "cudda")
    assert result.returncode == 2
    assert "Did you mean 'cuda'?" in result.stderr
    assert result.stdout == ""


def test_a_worker_is_told_what_it_inherits():
    result = detect(HWGRPO_BACKEND_SELECTED="cuda")
    assert result.returncode == 0
    assert "backend: cuda (inherited from the launcher)" in result.stdout


def test_a_broken_vendor_plug_in_is_diagnosed_although_import_torch_dies(tmp_path):
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    # A torch that loads its plug-ins as the real one does, which takes seconds to import.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda = None\nhip = None\n")
    (tmp_path / "torch" / "__init__.py").write_text(
        "import os\nfrom torch import version\n__version__ = version.__version__\n"
        "if os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD', '1') == '1':\n"
        "    try:\n        import torch_npu\n"
        "    except ImportError as error:\n        raise RuntimeError('Failed to load torch_npu') from error\n"
    )
    result = detect("--probe", "--backend", "cpu", path=[tmp_path])
    assert result.returncode == 1
    assert "libhccl.so" in result.stdout
    assert "pip uninstall torch-npu" in result.stdout


def test_a_broken_backend_plug_in_is_shown_among_the_candidates(tmp_path):
    info = tmp_path / "chip-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chip\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hwgrpo.backends]\nchip = chip_plugin:BACKEND\n")
    (tmp_path / "chip_plugin.py").write_text("raise ImportError('libchip.so')\n")
    result = detect("--json", "--backend", "cpu", path=[tmp_path])
    assert result.returncode == 0
    [chip] = [c for c in json.loads(result.stdout)["candidates"] if c["name"] == "chip"]
    assert chip["verdict"] == "unusable"
    assert "libchip.so" in chip["reason"]
    assert "libchip.so" in result.stderr
