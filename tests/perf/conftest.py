"""What all ratios have in common: the device, one thread, and the record that perf.json keeps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hwgrpo_backends import choose
from hwgrpo_backends.device import Device

from hwgrpo.cli.main import main


@pytest.fixture(scope="session")
def device() -> Device:
    torch.set_num_threads(1)
    device = Device(choose().backend)
    device.set_device()
    code = main(["parity", f"backend.name={device.backend.name}"])
    assert code == 0, "a training step differs from fp64 here: the speed of wrong numbers is not measured"
    return device


@pytest.fixture(scope="session")
def record(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Ratios by case and implementation, written to perf.json when the last is there."""
    found = {
        "schema": "hwgrpo.perf/1",
        "arch": device.arch,
        "device": device.name,
        "torch": torch.__version__,
        "ratios": {},
        "against_eager": {},
    }
    yield found
    folder = Path(os.environ.get("HWGRPO_PERF_OUT") or tmp_path_factory.mktemp("perf"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "perf.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"\nratios of {found['arch']}: {folder / 'perf.json'}")
