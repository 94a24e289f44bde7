"""A step captured on the CPU, replayed on the device, and the other way round."""

from pathlib import Path

import pytest
from hwgrpo_backends import Backend
from hwgrpo_backends.cpu import BACKEND as CPU
from hwgrpo_backends.npu import BACKEND as NPU

from tests.support.runs.captures import TWO_UPDATES, capture, replay


@pytest.mark.parametrize(("here", "there"), [(CPU, NPU), (NPU, CPU)], ids=lambda backend: backend.name)
def test_rounding_explains_what_another_device_changes(here: Backend, there: Backend, tmp_path: Path, capsys):
    fp32 = ("model.dtype=float32", "trainer.capture_weights=true", *TWO_UPDATES)
    step = capture(tmp_path / "run", *fp32, backend=here) / "step_00003"
    report = replay(capsys, step, f"backend.name={there.name}")
    assert report["passed"], report
    assert (report["captured"]["backend"], report["here"]["backend"]) == (here.name, there.name)
    assert report["stages"][-1]["name"] == "updated weights"
    report = replay(capsys, step, f"backend.name={there.name}", "optim.lr=1.01e-3")
    assert report["first_difference"] == "updated weights"


def test_a_replay_in_the_devices_own_dtype_has_the_tolerance_of_bf16(tmp_path: Path, capsys):
    step = capture(tmp_path / "run", "trainer.capture_weights=true", *TWO_UPDATES, backend=CPU) / "step_00001"
    report = replay(capsys, step, "backend.name=npu")
    assert report["passed"], report
    assert (report["captured"]["dtype"], report["here"]["dtype"]) == ("float32", "bfloat16")


def test_dropout_is_not_compared_on_another_device(tmp_path: Path, capsys):
    step = capture(tmp_path / "run", "model.lora.rank=4", "model.lora.dropout=0.1", backend=CPU) / "step_00001"
    report = replay(capsys, step, "backend.name=npu", "model.dtype=float32")
    assert report["passed"], report
    assert "dropout draws other numbers" in report["notes"][0]
    assert report["stages"][-1]["name"] == "old log-probs"
