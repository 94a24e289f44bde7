"""The backend's environment variables, set before torch is imported."""

from __future__ import annotations

import os
import sys

from hwgrpo_backends import BackendError, choose
from hwgrpo_backends.environment import apply
from hwgrpo_backends.facts import SELECTED_VARIABLE


def set_before_torch() -> None:
    """Set the variables of training on this host's backend, unless torch is imported; it reads some of them once."""
    if "torch" in sys.modules:
        return
    try:
        selected = choose("auto")
    except BackendError:  # the trainer reports it, and may be set to a backend
        return
    inherited = os.environ.get(SELECTED_VARIABLE)
    apply(selected.backend, "train")
    if inherited is None:  # the trainer selects the backend, from its arguments
        del os.environ[SELECTED_VARIABLE]
