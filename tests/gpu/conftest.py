"""These tests launch kernels on a device. Where there is none they are not collected, and one line says so."""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.gpu.accelerator import missing

HERE = Path(__file__).parent
# Written for the interpreter or the CPU, and run here with launches.
for _shared in ("test_rows", "test_rows_memory", "test_math", "test_module_kernels", "test_fused_models"):
    pytest.register_assert_rewrite(f"tests.interpreter.{_shared}")
pytest.register_assert_rewrite("tests.kernels.test_inplace")

none_here = cache(missing)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.parent == HERE and none_here() is not None else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if none_here() is not None:
        terminalreporter.write_line(f"tests/gpu: nothing to run here: {none_here()}")


@pytest.fixture(autouse=True)
def _tensors_are_made_on_the_device():
    from tests.support.numbers.row_cases import DEVICE

    assert DEVICE != "cpu", "triton is interpreted in this process"
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)
