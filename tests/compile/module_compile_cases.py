"""Binaries of the fused modules' kernels for every chip, and their figures."""

import functools
from typing import Any

import torch

from tests.compile.triton_binaries import Binary
from tests.compile.triton_stub import CHIPS, StubDriver
from tests.support.numbers.kernel_calls import Calls, norm_calls, other_module_calls

HIDDEN = (896, 8192)


def _calls() -> Calls:
    bf16 = torch.bfloat16
    norms = {f"{name} {hidden}": call for hidden in HIDDEN for name, call in norm_calls(hidden, bf16).items()}
    return norms | other_module_calls(bf16)


NAMES = tuple(_calls())
"""Calls, norms with their hidden units."""


@functools.cache
def module_binaries(chip: str, name: str) -> tuple[Binary, Binary]:
    """Return the binaries of a module in bf16 and of its gradient."""
    forward, backward = StubDriver(chip).launches_of(_calls()[name])
    return Binary(forward), Binary(backward)


def module_figures() -> dict[str, dict[str, dict[str, Any]]]:
    """Return chip -> module -> pass -> figures."""
    passes = ("forward", "backward")
    return {
        chip: {
            name: {kind: each.figures for kind, each in zip(passes, module_binaries(chip, name), strict=True)}
            for name in NAMES
        }
        for chip in CHIPS
    }
