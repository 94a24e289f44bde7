"""Folders of tests that need a process of their own, and a starter that makes one where other tests run too."""

from pathlib import Path

import pytest

STARTER = "test_in_its_own_process.py"


def alone(config: pytest.Config, folder: Path) -> bool:
    """Whether this process collects nothing but a folder's tests."""
    paths = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    return all(path.is_relative_to(folder) and path != folder / STARTER for path in paths)


def left_out(path: Path, config: pytest.Config, folder: Path) -> bool | None:
    """Leave the starter out where the folder is alone, and everything else of it where it is not."""
    if path.suffix == ".py" and path.parent == folder:
        return alone(config, folder) == (path == folder / STARTER) or None
    return None
