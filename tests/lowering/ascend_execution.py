"""What triton-ascend lowers kernels to, executed on the CPU: MLIR 19 makes machine code of the linalg text.

Started by triton-ascend's environment: `python -m tests.lowering.ascend_execution FILE` runs the row ops' declared
cases, and tests of the fused modules, through the host code that would launch them on an NPU, and writes a JSON
object: case -> what is wrong with it, or nothing.
"""

import ctypes
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from hwgrpo_kernels.op import Shape
from hwgrpo_kernels.tiles import Tile

from tests.interpreter import test_module_kernels
from tests.lowering.ascend_execution_cases import LLVM, MODULES, PLANTED, PLANTED_IN_MODULES, TOOLS, cases
from tests.lowering.ascend_lowering import AscendStub
from tests.support.numbers.op_agreement import assert_agrees
from tests.support.numbers.row_cases import STATS, with_tile

TILE = Tile(lanes=1, width=64, warps=0, per_processor=1)  # five whole blocks and a tail of eleven
SHAPE = Shape(5, 0, 331)
CORES = 2  # each takes several rows
_PASSES = (
    *("--eliminate-empty-tensors", "--empty-tensor-to-alloc-tensor", "--convert-elementwise-to-linalg"),
    "--one-shot-bufferize=bufferize-function-boundaries=1 allow-return-allocs-from-loops=true",
    *("--convert-linalg-to-loops", "--arith-expand=include-bf16=true", "--expand-strided-metadata", "--lower-affine"),
    *("--convert-scf-to-cf", "--convert-math-to-llvm", "--convert-math-to-libm", "--convert-arith-to-llvm"),
    *("--finalize-memref-to-llvm", "--convert-cf-to-llvm", "--convert-func-to-llvm"),
    "--reconcile-unrealized-casts",
)


class ExecutingStub(AscendStub):
    """A driver for one NPU of a few cores that executes on the CPU what it is to launch."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.utils.get_device_properties = lambda device: {"max_shared_mem": 1, "num_vectorcore": CORES}
        self.folder = folder
        self.change = ("", "")  # of the text before it is executed
        self.executed = 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            *_, last_hook = (place for place, each in enumerate(rest) if isinstance(each, dict))
            given = [each for each in rest[last_hook + 1 :] if each is not None]
            text = self.linalg[metadata.hash].replace(*self.change)
            kernel = _compiled(text, metadata.name.split()[0], self.folder)
            words = [_memory(None), _memory(None), *map(_word, given)]
            flat = [each for word in words for each in word]
            for program in product(range(x), range(y), range(z)):
                kernel(*flat, *map(ctypes.c_int32, (x, y, z, *program)))
            self.executed += 1

        return launch


def _word(value: Any) -> list[Any]:
    """Return a kernel's argument as the executed function takes it."""
    if isinstance(value, torch.Tensor):
        return _memory(value)
    return [ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int32(value)]


def _memory(tensor: torch.Tensor | None) -> list[Any]:
    """Return a one-dimensional memref: allocation, first element, offset, size, stride."""
    address = ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
    elements = 0 if tensor is None else tensor.untyped_storage().nbytes() // tensor.element_size()
    return [address, address, ctypes.c_int64(0), ctypes.c_int64(elements), ctypes.c_int64(1)]


@cache
def _compiled(text: str, name: str, folder: Path) -> Any:
    base = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    files = {kind: str(base.with_suffix(f".{kind}")) for kind in ("mlir", "llvm", "ll", "o", "so")}
    Path(files["mlir"]).write_text(re.sub(r"\{hivm\.[^}]*\}", "", text))
    library = LLVM / "lib"
    for command in (
        [TOOLS["mlir-opt"], files["mlir"], *_PASSES, "-o", files["llvm"]],
        [TOOLS["mlir-translate"], files["llvm"], "--mlir-to-llvmir", "-o", files["ll"]],
        [TOOLS["llc"], "-O2", "-filetype=obj", "-relocation-model=pic", files["ll"], "-o", files["o"]],
        ["gcc", "-shared", "-o", files["so"], files["o"], "-lm", f"-L{library}", f"-Wl,-rpath,{library}",
         "-l:libmlir_c_runner_utils.so.19.1"],
    ):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return getattr(ctypes.CDLL(files["so"]), name)


def _what_is_wrong(op: Any, dtype: torch.dtype, case: str) -> str:
    try:
        assert_agrees(op, with_tile(op, TILE), op.inputs(SHAPE, dtype, "cpu", case), dtype)
    except AssertionError as error:
        return str(error) or "it does not agree"
    return ""


def _what_a_test_finds(check: str, parameters: dict[str, Any]) -> str:
    try:
        getattr(test_module_kernels, check)(**parameters)
    except AssertionError as error:
        return str(error) or "it does not agree"
    return ""


def run_all(folder: Path) -> dict[str, str]:
    """Execute every case, and the planted one."""
    stub = ExecutingStub(folder)
    stub.install()
    test_module_kernels.DEVICE = "cpu"  # hw: a stub's
    found = {}
    for name, (op, dtype, case) in cases().items():
        before = stub.executed
        found[name] = _what_is_wrong(op, dtype, case)
        if stub.executed == before:
            found[name] = "nothing was executed"
    for name, (check, parameters) in MODULES.items():
        before = stub.executed
        found[name] = _what_a_test_finds(check, parameters)
        if stub.executed == before:
            found[name] = "nothing was executed"
    stub.change = ("math.exp2", "math.exp")
    found[PLANTED] = _what_is_wrong(STATS, torch.float32, "plain")
    stub.change = ("math.rsqrt", "math.sqrt")
    found[PLANTED_IN_MODULES] = _what_a_test_finds(*MODULES["rms_norm-bfloat16"])
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        Path(sys.argv[1]).write_text(json.dumps(run_all(Path(scratch))))
