"""Checksums of weights: one number on every device and in whatever parts, and none for what has changed."""

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import checksum
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.checksum import ROW, ChecksumError, digests, multipliers
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.worker import check_files

WORDS = 2 * ROW + 77


def splitmix64(position: int) -> int:
    mask = (1 << 64) - 1
    mixed = (position + 1) * 0x9E3779B97F4A7C15 & mask
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
    return mixed ^ mixed >> 31


def defined(content: bytes) -> str:
    """Return the checksum by its definition, in Python's integers."""
    content += bytes(-len(content) % 4)
    words = memoryview(content).cast("i")
    total = 0
    for i, word in enumerate(words):
        row, column = divmod(i, ROW)
        total += word * (splitmix64(column) | 1) * (splitmix64(ROW + row) | 1)
    return f"{total % (1 << 64):016x}"


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def random_words(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int32)


def test_multipliers_are_splitmix64s_numbers_made_odd():
    first = [splitmix64(position) for position in range(3)]
    assert first[0] == 0xE220A8397B1DCDAF, "the published first number of seed 0"
    assert [value % 2**64 for value in multipliers(0, 3).tolist()] == [value | 1 for value in first]
    assert multipliers(5, 4).tolist() == multipliers(0, 9)[5:].tolist()


@pytest.mark.parametrize("count", [1, 5, ROW - 1, ROW, ROW + 1, WORDS])
def test_the_checksum_is_that_of_its_definition(count: int):
    words = random_words(count)
    assert digests([words]) == [defined(bytes_of(words))]


TENSORS = {
    "nothing": torch.zeros(0, 4),
    "one byte": torch.tensor([7], dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
    "a number": torch.tensor(-3),
    "bf16, odd": torch.randn(3, 5).bfloat16(),
    "transposed": torch.randn(40, 30).T,
    "not aligned": torch.arange(40, dtype=torch.int8)[3:],
    "nan": torch.tensor([float("nan"), -float("inf")]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_all_kinds_have_one(name: str):
    assert digests([TENSORS[name]]) == [defined(bytes_of(TENSORS[name]))]


def test_it_does_not_depend_on_how_many_rows_are_summed_at_a_time(monkeypatch):
    words = random_words(5 * ROW + 3)
    found = []
    for rows in (1, 2, 4, 5, 64):
        monkeypatch.setattr(checksum, "HOST_PASS", rows)
        found += digests([words])
    assert len(set(found)) == 1


def exchange(words: torch.Tensor, one: int, other: int, size: int) -> None:
    first = words[one : one + size].clone()
    words[one : one + size] = words[other : other + size]
    words[other : other + size] = first


def negate(words: torch.Tensor, *positions: int) -> None:
    for position in positions:
        words[position] ^= -(2**31)


def raise_and_lower(words: torch.Tensor) -> None:
    """Change words, but not their sum."""
    end = len(words) // 4 * 4
    words[0:end:4] += 1
    words[1:end:4] -= 1


CHANGES = {
    "exchanged words": lambda words: exchange(words, 0, 1, 1),
    "exchanged blocks": lambda words: exchange(words, 0, 512, 256),
    "exchanged rows": lambda words: exchange(words, 0, ROW, ROW),
    "shifted by a row": lambda words: words.copy_(words.roll(ROW)),
    "shifted by a word": lambda words: words.copy_(words.roll(1)),
    "zeros": lambda words: words.zero_(),
    "negated": lambda words: words.view(torch.float32).neg_(),
    "two signs": lambda words: negate(words, 3, 90),
    "the same sum": raise_and_lower,
    "a step of training": lambda words: words.view(torch.float32).mul_(1 + 1e-6),
    "a zero at the end": lambda words: words[-1:].zero_(),
}


def identity() -> torch.Tensor:
    """Return an identity matrix: its rows have equal sums, as has what two of them exchange."""
    return torch.eye(256).view(torch.int32).reshape(-1)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [lambda: torch.randn(WORDS).view(torch.int32), identity], ids=["random", "identity"])
def test_what_has_changed_has_another_one(change: str, make):
    words = make()
    changed = words.clone()
    CHANGES[change](changed)
    assert not torch.equal(words, changed)
    assert digests([words]) != digests([changed])


def test_every_bit_counts():
    words = random_words(ROW + 9)
    expected = digests([words])
    for position in (0, 77, ROW - 1, ROW, ROW + 8):
        for bit in range(32):
            changed = words.clone()
            changed[position] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
            assert digests([changed]) != expected


class Sizes(TorchDispatchMode):
    """Remembers the most bytes of a tensor that an operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not any(
            isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
            for each in args
        ):
            self.most = max(self.most, result.untyped_storage().nbytes())
        return result


def test_no_copy_of_a_tensor_is_made():
    words = random_words(64 * ROW)
    with Sizes() as sizes:
        checksum.checksum(words)
    assert 0 < sizes.most <= 8 * checksum.HOST_PASS * ROW < words.nbytes


def test_a_file_with_another_tensor_or_without_checksums_is_an_error_that_says_which(tmp_path):
    weights = {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.bfloat16)}
    file = tmp_path / "00000.safetensors"
    save_file(weights, file, checksum.named_digests(weights))
    check_files(str(tmp_path))
    save_file(weights | {"b": torch.ones(2, dtype=torch.bfloat16)}, file, checksum.named_digests(weights))
    with pytest.raises(ChecksumError, match=r"b arrived changed: checksum \w{16}, sent \w{16}\. If it"):
        check_files(str(tmp_path))
    save_file(weights, file)
    with pytest.raises(ChecksumError, match=r"a came without a checksum: the trainer is older than this plugin"):
        check_files(str(tmp_path))
