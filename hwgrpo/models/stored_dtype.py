"""The dtype in which a model's weights are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import CONFIG_NAME, cached_file

from hwgrpo.models.meta_device import non_parameters

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of the dtypes of weights in safetensors files."""


def cached_folder(path: str, revision: str | None) -> Path | None:
    """Return a model's folder, in the hub's cache for a hub name; None if it is missing."""
    config_file = cached_file(
        path,
        CONFIG_NAME,
        revision=revision,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if config_file is None else Path(config_file).parent


def is_loaded_unrounded(model: nn.Module, dtype: torch.dtype, folder: Path | None) -> bool:
    """Return whether a model loaded in a dtype has the values of one loaded in fp32.

    Every weight must be stored in that dtype. Tensors that the model computes itself, such as rotary frequencies, must
    not be in it: their values are rounded.

    Args:
        model: loaded in `dtype`.
        dtype: a key of `NAMES`.
        folder: its files.
    """
    if folder is None or any(tensor.dtype == dtype for _, _, tensor in non_parameters(model)):
        return False
    files = sorted(folder.glob("*.safetensors"))
    stored = {entry["dtype"] for file in files for entry in read_header(file).values()}
    return stored == {NAMES[dtype]}


def read_header(file: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file: name -> {dtype, shape, data_offsets}.

    Raises:
        ValueError: it does not begin with such a header.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError("the header is longer than the file")
        header = json.loads(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("the header is no mapping")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        entry = entry if isinstance(entry, dict) else {}
        offsets, dtype = entry.get("data_offsets"), entry.get("dtype")
        places = isinstance(offsets, list) and [type(each) for each in offsets] == [int, int]
        if not places or not isinstance(dtype, str):
            raise ValueError(f"the header does not say what {name} is and where")
    return header
