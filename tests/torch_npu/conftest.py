"""Tests against the real torch-npu. README.md explains what they prove."""

import os
from pathlib import Path

import pytest

from tests.torch_npu.torch_npu_process import LAYER

LAYERS = ("no_device", "on_device")
"""Folders whose tests run in a separate process, started by the files next to them."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    name = collection_path.name
    return True if name in LAYERS and collection_path.is_dir() and os.environ.get(LAYER) != name else None
