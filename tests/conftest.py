"""Shared by all tests: one thread (results must not depend on the machine's cores), no network for model hubs, and the
signals that a terminal sends, which nohup and a shell's `&` make every process ignore that they start."""

import os
import signal
import time
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start: threads that share a core spin on it

import pytest
import torch

from tests.support.models import made_before
from tests.support.processes.groups import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_xdist_make_scheduler,
)

signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Built-in models and compiled kernels are made once for all tests of a session, on whatever worker they run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    made_before.link_into(folder / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWGRPO_CACHE", str(folder / "cache"))
        yield


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def soon():
    """Return a function that waits until a condition holds; it fails when it never does."""

    def wait(condition):
        until = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until, "it never came to be"
            time.sleep(0.02)

    return wait
