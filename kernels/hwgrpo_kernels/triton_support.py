"""Whether the Triton kernels can run here; imports no triton, so that it works without it."""

import os
import shutil
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import torch

from .ascend_tiles import LARGEST_VOCAB
from .op import Key

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ASCEND_DTYPES = DTYPES[1:]  # the vector units have no fp64
SAMPLING_DTYPES = DECODING_DTYPES = DTYPES[1:]


def reason_against(key: Key) -> str | None:
    """Return why the Triton row kernels cannot run for `key` on this machine, or None."""
    if key.device_type == "npu":
        return _reason_against_dtype(key, ASCEND_DTYPES) or _reason_against_ascend(key)
    return _reason_against_dtype(key, DTYPES) or reason_against_gpus()


def reason_against_sampling(key: Key) -> str | None:
    """Return why the Triton sampling kernels cannot run for `key` on this machine, or None."""
    return _reason_against_dtype(key, SAMPLING_DTYPES) or reason_against_gpus()


def reason_against_decoding(key: Key) -> str | None:
    """Return why the Triton kernels of a decode step cannot run for `key` on this machine, or None."""
    return _reason_against_dtype(key, DECODING_DTYPES) or reason_against_gpus()


def reason_against_gpus() -> str | None:
    """Return why Triton kernels cannot run on the GPUs of this machine, or None."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "needs a C compiler to build Triton's launcher: install gcc or clang, or set CC"
    if reason := _reason_against_headers():
        return reason
    if torch.version.hip is None and torch.cuda.is_available():
        capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
        index, (major, minor) = min(enumerate(capabilities), key=lambda each: each[1])
        if major < 8:
            hide = (
                "; hide it (CUDA_VISIBLE_DEVICES) to use the kernels on the others"
                if len(set(capabilities)) > 1
                else ""
            )
            return f"needs compute capability 8.0 or newer, and device {index} has {major}.{minor}{hide}"
    return None


def _reason_against_headers() -> str | None:
    folder = Path(sysconfig.get_path("include"))
    if (folder / "Python.h").exists():
        return None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"needs Python's headers to build Triton's launcher, and {folder} has no Python.h: install python{version}-dev "
        f"(Debian, Ubuntu), python{version}-devel (Fedora) or a Python that brings them"
    )


def _reason_against_dtype(key: Key, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if key.dtype in dtypes:
        return None
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"takes {names}, not {str(key.dtype).removeprefix('torch.')}"


def _reason_against_ascend(key: Key) -> str | None:
    """Return what triton-ascend lacks; its package replaces triton's in the same folder."""
    if key.shape_class > LARGEST_VOCAB:
        return f"compares indices in fp32, exact up to {LARGEST_VOCAB}, and the vocabulary may be larger"
    installed = {(each.metadata["Name"] or "").lower().replace("_", "-") for each in distributions()}
    if "triton-ascend" not in installed:
        return "needs triton-ascend, and the installed triton is another: pip uninstall triton, then install it"
    if "triton" in installed:
        return (
            "triton and triton-ascend are both installed, into one folder, and one has overwritten the other: "
            "pip uninstall both, then install triton-ascend"
        )
    if not (shutil.which("bishengir-compile") or os.environ.get("TRITON_NPU_COMPILER_PATH")):
        return "needs bishengir-compile, which comes with CANN: source the set_env.sh of CANN"
    if not (os.environ.get("CC") or shutil.which("clang++") or shutil.which("g++")):
        return "needs a C++ compiler to build Triton's launcher: install g++ or clang, or set CC"
    return _reason_against_headers()
