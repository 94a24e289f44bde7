"""Compute for the real torch-npu on a host: `import torch` loads this beside it, by an entry point of torch.backends.

aten's operators run their CPU kernels. torch-npu's fused operators have kernels here under their own names, below
autograd, so that torch-npu's own formulas differentiate them. Whatever else torch-npu has still goes to CANN, where
nothing computes, and fails.

    kernel.py      how a kernel is registered, and how often each ran
    over.py        aten's operators, given over to the CPU
    aten.py        aten's operators for which torch-npu has a formula of its own
    fused.py       RMSNorm, rotary positions, SwiGLU, the head for scoring
    attention.py   npu_fusion_attention
"""

import os

import torch_npu  # noqa: F401  # the device has to be there first

if os.environ.get("TASK_QUEUE_ENABLE") != "0":
    raise ImportError("the virtual NPU needs TASK_QUEUE_ENABLE=0: otherwise a second thread races these kernels")

from virtual_ascend import aten, attention, fused
from virtual_ascend.kernel import calls
from virtual_ascend.over import given_over, host_calls

__all__ = ["aten", "attention", "calls", "fused", "given_over", "host_calls"]


def _autoload() -> None:
    """Called by torch when it loads its entry points; importing this has done the work."""
