"""These tests run Triton kernels on the CPU, which Triton decides once per process, when it is first imported.

A process that collects only this folder therefore switches the interpreter on for itself. In any other the tests here
are left to one that starts such a process (test_in_its_own_process.py), so that nothing else is interpreted.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.support.processes.own_process import alone, left_out

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    if not alone(config, HERE):
        return
    if "triton" in sys.modules:
        raise pytest.UsageError("a plugin has imported triton already: it cannot be switched to the interpreter")
    os.environ["TRITON_INTERPRET"] = "1"
    # numpy warns of what `tl.where` then leaves aside
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    from tests.interpreter.watched_memory import watch
    from tests.support.numbers.triton_interpreter import repair

    repair()
    watch()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return left_out(collection_path, config, HERE)


@pytest.fixture
def interpreted():
    """Select the Triton kernels, which are for devices, on the CPU."""
    from hwgrpo_kernels import Implementation, default_registry

    from tests.support.numbers.row_cases import ROW_OPS  # imports triton

    for op in ROW_OPS:
        default_registry.register(Implementation(op.name, "interpreted", f"hwgrpo_kernels.rows_triton:{op.name}"))
    with default_registry.pinned({op.name: "interpreted" for op in ROW_OPS}):
        yield
    for op in ROW_OPS:
        del default_registry._implementations[op.name]["interpreted"]


@pytest.fixture(autouse=True)
def _new_tensors_hold_nan():
    """Otherwise a result that a kernel leaves out may still hold what an earlier call has written there."""
    torch.set_deterministic_debug_mode("error")  # which fills what torch.empty returns
    yield
    torch.set_deterministic_debug_mode("default")
