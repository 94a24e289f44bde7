"""The tests of decode attention see what they are there for: plant a mistake, and one of them fails."""

from pathlib import Path

import pytest
import torch
from hwgrpo_kernels import Shape, decode_kernels, decode_triton
from triton.runtime.errors import InterpreterError

from tests.interpreter import test_decode_attention
from tests.interpreter.test_planted_sampling_mutants import load

SOURCE = Path(decode_kernels.__file__)


def agrees() -> None:
    # padded prompts and ragged responses, both longer than a tile of keys in fp32
    test_decode_attention.test_kernel_equals_the_definition(
        test_decode_attention.ATTENTION, "three", Shape(5, 70, 64), torch.float32
    )


def padded() -> None:
    test_decode_attention.test_kernel_equals_the_definition(
        test_decode_attention.ATTENTION, "three", Shape(2, 1, 20), torch.float32
    )


def appended() -> None:
    test_decode_attention.test_what_is_appended_to_a_cache_is_equal_bit_for_bit_and_nothing_else_is_written(
        torch.bfloat16
    )


MUTANTS = {
    "no scale": (agrees, 'input_precision="ieee") * scale', 'input_precision="ieee")'),
    "no scale of the newest token": (agrees, "k.to(tl.float32)[None, :], 1) * scale", "k.to(tl.float32)[None, :], 1)"),
    "the padding of a prompt is read": (agrees, "width - of_prompt.to(tl.int32), width,", "0, width,"),
    "a prompt's first token is not read": (
        agrees,
        "width - of_prompt.to(tl.int32), width,",
        "width - of_prompt.to(tl.int32) + 1, width,",
    ),
    "the token before is not read": (agrees, "tokens.to(tl.int32) - 1, top", "tokens.to(tl.int32) - 2, top"),
    "the newest token is read twice": (agrees, "tokens.to(tl.int32) - 1, top", "tokens.to(tl.int32), top"),
    "a place too far": (appended, "newest = (tokens - 1) * SIZE + d", "newest = tokens * SIZE + d"),
    "a position too far": (
        appended,
        "(tl.load(offset + row) + tokens) * SIZE",
        "(tl.load(offset + row) + tokens + 1) * SIZE",
    ),
    "positions that count tokens": (appended, "tl.load(offset + row)", "of_prompt - 1"),
    "the first row's offset": (appended, "tl.load(offset + row)", "tl.load(offset)"),
    "rotated backward": (appended, "tl.where(d < HALF, -other, other)", "tl.where(d < HALF, other, -other)"),
    "a key is not rotated": (
        appended,
        "k = rotate(key, c, s, row",
        "k = rotate(key, c * 0.0 + 1.0, s * 0.0, row",
    ),
    "sums are not rescaled": (agrees, "sums = sums * rescale[:, None] +", "sums = sums +"),
    "the total is not rescaled": (agrees, "total = total * rescale +", "total = total +"),
    "tokens behind the last tile's end weigh": (
        agrees,
        'scores = tl.where((token < end)[None, :], scores, float("-inf"))',
        "scores = scores + 0.0",
    ),
    "the first row's prompt": (agrees, "tl.load(prompt_of + row)", "tl.load(prompt_of)"),
    "keys for values": (agrees, "q, keys, keys + responses_kv,", "q, keys, keys,"),
    "columns behind a head": (padded, "of_head = d < SIZE", "of_head = d < D"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_sees(name, monkeypatch, tmp_path):
    check, before, after = MUTANTS[name]
    source = SOURCE.read_text()
    assert source.count(before) == 1, f"the mutant's snippet is {source.count(before)} times in {SOURCE.name}: {before}"
    monkeypatch.setattr(decode_triton, "_kernels", load(source.replace(before, after), tmp_path))
    with pytest.raises((AssertionError, InterpreterError)):  # the latter: it reads outside of its tensors
        check()
