"""Launches of the decode kernels that are compiled, and the figures of their binaries."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hwgrpo_kernels import decode_triton

from tests.compile.triton_binaries import Binary
from tests.compile.triton_stub import CHIPS, StubDriver

ROWS, WIDTH, CAPACITY, KV_HEADS = 2, 96, 512, 2
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Model(NamedTuple):
    """Shape of a model's attention: query heads per key-value head, and head size."""

    group: int
    size: int


MODELS = {"0.5B": Model(7, 64), "7B": Model(7, 128), "Gemma": Model(8, 256)}
NAMES = tuple(MODELS)


def call(dtype: torch.dtype, model: Model) -> Callable[[], Any]:
    """Return the launch of a model's decode attention: queries, keys and values are slices of one product."""
    group, size = model
    product = torch.empty(ROWS, (group + 2) * KV_HEADS, size, dtype=dtype)
    query, key, value = product.split((group * KV_HEADS, KV_HEADS, KV_HEADS), dim=1)
    angles = torch.empty(WIDTH + CAPACITY, size, dtype=dtype)
    number = torch.ones(ROWS, dtype=torch.int64)
    prompts = torch.empty(2, KV_HEADS, 1, WIDTH, size, dtype=dtype)
    responses = torch.empty(2, KV_HEADS, ROWS, CAPACITY, size, dtype=dtype)
    return lambda: decode_triton.decode_attention(
        query, key, value, angles, angles, number, prompts, number, number, responses, number, size**-0.5
    )


def binary_of(chip: str, dtype: str, name: str) -> Binary:
    """Return the binary of a model's launch."""
    [launched] = StubDriver(chip).launches_of(call(DTYPES[dtype], MODELS[name]))
    return Binary(launched)


def decode_figures() -> dict[str, dict[str, dict[str, Any]]]:
    """Return chip -> dtype -> model -> figures."""
    return {
        chip: {dtype: {name: binary_of(chip, dtype, name).figures for name in NAMES} for dtype in DTYPES}
        for chip in CHIPS
    }
