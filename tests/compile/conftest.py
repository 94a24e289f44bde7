"""These tests make Triton believe in GPUs that are not there, for the whole process, and must not be interpreted.

A process that collects only this folder is taken for that. In any other the tests here are left to one that starts such
a process (test_in_its_own_process.py), so that no other test meets the stand-ins.
"""

from pathlib import Path

import pytest

from tests.support.processes.own_process import alone, left_out

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    if not alone(config, HERE):
        return
    from tests.compile.triton_settings import fresh_triton

    config.add_cleanup(fresh_triton().cleanup)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return left_out(collection_path, config, HERE)
