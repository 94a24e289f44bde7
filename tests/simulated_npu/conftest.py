"""Fixtures of the tests on a simulated NPU; README.md explains what they prove."""

import importlib.util
from pathlib import Path

import pytest

from tests.support.devices import simulated_npu

ON_DEVICE = Path(__file__).parent / "on_device"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave what needs the device in its own process to test_on_device.py, which starts one for each file."""
    here = importlib.util.find_spec("torch_npu") is not None
    return True if collection_path == ON_DEVICE and not here else None


@pytest.fixture(scope="session", autouse=True)
def _no_choice():
    """Nothing but what is installed decides on the backend."""
    with pytest.MonkeyPatch.context() as patch:
        for name in simulated_npu.CHOICES:
            patch.delenv(name, raising=False)
        yield
