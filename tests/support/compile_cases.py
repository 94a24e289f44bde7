"""What the Triton row ops are compiled for, and the figures they had when these were last written down."""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hwgrpo_kernels import default_registry
from triton_binaries import Binary
from triton_stub import CHIPS, StubDriver

GOLDEN = Path(__file__).parents[1] / "compile" / "golden.json"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ALIGNED = 151936  # Qwen's vocabulary: 16 bytes divide a row
ODD = 151937
_2_GIB = 2**31
OPS = ("row_stats", "row_grad")


class Case(NamedTuple):
    """One way to call the row ops.

    Args:
        dtype: of the logits, a key of `DTYPES`.
        vocab: V.
        entropy, softcap, row_scale: whether there are any; row_scale is a temperature per row.
        beyond_2_gib: whether the logits are part of a larger tensor, which AMD's compiler addresses otherwise.
    """

    dtype: str = "bf16"
    vocab: int = ALIGNED
    entropy: bool = True
    softcap: bool = False
    row_scale: bool = False
    beyond_2_gib: bool = False

    def __str__(self) -> str:
        switches = [name for name in self._fields[2:] if getattr(self, name)]
        return " ".join([self.dtype, f"V={self.vocab}", *switches])


PLAIN = Case()
_MATRIX = [
    Case(dtype, vocab, entropy, softcap)
    for dtype in DTYPES
    for vocab in (ALIGNED, ODD)
    for entropy in (True, False)
    for softcap in (False, True)
]


def cases_of(chip: str) -> list[Case]:
    """Return every case of a chip of `CHIPS`."""
    large = [Case(beyond_2_gib=True)] if CHIPS[chip].target.backend == "hip" else []
    return [*_MATRIX, Case(row_scale=True), *large]


def is_quick(chip: str, case: Case) -> bool:
    """Whether a case is compiled in every run: all of one chip of each vendor, one of the others."""
    return chip in ("sm_90", "gfx942") or case == PLAIN


def triton_ops() -> dict[str, Any]:
    """Return the Triton implementation of each op that has one."""
    found = {op.name: default_registry.implementations(op.name) for op in default_registry.ops()}
    return {name: each.function() for name, many in found.items() for each in many if each.name == "triton"}


def logits_of(case: Case, rows: int = 2) -> torch.Tensor:
    """Return logits of a case: memory nobody reads or writes."""
    dtype = DTYPES[case.dtype]
    whole = _2_GIB // (case.vocab * dtype.itemsize) + 1 if case.beyond_2_gib else rows
    return torch.empty(whole, case.vocab, dtype=dtype)[:rows]


def call_row_ops(
    case: Case, logits: torch.Tensor, targets: torch.Tensor | None = None, scale: float = 1.4, cap: float = 30.0
) -> None:
    """Call `row_stats` and then `row_grad`, in place, as a loss does."""
    ops = triton_ops()
    rows = logits.shape[0]
    if targets is None:
        targets = torch.zeros(rows, dtype=torch.int64)
    map_of_logits = (scale, 1 / cap if case.softcap else 0.0, torch.ones(rows) if case.row_scale else None)
    logprob, entropy, row_max, log_sum = ops["row_stats"](logits, targets, *map_of_logits, case.entropy)
    grad = torch.ones(()).expand(rows)
    pair = (entropy, grad) if case.entropy else (None, None)
    ops["row_grad"](logits, targets, logprob, pair[0], row_max, log_sum, grad, pair[1], *map_of_logits, logits)


@functools.cache
def _driver(chip: str) -> StubDriver:
    return StubDriver(chip)


@functools.cache
def binaries_of(chip: str, case: Case) -> dict[str, Binary]:
    """Compile the ops of a case for a chip; returns the binary of each op."""
    launched = _driver(chip).launches_of(lambda: call_row_ops(case, logits_of(case)))
    return {kernel.metadata.name.removesuffix("_kernel"): Binary(kernel) for kernel in launched}


def golden() -> dict[str, Any]:
    """Return what tests/compile/golden.json holds: Triton's version, and chip -> case -> op -> figures."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))
