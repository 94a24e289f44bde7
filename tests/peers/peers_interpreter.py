"""What other projects' Triton kernels need beside ours to run in Triton's CPU interpreter, and their imports around it.

They add in bf16 (cut-cross-entropy's gradients), call the device library, mark ranges for a profiler, and verl's
package imports all of verl.
"""

import sys
import types
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

from tests.support.numbers.triton_interpreter import from_bf16_bits, repair, to_bf16_bits


def let_peers_run(folder: Path) -> None:
    """Repair the interpreter, complete it, and make the peers in `folder` importable.

    Python must run with -O: verl asserts that its tensors are on a device of a kind that is not here.
    """
    repair()
    _let_add_in_bf16()
    libdevice.log1p = _log1p
    torch.cuda.nvtx.range = lambda *arguments, **named: nullcontext()
    sys.path.append(str(folder))
    for name in ("verl", "verl.utils"):  # whose own imports are ray, tensordict and more
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        package.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package


@triton.jit
def _log1p(x):
    return tl.log(1.0 + x)


def _let_add_in_bf16() -> None:
    """Compute what kernels do with bf16 in fp32 and round the result, as a device does."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    refusing = builder.binary_op

    def in_fp32(value):
        if value.dtype.scalar != tl.bfloat16:
            return value
        return handle(from_bf16_bits(value.data), tl.float32)

    def binary_op(self, a, b, operation):
        if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
            return refusing(self, a, b, operation)
        result = refusing(self, in_fp32(a), in_fp32(b), operation)
        if result.data.dtype == np.bool_:
            return result
        return handle(to_bf16_bits(result.data), tl.bfloat16)

    builder.binary_op = binary_op


def bf16_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a + b of two bf16 tensors [256], added by a kernel as they were loaded."""
    out = torch.empty_like(a)
    _add[(1,)](a, b, out)
    return out


@triton.jit
def _add(a, b, out):
    place = tl.arange(0, 256)
    tl.store(out + place, tl.load(a + place) + tl.load(b + place))
