"""DeepSpeed for the tests that need it: fetched once, compiled once, found by processes that are started with it."""

import os
import shutil
from subprocess import CompletedProcess

from launch import torchrun
from wheels import fetched

PACKAGES = (
    *("deepspeed", "einops", "hjson", "msgpack", "ninja", "py-cpuinfo"),
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
)


def with_deepspeed(ranks: int, *words: str, **extra: str) -> CompletedProcess[str]:
    """Run `torchrun --nproc-per-node RANKS WORDS` with DeepSpeed at hand.

    Raises:
        RuntimeError: pip cannot get it, or there is no C++ compiler.
    """
    if shutil.which("c++") is None:
        raise RuntimeError("DeepSpeed compiles a part of itself as it starts: install g++ (apt-get install g++)")
    folder = fetched("deepspeed", PACKAGES)
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    compiled = str(folder / "compiled")
    return torchrun(ranks, *words, packages=[folder], PATH=path, TORCH_EXTENSIONS_DIR=compiled, **extra)
