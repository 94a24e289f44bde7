"""Whether the Triton kernels can run here; imports no triton, so that it can be asked where there is none."""

import os
import shutil

import torch

from .op import Key

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def reason_against(key: Key) -> str | None:
    """Return why the Triton row kernels cannot run for `key` on this machine, or None."""
    if key.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return f"takes {names}, not {str(key.dtype).removeprefix('torch.')}"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "needs a C compiler to build Triton's launcher: install gcc or clang, or set CC"
    if torch.version.hip is None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if major < 8:
            return f"needs compute capability 8.0 or newer, this device has {major}.{minor}"
    return None
