"""Shared by all tests: one thread (results must not depend on the machine's cores), no network for model hubs, and the
signals that a terminal sends, which nohup and a shell's `&` make every process ignore that they start."""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from tests.support.processes.groups import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_xdist_make_scheduler,
)

signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
