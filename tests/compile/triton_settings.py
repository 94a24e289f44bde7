"""Triton as it comes: none of a developer's settings, none of the binaries of earlier runs."""

import os
import sys
import tempfile


def fresh_triton() -> tempfile.TemporaryDirectory[str]:
    """Drop the environment's settings of Triton and LLVM and return a new, empty cache, which becomes Triton's.

    Raises:
        RuntimeError: Triton is imported already, and read its settings then.
    """
    if "triton" in sys.modules:
        raise RuntimeError("triton is imported already, maybe interpreted: too late for settings")
    for name in [name for name in os.environ if name.startswith(("TRITON_", "MLIR_", "LLVM_", "AMDGCN_"))]:
        del os.environ[name]
    cache = tempfile.TemporaryDirectory(prefix="triton-cache-")
    os.environ["TRITON_CACHE_DIR"] = cache.name
    return cache
