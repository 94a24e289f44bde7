"""The dtype of a saved model's weights: that of the base model's files, or one that is set."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hwgrpo.models.stored_dtype import NAMES, read_header

FLOATING = ("F64", *NAMES.values())
"""Names of the dtypes that are cast, in safetensors files."""
ALIGNMENT = 8
"""Bytes to which a safetensors header is padded."""


def cast_weights(folder: Path, dtype: str, source: Path | None, *, adapter: bool = False) -> None:
    """Cast the floating-point weights of a saved model, one after another, and name the dtype in its configuration.

    Other safetensors files in the folder stay as they are: the folder may be one that the user shares.

    Args:
        folder: a model or adapter in safetensors files.
        dtype: a value of `trainer.final_dtype`; auto: that of each weight in `source`, else of its configuration.
        source: folder of the base model; None: auto is fp32.
        adapter: cast the adapter in the folder, instead of the full model.
    """
    usual = published_dtype(source) if dtype == "auto" else getattr(torch, dtype)
    of_source = _stored_dtypes(source) if dtype == "auto" and source is not None else {}
    if adapter:
        for file in sorted(folder.glob("adapter_model*.safetensors")):
            _cast_file(file, of_source, usual)
        return
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        _cast_file(folder / SAFE_WEIGHTS_NAME, of_source, usual)
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        shards = [folder / name for name in sorted({*content["weight_map"].values()})]
        content["metadata"]["total_size"] = sum(_cast_file(file, of_source, usual) for file in shards if file.is_file())
        _write_json(index, content)
    settings = folder / "config.json"
    if settings.is_file():
        content = json.loads(settings.read_text(encoding="utf-8"))
        content["dtype"] = str(usual).removeprefix("torch.")
        _write_json(settings, content)


def published_dtype(source: Path | None) -> torch.dtype:
    """Return the dtype that a model's configuration names; fp32 if it names none that weights can be saved in."""
    file = None if source is None else source / "config.json"
    if file is None or not file.is_file():
        return torch.float32
    content = json.loads(file.read_text(encoding="utf-8"))
    for section in (content, content.get("text_config")):
        if isinstance(section, dict):
            named = getattr(torch, str(section.get("dtype") or section.get("torch_dtype")), None)
            if named in NAMES:
                return named
    return torch.float32


def _stored_dtypes(source: Path) -> dict[str, torch.dtype]:
    """Return the dtype of each floating-point weight in a folder's safetensors files."""
    dtypes = {name: dtype for dtype, name in NAMES.items()}
    headers = [read_header(file) for file in sorted(source.glob("*.safetensors"))]
    return {
        name: dtypes[entry["dtype"]] for header in headers for name, entry in header.items() if entry["dtype"] in dtypes
    }


def _cast_file(path: Path, dtypes: Mapping[str, torch.dtype], usual: torch.dtype) -> int:
    """Cast the floating-point tensors of a file, holding one at a time; return the bytes of its tensors.

    Args:
        path: a safetensors file, which is replaced unless nothing changes.
        dtypes: dtypes of tensors by name.
        usual: dtype of the others.
    """
    header = read_header(path)
    wanted = {name: dtypes.get(name, usual) for name, entry in header.items() if entry["dtype"] in FLOATING}
    if all(NAMES[dtype] == header[name]["dtype"] for name, dtype in wanted.items()):
        return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
    widths = {
        name: wanted[name].itemsize
        if name in wanted
        else (entry["data_offsets"][1] - entry["data_offsets"][0]) // max(1, math.prod(entry["shape"]))
        for name, entry in header.items()
    }
    entries, end = dict[str, Any](), 0
    for name in sorted(header, key=lambda name: (-widths[name], name)):  # wide ones first: all are aligned
        start, end = end, end + widths[name] * math.prod(header[name]["shape"])
        kind = NAMES[wanted[name]] if name in wanted else header[name]["dtype"]
        entries[name] = {"dtype": kind, "shape": header[name]["shape"], "data_offsets": [start, end]}
    partial = path.with_name(f".{path.name}.partial")
    with safe_open(path, "pt") as tensors, partial.open("wb") as file:
        text = json.dumps({"__metadata__": tensors.metadata() or {"format": "pt"}, **entries}).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        file.write(len(text).to_bytes(8, "little") + text)
        for name in entries:
            tensor = tensors.get_tensor(name)
            tensor = tensor.to(wanted[name]) if name in wanted else tensor
            file.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
    partial.replace(path)
    return end


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
