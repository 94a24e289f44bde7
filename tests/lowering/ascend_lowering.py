"""Kernels as triton-ascend lowers them for an NPU that is not there, by the host code that would launch them.

Started by triton-ascend's environment: `python -m tests.lowering.ascend_lowering FILE` lowers every case of the row
kernels, the calls of other kernels and every planted violation, and writes a JSON object of `Lowered`. The compiler
that would follow is part of CANN, and the launch does nothing.
"""

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

CHIP = "Ascend910B2"
VECTOR_CORES = 47  # no chip has so many: the number must come from the driver
VOCAB = 20_011  # several whole blocks and a tail
DTYPES = ("bfloat16", "float16", "float32")


class Case(NamedTuple):
    """A launch: the op, the dtype of the logits, and what the row ops take besides."""

    op: str
    dtype: str
    entropy: bool
    softcap: bool
    row_scale: bool
    wide_out: bool = False  # row_grad of 16-bit logits into fp32

    @property
    def name(self) -> str:
        """One word for people and tests."""
        told = [name for name in ("entropy", "softcap", "row_scale", "wide_out") if getattr(self, name)]
        return "-".join([self.op, self.dtype, *told])


class Lowered(NamedTuple):
    """What came of a launch: the linalg text of the kernel, the grid, and its block."""

    linalg: str
    grid: tuple[int, int, int]
    block: int


_SWITCH = (False, True)
CASES = [Case(*each) for each in product(("row_stats", "row_grad"), DTYPES, _SWITCH, _SWITCH, _SWITCH)]
CASES += [Case("row_stats_kl", dtype, True, softcap, True) for dtype in DTYPES for softcap in _SWITCH]
CASES += [Case("row_grad_kl", *each, True) for each in product(DTYPES, _SWITCH, _SWITCH)]
CASES.append(Case("row_grad", "bfloat16", entropy=True, softcap=True, row_scale=True, wide_out=True))

NORMS = ("rms_norm", "rms_norm_for_linears", "add_rms_norm")
HIDDEN = (3584, 8192)
MODULES = [
    f"{module}-{dtype}-{kind}"
    for module in (*(f"{norm} {hidden}" for norm in NORMS for hidden in HIDDEN), "swiglu", "rotary")
    for dtype in ("bfloat16", "float32")
    for kind in ("forward", "backward")
]
"""Kernels of the fused modules."""
SAMPLING = {
    "block_sums": {"compare of integer vectors"},
    "pick": {"compare of integer vectors", "unresolved function"},
    "pick greedy": {"compare of integer vectors", "unresolved function"},
    "kept_sums top_k": {"compare of integer vectors", "vector of 64-bit integers"},
    "kept_sums top_p": {"compare of integer vectors", "vector of 64-bit integers"},
    "kept_sums min_p": {"compare of integer vectors"},
}
"""Sampling kernels -> what in them has no place on a vector core."""


def arguments(case: Case) -> dict[str, Any]:
    """Make the arguments of the implementation."""
    import torch
    from hwgrpo_kernels import default_registry
    from hwgrpo_kernels.op import Shape

    [op] = [op for op in default_registry.ops() if op.name == case.op]
    inputs = op.inputs(Shape(100, 0, VOCAB), getattr(torch, case.dtype), "cpu", "row_scale")
    inputs["squash"] = 1 / 3 if case.softcap else 0.0
    if not case.row_scale:
        inputs["row_scale"] = None
    if case.op == "row_stats":
        return inputs | {"with_entropy": case.entropy}
    if case.op == "row_stats_kl":
        return inputs
    if case.wide_out:
        inputs["out"] = torch.empty(inputs["logits"].shape)
    return inputs if case.entropy else inputs | {"entropy": None, "grad_entropy": None}


class AscendStub:
    """A driver for one NPU that launches nothing and keeps what it was to launch."""

    def __init__(self) -> None:
        from types import SimpleNamespace

        properties = {"max_shared_mem": 1, "num_aicore": 24, "num_vectorcore": VECTOR_CORES}
        self.linalg: dict[str, str] = {}  # by the hash of the compilation
        self.launched: list[tuple[str, tuple[int, int, int]]] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties, load_binary=lambda *_: (1, 1, 0, 0)
        )

    def install(self) -> None:
        """Make this the driver, and end compilation where CANN's compiler would begin."""
        import triton
        from triton.backends.ascend import compiler

        def add_stages(backend: Any, stages: dict[str, Any], options: Any) -> None:
            stages["ttir"] = lambda module, metadata: compiler.make_ttir(module, metadata, options)
            stages["ttadapter"] = lambda module, metadata: compiler.ttir_to_linalg(
                module, metadata, options, named_ops=True
            )
            stages["npubin"] = self._keep

        [backend] = triton.backends.backends.values()
        backend.compiler.add_stages = add_stages
        self._parse = compiler._parse_linalg_metadata
        triton.runtime.driver.set_active(self)

    def _keep(self, linalg: str, metadata: dict[str, Any]) -> bytes:
        self.linalg[metadata["hash"]] = linalg
        self._parse(linalg, metadata)
        return b"not compiled"

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Stand in for the C launcher that Triton would build for a kernel."""

        def launch(x: int, y: int, z: int, *_: Any) -> None:
            self.launched.append((self.linalg[metadata.hash], (x, y, z)))

        return launch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("npu", CHIP, 0)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def lower_all() -> dict[str, Lowered]:
    """Launch every case, and every planted kernel."""
    import torch
    from hwgrpo_kernels import rows_triton

    from tests.lowering.ascend_planted import PLANTED

    stub = AscendStub()
    stub.install()
    found: dict[str, Lowered] = {}
    for case in CASES:
        given = arguments(case)
        getattr(rows_triton, case.op)(**given)
        out = given.get("out", given["logits"])
        found[case.name] = Lowered(
            *stub.launched[-1], rows_triton._tile(case.op, given["logits"], out, given["squash"]).block
        )
    found |= _lower_modules(stub) | _lower_sampling(stub)
    size = 64
    for kind, kernel in PLANTED.items():
        x, index = torch.randn(size * size), torch.zeros(size, dtype=torch.int32)
        kernel[(1,)](x, index, torch.empty(size * size), 7, size)
        found[kind] = Lowered(*stub.launched[-1], size)
    return found


def _lower_modules(stub: AscendStub) -> dict[str, Lowered]:
    import torch
    from hwgrpo_kernels import module_triton

    from tests.support.numbers.kernel_calls import norm_calls, other_module_calls

    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        norms = {f"{name} {hidden}": call for hidden in HIDDEN for name, call in norm_calls(hidden, dtype).items()}
        for name, call in {**norms, **other_module_calls(dtype)}.items():
            call()
            hidden = int(name.split()[1]) if name in norms else 0
            block = max(module_triton.TILE, hidden) if name != "rotary" else module_triton.HEADS * 64
            for kind, launched in zip(("forward", "backward"), stub.launched[-2:], strict=True):
                found[f"{name}-{str(dtype)[6:]}-{kind}"] = Lowered(*launched, block)
    return found


def _lower_sampling(stub: AscendStub) -> dict[str, Lowered]:
    import torch

    from tests.support.numbers.kernel_calls import sampling_calls

    calls = sampling_calls(torch.bfloat16)
    found = {}
    for name in SAMPLING:
        calls[name]()
        found[name] = Lowered(*stub.launched[-1], 0)
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(lower_all()))
