"""The dtype in which a model's weights are stored."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers.utils import CONFIG_NAME, cached_file

from hwgrpo.models.meta_device import non_parameters

NAMES = {torch.bfloat16: "BF16"}
"""Names of dtypes in safetensors files."""


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
    return bool(files) and all(_dtypes(file) == {NAMES[dtype]} for file in files)


def _dtypes(file: Path) -> set[str]:
    with safe_open(file, "pt") as tensors:
        return {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118  (not a mapping)
