"""Shared by all tests: as many threads on any machine, one unless HWGRPO_TEST_THREADS says more; no model hubs."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(int(os.environ.get("HWGRPO_TEST_THREADS", "1")))
    torch.manual_seed(0)
