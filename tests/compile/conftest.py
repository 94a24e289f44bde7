"""These tests make Triton believe in GPUs that are not there, for the whole process, and must not be interpreted.

A process that collects only this folder is taken for that. In any other the tests here are left to one that starts such
a process (test_in_its_own_process.py), so that no other test meets the stand-ins.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
STARTER = HERE / "test_in_its_own_process.py"


def _alone(config: pytest.Config) -> bool:
    paths = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    return all(path.is_relative_to(HERE) and path != STARTER for path in paths)


def pytest_configure(config: pytest.Config) -> None:
    if not _alone(config):
        return
    from triton_settings import fresh_triton

    config.add_cleanup(fresh_triton().cleanup)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.suffix == ".py" and collection_path.parent == HERE:
        return _alone(config) == (collection_path == STARTER) or None
    return None
