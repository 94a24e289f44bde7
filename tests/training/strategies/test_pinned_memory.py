"""Pinned tensors are views of few blocks, whose sizes, powers of two, are hardly more than their sum."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from hwgrpo.planning.model_shape import model_shape
from hwgrpo.training.strategies import pinned_memory
from hwgrpo.training.strategies.pinned_memory import ALIGNED, pack
from tests.support.models.tiny import settings

MODELS = sorted((Path(__file__).resolve().parents[3] / "configs" / "models").glob("*.json"))


@pytest.mark.parametrize("sizes", [[], [0], [1], [5 * 2**20 + 3], [100, 7, 64, 0, 4000, 65, 1000], list(range(300))])
def test_each_tensor_has_its_own_bytes_of_a_block(sizes: list[int]):
    blocks, places = pack(sizes)
    assert all(block.bit_count() == 1 for block in blocks)
    taken = sorted((block, start, start + size) for size, (block, start) in zip(sizes, places, strict=True))
    assert all(start % ALIGNED == 0 and stop <= blocks[block] for block, start, stop in taken)
    for (block, _, stop), (after, start, _) in pairwise(taken):
        assert after > block or start >= stop
    assert sum(blocks) <= 2 * sum(max(ALIGNED, size + ALIGNED) for size in sizes)


def test_the_states_of_every_shipped_model_take_as_much_as_they_hold(tmp_path: Path):
    most = 0.0
    for path in MODELS:
        (tmp_path / "config.json").write_text(path.read_text())
        shape = model_shape(settings().model, AutoConfig.from_pretrained(tmp_path))
        sizes = [4 * p.count for unit in shape.trained_units for p in unit.parameters for _ in range(2 * unit.copies)]
        blocks, _ = pack(sizes)
        assert len(blocks) < 20
        assert sum(blocks) < 1.002 * sum(sizes), path.stem
        most = max(most, sum(1 << (size - 1).bit_length() for size in sizes) / sum(sizes))
    assert most > 1.9, "one allocation per state would take nearly twice as much"


def test_tensors_keep_their_values_beside_others(monkeypatch: pytest.MonkeyPatch):
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *words, pin_memory, **options: plain(*words, **options))
    parts = [(count, dtype) for count in (0, 3, 1000) for dtype in (torch.float32, torch.uint8)]
    tensors = pinned_memory.empty(parts)
    for number, (tensor, (count, dtype)) in enumerate(zip(tensors, parts, strict=True)):
        assert (len(tensor), tensor.dtype) == (count, dtype)
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))
