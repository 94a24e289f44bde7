"""This host's facts, both tiers, gathered once: importing torch in a child process takes seconds."""

import os

import pytest
from hwgrpo_backends.tier0 import gather_tier0
from hwgrpo_backends.tier1 import gather_tier1


@pytest.fixture(scope="session")
def this_host():
    return gather_tier1(gather_tier0(), dict(os.environ))
