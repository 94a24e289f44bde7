"""What the Triton row ops are compiled for, and the figures they had when these were last written down."""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hwgrpo_kernels import default_registry, rows_triton
from hwgrpo_kernels.head import empty_rows

from tests.compile.triton_binaries import Binary
from tests.compile.triton_stub import CHIPS, StubDriver
from tests.support.numbers.row_cases import ROW_OPS, with_tile

GOLDEN = Path(__file__).with_name("golden.json")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
ALIGNED = 151936  # Qwen's vocabulary: 16 bytes divide a row
ODD = 151937
_2_GIB = 2**31
_OUTPUTS = {op.name: op.outputs for op in ROW_OPS}
OPS = ("row_stats", "row_grad")  # the kernels; each runs an op without and one with reference logits


class Case(NamedTuple):
    """One way to call the row ops.

    Args:
        dtype: of the logits, a key of `DTYPES`.
        vocab: V.
        entropy, softcap, row_scale: whether there are any; row_scale is a temperature per row.
        beyond_2_gib: whether the logits are part of a larger tensor, which AMD's compiler addresses otherwise.
        padded: whether the rows lie as the driver's buffer has them, each beginning on 16 bytes.
        persistent: whether a program takes many rows.
        reference: whether reference logits are read beside, by `row_stats_kl` and `row_grad_kl`.
        narrow_out: whether the gradient is written in bf16, for GEMMs, and not onto the logits.
    """

    dtype: str = "bf16"
    vocab: int = ALIGNED
    entropy: bool = True
    softcap: bool = False
    row_scale: bool = False
    beyond_2_gib: bool = False
    padded: bool = False
    persistent: bool = False
    reference: bool = False
    narrow_out: bool = False

    def __str__(self) -> str:
        switches = [name for name in self._fields[2:] if getattr(self, name)]
        return " ".join([self.dtype, f"V={self.vocab}", *switches])

    def op(self, kernel: str) -> str:
        """Return the op that runs a kernel of `OPS`."""
        return f"{kernel}_kl" if self.reference else kernel


PLAIN = Case()
FIRST_CHIPS = ("sm_90", "gfx942")
"""One of each vendor: in every run all of a kernel's cases are compiled for them, and few for the others."""
_MATRIX = [
    Case(dtype, vocab, entropy, softcap)
    for dtype in ("bf16", "fp32")
    for vocab in (ALIGNED, ODD)
    for entropy in (True, False)
    for softcap in (False, True)
]
_PAIRS = [
    PLAIN,
    Case(vocab=ODD, padded=True, reference=True),
    Case(vocab=ODD, softcap=True, reference=True),
    Case(vocab=ODD, entropy=False, row_scale=True, padded=True, persistent=True),
    Case("fp16", entropy=False, softcap=True, persistent=True),
    Case("fp16", vocab=ODD, row_scale=True),
    Case("fp16", vocab=ODD, softcap=True, row_scale=True, padded=True, reference=True),
    Case("fp32", entropy=False, row_scale=True),
    Case("fp32", softcap=True, row_scale=True, reference=True, narrow_out=True),
    Case("fp32", vocab=ODD, entropy=False, row_scale=True, persistent=True, narrow_out=True),
    Case("fp32", vocab=ODD, softcap=True, padded=True, persistent=True, narrow_out=True),
    Case("fp64", entropy=False),
    Case("fp64", vocab=ODD, softcap=True, row_scale=True, persistent=True, reference=True),
    Case("fp64", vocab=ODD, softcap=True, row_scale=True, padded=True, persistent=True),
]
"""Any two settings meet, in each combination that there is; a test says so."""
_QUICK = [
    *(Case(entropy=entropy, softcap=softcap) for entropy in (True, False) for softcap in (False, True)),
    Case(row_scale=True),
    Case(vocab=ODD),
    Case(vocab=ODD, padded=True),
    Case(persistent=True),
    Case(reference=True),
    Case("fp32", narrow_out=True),
    *(Case(dtype) for dtype in DTYPES),
]
ALL_AT_ONCE = Case(vocab=ODD, softcap=True, row_scale=True, padded=True, persistent=True)
_OTHERS = [Case(entropy=False, reference=True), ALL_AT_ONCE, ALL_AT_ONCE._replace(reference=True)]
_LARGE = Case(beyond_2_gib=True)  # on AMD's chips


