"""Incomplete weight files are named before the model is loaded."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hwgrpo.errors import ConfigError
from hwgrpo.models.weight_files import check_weight_files


def sharded(folder: Path) -> Path:
    """Return a folder with two files of weights and their index."""
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name in names:
        save_file({name: torch.ones(8)}, folder / name)
    index = {"metadata": {}, "weight_map": {name: name for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / names[1]


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        check_weight_files("mine", folder)
    return str(error.value)


def test_complete_files_pass(tmp_path: Path):
    sharded(tmp_path)
    check_weight_files("mine", tmp_path)


@pytest.mark.parametrize("size", [0, 5, 20, -1])
def test_a_truncated_file_is_named(size: int, tmp_path: Path):
    file = sharded(tmp_path)
    whole = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size % whole)
    assert refusal(tmp_path) == (
        f"model.path='mine': {file.name} "
        + (f"has {whole - 1} of {whole} bytes" if size < 0 else f"has no complete header in its {size} bytes")
        + "; copy or download it again"
    )


def test_a_file_that_only_the_index_names_is_missing(tmp_path: Path):
    file = sharded(tmp_path)
    file.unlink()
    assert f"{file.name} is missing, which model.safetensors.index.json names" in refusal(tmp_path)


def test_an_index_that_cannot_be_read_is_left_to_transformers(tmp_path: Path):
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    check_weight_files("mine", tmp_path)


TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "header",
    [
        [1],
        {"a": 1},
        {"a": {"dtype": "F32"}},
        {"a": TENSOR | {"data_offsets": [0]}},
        {"a": TENSOR | {"data_offsets": ["x", "y"]}},
        {"a": TENSOR | {"dtype": None}},
    ],
    ids=str,
)
def test_a_damaged_header_is_named(header: object, tmp_path: Path):
    written = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(written).to_bytes(8, "little") + written)
    with pytest.raises(ConfigError, match=r"model\.safetensors has no complete header"):
        check_weight_files("mine", tmp_path)


def test_a_header_longer_than_any_file_is_named(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match=r"model\.safetensors has no complete header in its 64 bytes"):
        check_weight_files("mine", tmp_path)


def test_a_damaged_index_is_left_to_transformers(tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": 5, "b": ["x"]}}))
    check_weight_files("mine", tmp_path)
