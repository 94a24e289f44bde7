"""`linear_logprob` for scoring by torch-npu's fused head: cube cores multiply while vector cores reduce.

`npu_fused_linear_online_max_sum` stores no [N,V] logits, only about 22 MB of workspace at 8192 rows. It supports no
entropy, softcap, bias or temperature; a temperature is multiplied into the hidden states, which are then rounded to
their dtype once more (unless it is a power of two). On A2 and A3 a tile of logits leaves the cube cores rounded to
the input dtype, as after a 16-bit matmul.

Source: aclnnFusedLinearOnlineMaxSum of CANN's ops-nn, documents and kernel. Never run on hardware.
"""

import torch
from torch import Tensor

from .op import Key

OP = "npu_fused_linear_online_max_sum"
DTYPES = (torch.bfloat16, torch.float16)
LARGEST_VOCAB = 2**24  # the kernel compares targets in fp32
LARGEST_HIDDEN = 65_534
CHIPS = ("Ascend910B", "Ascend910_93", "Ascend950")  # beginnings of device names: A2, A3, 950


def reason_against(key: Key) -> str | None:
    """Return why the op cannot run for `key` on this machine, or None."""
    if key.dtype not in DTYPES:
        return f"takes bfloat16 and float16, not {str(key.dtype).removeprefix('torch.')}"
    if key.shape_class > LARGEST_VOCAB:
        return f"finds targets up to {LARGEST_VOCAB}, and the vocabulary may be larger"
    if not hasattr(torch.ops.npu, OP):
        return f"this torch-npu has no {OP}, or is not imported; torch-npu 2.13 has it"
    npu = torch.get_device_module(key.device_type)
    if not npu.is_available():
        return "torch-npu finds no device"
    chip = npu.get_device_name()
    if not chip.startswith(CHIPS):
        return f"runs on A2, A3 and 950, not on {chip}"
    return None


def declines(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    scale: float,
    squash: float,
    row_scale: Tensor | None,
    with_entropy: bool,
    chunk_rows: int | None,
    logits_dtype: torch.dtype | None,
) -> str | None:
    """Return why a call falls back to the next implementation, or None."""
    if with_entropy:
        return "has no entropy"
    if hidden.requires_grad:
        return "is for scoring, and the hidden states require a gradient"
    if bias is not None:
        return "has no bias"
    if squash != 0.0:
        return "has no softcap"
    if logits_dtype not in (None, hidden.dtype):
        return f"rounds logits to {hidden.dtype}, but {logits_dtype} is requested"
    if hidden.shape[1] > LARGEST_HIDDEN:
        return f"takes hidden sizes up to {LARGEST_HIDDEN}"
    if hidden.shape[0] == 0:
        return "there are no rows"
    return None


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    scale: float,
    squash: float,
    row_scale: Tensor | None,
    with_entropy: bool,
    chunk_rows: int | None,
    logits_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `definitions.linear_logprob`; for calls that `declines` accepts. A target out of range gives NaN."""
    assert bias is None
    assert squash == 0.0
    assert not with_entropy
    vocab = weight.shape[0]
    rows = hidden.detach()
    if row_scale is not None:
        factor = scale * row_scale
        rows = (rows.float() * factor[:, None]).to(hidden.dtype)
    else:
        factor = scale
        if scale != 1.0:
            rows = (rows.float() * scale).to(hidden.dtype)
    # The end of the vocabulary is V: the kernel accepts targets below it. CANN's document includes V;
    # the extra target would be masked below, so V is right either way.
    top, sum_exp, predicted, *_ = getattr(torch.ops.npu, OP)(
        rows, weight.detach().to(hidden.dtype), targets, 0, vocab, False
    )
    log_sum = sum_exp.log()
    inside = (targets >= 0) & (targets < vocab)  # else `predicted` is 0, as if the target were the likeliest
    logprob = torch.where(inside, predicted - log_sum, torch.nan)
    return logprob, logprob.new_empty(0), top / factor, log_sum
