"""The row ops compile once for a model: not again for what differs from one call to the next."""

import pytest
import torch

from tests.compile.compile_cases import ALIGNED, ODD, PLAIN, call_row_ops, logits_of
from tests.compile.triton_stub import StubDriver

ONCE = ["row_stats_kernel", "row_grad_kernel"]

chips = pytest.mark.parametrize("chip", ["sm_90", "gfx942"])
dtypes = pytest.mark.parametrize("dtype", ["bf16", "fp32"])


@pytest.fixture
def driver(chip):
    return StubDriver(chip)


@chips
@dtypes
@pytest.mark.parametrize("vocab", [ALIGNED, ODD])
def test_one_compilation_serves_any_number_of_rows(driver, dtype, vocab):
    case = PLAIN._replace(dtype=dtype, vocab=vocab)
    calls = [1, 2, 15, 16, 17, 64, 128]
    launched = driver.launches_of(lambda: [call_row_ops(case, logits_of(case, rows)) for rows in calls])
    assert len(launched) == len(ONCE) * len(calls)
    assert driver.loaded == ONCE


@chips
def test_one_compilation_serves_any_temperature_and_softcap(driver):
    softcap = PLAIN._replace(softcap=True)
    settings = [(1.0, 30.0), (1, 1), (1 / 0.7, 50.0), (16.0, 16.0)]
    calls = [
        lambda scale=scale, cap=cap: call_row_ops(softcap, logits_of(softcap), None, scale, cap)
        for scale, cap in settings
    ]
    driver.launches_of(lambda: [call() for call in calls])
    assert driver.loaded == ONCE


@chips
def test_one_compilation_serves_any_temperatures_of_the_rows(driver):
    per_row = PLAIN._replace(row_scale=True)
    driver.launches_of(lambda: [call_row_ops(per_row, logits_of(per_row, rows)) for rows in (1, 2, 16)])
    assert driver.loaded == ONCE


@chips
@dtypes
def test_one_compilation_serves_every_slice_of_aligned_rows(driver, dtype):
    case = PLAIN._replace(dtype=dtype)
    logits, targets = logits_of(case, 64), torch.zeros(64, dtype=torch.int64)
    calls = [slice(start, stop) for start, stop in ((0, 64), (1, 2), (3, 20), (16, 32), (63, 64))]
    driver.launches_of(lambda: [call_row_ops(case, logits[rows], targets[rows]) for rows in calls])
    assert driver.loaded == ONCE


@chips
@dtypes
def test_one_compilation_serves_a_head_padded_by_any_aligned_width(driver, dtype):
    case = PLAIN._replace(dtype=dtype)
    widths = [ALIGNED, ALIGNED + 16, ALIGNED + 128]
    calls = [torch.empty(4, width, dtype=logits_of(case).dtype)[:, :ALIGNED] for width in widths]
    driver.launches_of(lambda: [call_row_ops(case, logits) for logits in calls])
    assert driver.loaded == ONCE


@chips
@dtypes
def test_slices_of_unaligned_rows_compile_at_most_once_more(driver, dtype):
    case = PLAIN._replace(dtype=dtype, vocab=ODD)
    logits = logits_of(case, 33)
    driver.launches_of(lambda: [call_row_ops(case, logits[row : row + 2]) for row in range(32)])
    assert sorted(driver.loaded) == sorted(ONCE * 2), "one for slices that begin on 16 bytes, one for all others"


@pytest.mark.parametrize(
    "chip,change",
    [
        ("sm_90", {"entropy": False}),
        ("sm_90", {"softcap": True}),
        ("sm_90", {"row_scale": True}),
        ("sm_90", {"dtype": "fp32"}),
        ("sm_90", {"vocab": ODD}),
        ("gfx942", {"beyond_2_gib": True}),
    ],
    ids=str,
)
def test_another_kind_of_call_is_seen_to_compile_again(driver, change):
    other = PLAIN._replace(**change)
    driver.launches_of(lambda: [call_row_ops(case, logits_of(case)) for case in (PLAIN, other, PLAIN, other)])
    assert driver.loaded == ONCE * 2
