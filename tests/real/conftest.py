"""Packages, a published model and published tokenizers, fetched once by package name."""

from collections.abc import Iterator

import pytest

from tests.real import reasoning_gym_package


@pytest.fixture(scope="module")
def reasoning_gym_path() -> Iterator[None]:
    """Put the package reasoning-gym on the path."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in reasoning_gym_package.folders():
            patch.syspath_prepend(folder)
        yield
