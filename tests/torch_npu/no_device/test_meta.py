"""Shapes and dtypes that torch-npu's own Meta kernels give for the operators that our code calls."""

import pytest
import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def meta(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_gives_the_rows_and_one_fp32_number_for_each(dtype):
    rows, scale = torch.ops.npu.npu_rms_norm(meta(2, 16, 64, dtype=dtype), meta(64, dtype=dtype), epsilon=1e-6)
    assert (rows.shape, rows.dtype) == ((2, 16, 64), dtype)
    assert (scale.shape, scale.dtype) == ((2, 16, 1), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_gives_what_it_rotates(dtype):
    angles = meta(1, 16, 1, 32, dtype=dtype)
    rotated = torch.ops.npu.npu_rotary_mul(meta(2, 16, 4, 32, dtype=dtype), angles, angles)
    assert (rotated.shape, rotated.dtype) == ((2, 16, 4, 32), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "sizes"), [(-1, (2, 16, 64)), (1, (2, 8, 128))])
def test_swiglu_halves_the_dimension(dtype, dim, sizes):
    halved = torch.ops.npu.npu_swiglu(meta(2, 16, 128, dtype=dtype), dim=dim)
    assert (halved.shape, halved.dtype) == (sizes, dtype)


def test_the_fused_head_has_no_meta_kernel_so_its_shapes_are_known_from_its_document_only():
    key = "npu::npu_fused_linear_online_max_sum"
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(key, "Meta")
