"""Which cases of the row ops are executed as they are lowered for Ascend, and what that takes; imports no triton."""

import shutil
from pathlib import Path

import torch
from hwgrpo_kernels import Op, default_registry

LLVM = Path("/usr/lib/llvm-19")
TOOLS = {name: str(LLVM / "bin" / name) for name in ("mlir-opt", "mlir-translate", "llc")}
RUNNER = LLVM / "lib" / "libmlir_c_runner_utils.so.19.1"
"""What lowered kernels are linked with."""
PLANTED = "a planted exponential to another base"


def missing() -> str | None:
    """Return what this machine lacks to execute lowered kernels, with the remedy, or None."""
    absent = [name for name in (*TOOLS.values(), "gcc") if shutil.which(name) is None]
    absent += [str(RUNNER)] if not RUNNER.exists() else []
    if not absent:
        return None
    packages = "mlir-19-tools libmlir-19 llvm-19 gcc"
    return f"{', '.join(absent)} not found; Debian and Ubuntu have them: apt-get install {packages}"


def cases() -> dict[str, tuple[Op, torch.dtype, str]]:
    """Return op, dtype and declared case by name: all in fp32, some in 16 bits."""
    found = {}
    for op in default_registry.ops():
        if op.name.startswith("row_"):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for case in op.cases if dtype == torch.float32 else ("plain", "softcap", "dead_row"):
                    found[f"{op.name}-{str(dtype)[6:]}-{case}"] = (op, dtype, case)
    return found


def names() -> list[str]:
    """Return the names of the cases."""
    return list(cases())
