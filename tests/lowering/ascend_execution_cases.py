"""Which cases of kernels are executed as they are lowered for Ascend, and what that takes; imports no triton."""

import shutil
from pathlib import Path
from typing import Any

import torch
from hwgrpo_kernels import Op, default_registry

LLVM = Path("/usr/lib/llvm-19")
TOOLS = {name: str(LLVM / "bin" / name) for name in ("mlir-opt", "mlir-translate", "llc")}
RUNNER = LLVM / "lib" / "libmlir_c_runner_utils.so.19.1"
"""What lowered kernels are linked with."""
PLANTED = "a planted exponential to another base"
PLANTED_IN_MODULES = "a planted root that is not inverted"
_FP32 = torch.float32
MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (f"test_{check}", parameters)
    for dtype in (torch.float32, torch.bfloat16)
    for name, (check, parameters) in {
        f"rms_norm-{str(dtype)[6:]}": ("rms_norm_and_its_gradients", {"shape": (67, 48), "dtype": dtype}),
        f"add_rms_norm-{str(dtype)[6:]}": ("a_sum_and_its_norm_with_their_gradients", {"dtype": dtype}),
        f"swiglu-{str(dtype)[6:]}": ("swiglu_and_its_gradients", {"shape": (2, 4099), "dtype": dtype}),
        f"rotary-{str(dtype)[6:]}": (
            "rotation_and_its_gradient",
            {"heads": 9, "size": 20, "rows": 2, "heads_first": False, "dtype": dtype, "angles": _FP32},
        ),
    }.items()
}
"""Name -> test of tests/interpreter/test_module_kernels.py and its parameters."""


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
    return [*cases(), *MODULES]
