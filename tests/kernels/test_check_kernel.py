"""The conformance suite of kernels: what computes its op passes, and what does not is told with its case."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hwgrpo_kernels import Implementation, Key, rows_torch
from hwgrpo_kernels.testing import check_kernel


def made(function: Callable[..., Any], **fields: Any) -> Implementation:
    return Implementation("row_stats", "planted", lambda: function, **fields)


def test_an_implementation_that_computes_its_op_passes_in_every_dtype_and_case():
    assert check_kernel(made(rows_torch.row_stats), "cpu") == [
        "float64: 11 calls agree with the definition",
        "float32: 44 calls agree with the definition",
        "bfloat16: 11 calls agree with the definition",
        "float16: 11 calls agree with the definition",
    ]


def without_softcap(logits, targets, scale, squash, row_scale, with_entropy):
    return rows_torch.row_stats(logits, targets, scale, 0.0, row_scale, with_entropy)


def without_row_scale(logits, targets, scale, squash, row_scale, with_entropy):
    return rows_torch.row_stats(logits, targets, scale, squash, None, with_entropy)


def with_unbounded_rows(logits, targets, scale, squash, row_scale, with_entropy):
    found = rows_torch.row_stats(logits, targets, scale, squash, row_scale, with_entropy)
    return *found[:3], found[3] + torch.zeros(()).log()


def in_half(logits, targets, scale, squash, row_scale, with_entropy):
    return tuple(each.half() for each in rows_torch.row_stats(logits, targets, scale, squash, row_scale, with_entropy))


@pytest.mark.parametrize(
    "function, told",
    [
        (without_softcap, "case softcap"),
        (without_row_scale, "case row_scale"),
        (with_unbounded_rows, "log_sum is finite at other entries"),
        (in_half, "logprob is torch.float16"),
        (lambda **inputs: rows_torch.row_stats(**inputs)[:3], "3 outputs, not 4"),
    ],
)
def test_an_implementation_that_does_not_is_told_with_its_case(function, told):
    with pytest.raises(AssertionError, match=rf"row_stats=planted, float64.*{told}"):
        check_kernel(made(function), "cpu")


def test_a_dtype_that_is_refused_is_named_and_the_rest_is_run():
    def no_fp64(key: Key) -> str | None:
        return "has no fp64" if key.dtype == torch.float64 else None

    lines = check_kernel(made(rows_torch.row_stats, supports=no_fp64), "cpu")
    assert lines[0] == "float64: not run, has no fp64"
    assert "44 calls agree" in lines[1]


def test_calls_that_are_declined_are_not_held_against_it():
    def declines(**inputs: Any) -> str | None:
        return "no softcap" if inputs["squash"] else None

    assert "float64: 10 calls agree with the definition" in check_kernel(
        made(without_softcap, declines=declines), "cpu"
    )


@pytest.mark.parametrize("fields", [{"declines": lambda **_: "never"}, {"device_types": frozenset({"abacus"})}])
def test_an_implementation_that_runs_nowhere_does_not_pass(fields):
    with pytest.raises(AssertionError, match=r"declines every call|it cannot run on cpu"):
        check_kernel(made(rows_torch.row_stats, **fields), "cpu")