def cases_of(chip: str) -> list[Case]:
    """Return every case of a chip of `CHIPS`.

    On every chip any two settings meet; one chip of each vendor has more, among them all combinations of `_MATRIX`.
    """
    more = [*_MATRIX, *_QUICK, *_OTHERS] if chip in FIRST_CHIPS else []
    large = [_LARGE] if CHIPS[chip].target.backend == "hip" else []
    return list(dict.fromkeys([*more, *_PAIRS, *large]))


def settings_of(case: Case) -> dict[str, Any]:
    """Return what a case chooses, each setting independently of the others but for narrow_out, which needs fp32."""
    return {
        "dtype": case.dtype,
        "rows": (case.vocab == ALIGNED, case.padded),
        "beside the logarithms": (case.entropy, case.reference),
        **{name: getattr(case, name) for name in ("softcap", "row_scale", "persistent", "narrow_out")},
    }


def is_quick(chip: str, case: Case) -> bool:
    """Whether a case is compiled in every run: many on one chip of each vendor, one on the others."""
    return case == PLAIN or (chip in FIRST_CHIPS and case in (*_QUICK, _LARGE))


def triton_ops() -> dict[str, Any]:
    """Return the Triton implementation of each op that has one."""
    found = {op.name: default_registry.implementations(op.name) for op in default_registry.ops()}
    return {name: each.function() for name, many in found.items() for each in many if each.name == "triton"}


def logits_of(case: Case, rows: int = 2) -> torch.Tensor:
    """Return logits of a case: memory nobody reads or writes."""
    dtype = DTYPES[case.dtype]
    if case.padded:
        return empty_rows(rows, case.vocab, dtype, torch.device("cpu"))
    whole = _2_GIB // (case.vocab * dtype.itemsize) + 1 if case.beyond_2_gib else rows
    return torch.empty(whole, case.vocab, dtype=dtype)[:rows]


def call_row_ops(
    case: Case, logits: torch.Tensor, targets: torch.Tensor | None = None, scale: float = 1.4, cap: float = 30.0
) -> None:
    """Call the statistics op and then the gradient op, as a loss does: in place but for `narrow_out`."""
    ops = _with_persistent_tiles(logits) if case.persistent else triton_ops()
    rows = logits.shape[0]
    if targets is None:
        targets = torch.zeros(rows, dtype=torch.int64)
    mapping = {
        "scale": scale,
        "squash": 1 / cap if case.softcap else 0.0,
        "row_scale": torch.ones(rows) if case.row_scale else None,
    }
    beside = {"ref_logits": logits_of(case, rows)} if case.reference else {}
    given = {"logits": logits, "targets": targets, **mapping, **beside}
    stats, grad = (case.op(kernel) for kernel in OPS)
    asked = {} if case.reference else {"with_entropy": case.entropy}
    found = dict(zip(_OUTPUTS[stats], ops[stats](**given, **asked)))
    g = torch.ones(()).expand(rows)
    wanted = {"grad_logprob": g, "grad_entropy": g if case.entropy else None}
    if case.reference:
        wanted["grad_kl"] = g
    if not case.entropy:
        found["entropy"] = None
    out = empty_rows(rows, case.vocab, torch.bfloat16, logits.device) if case.narrow_out else logits
    ops[grad](**given, **found, **wanted, out=out)


def _with_persistent_tiles(logits: torch.Tensor) -> dict[str, Any]:
    """Return the row ops with the current chip's tiles, but eight programs per processor for all rows."""
    found = {}
    for op in ROW_OPS:
        tile = rows_triton._tile(op.name, logits, logits, 0.0)
        found[op.name] = with_tile(op, tile._replace(per_processor=8))
    return found


@functools.cache
def _driver(chip: str) -> StubDriver:
    return StubDriver(chip)


@functools.cache
def binaries_of(chip: str, case: Case) -> dict[str, Binary]:
    """Compile the ops of a case for a chip; returns the binary of each kernel of `OPS`."""
    launched = _driver(chip).launches_of(lambda: call_row_ops(case, logits_of(case)))
    return {kernel.metadata.name.removesuffix("_kernel"): Binary(kernel) for kernel in launched}


def golden() -> dict[str, Any]:
    """Return what tests/compile/golden.json holds: Triton's version, and chip -> case -> op -> figures."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))
