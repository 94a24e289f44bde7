"""Commands of the benchmarks leave no variables behind."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Commands put a backend's variables in force; the next test starts without them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
