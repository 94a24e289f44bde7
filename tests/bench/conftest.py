"""The built-in model is made once for all tests here."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWGRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Commands put a backend's variables in force; the next test starts without them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
