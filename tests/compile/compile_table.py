"""The figures of tests/compile/golden.json as a page for people."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "kernels_compile.md"

_HEAD = """\
# The Triton row kernels, compiled

Triton {triton}, on a machine without a GPU: the host code runs on CPU tensors, and in place of a launch the binary for
the chip is kept and read. Nothing here has run on a GPU, and nothing here is a speed. 16 bytes divide a row of 151936
logits, not one of 151937; padded rows of 151937 begin on 16 bytes each, as in the buffer that the streaming driver
writes, and are read narrowly in their last block alone. With a reference, `row_stats` and `row_grad` stand for the ops
that read reference logits beside; with narrow_out, the gradient of fp32 logits is written in bf16. The tests in
`tests/compile` hold the kernels to this: no register in memory (but for the bytes they name), shared memory within the
chip's limit, 16 bytes per access where rows are aligned, nothing atomic. `python tests/compile/write_golden.py` writes
this page; it did so last on commit {commit}.

Registers are per thread. Scalar spills (AMD) are a wavefront's own registers kept in lanes of vector registers, not in
memory. Shared memory is bytes per program. Loads and stores are the accesses in the loops: bits each x how many.
"""

_PREFETCH = """\

## The next block of a row, read while one is computed

With two stages (`tl.range(..., num_stages=2)`), bf16 V=151936 entropy, the loop over full blocks. Read by hand from the
binaries that the same compiler made before and after commit fc11c5a; no script repeats this section:

| chip | op | instructions | of them while loads are in flight | registers |
|---|---|---|---|---|
| gfx942 | row_stats | 147 -> 171 | 2 -> 107 | 63 -> 64 |
| gfx942 | row_grad | 217 -> 227 | 5 -> 137 | 56 -> 56 |

CDNA's loops have them where rows begin on 16 bytes, without softcap and reference. That costs gfx942 one wavefront of
eight in row_stats of padded rows (63 -> 66 registers) and of fp16 (64 -> 65), and none in the rest, but for programs
that loop over rows, which no chip of AMD has. With a softcap or a reference two of eight and one of five would go in
places, and with reads of 16 bits three of five (gfx950: 95 -> 182 registers), so those loops have one stage. On sm_90
two stages leave the registers as they are (48 and 40), but go through 8 KiB of shared memory with two barriers per
block (170 -> 172 and 154 -> 155 PTX instructions); five to eight programs of a processor hide the latency without, so
NVIDIA's loops have one stage until a GPU says otherwise.
"""

_SAMPLING = """\

## The sampling kernels

A vocabulary of 151936, at a temperature, but for the greedy draw and min_p alone. `kept_sums` is with top-k, top-p and
min-p, whose search has eight thresholds at a time; the others have no loop over a row, or one. sm_90 and sm_120 in fp32
and sm_100 in bf16 keep to 128 registers with some bytes in memory.

| chip | dtype | kernel | registers | spilled bytes | scalar spills | shared | loads in loops | stores in loops |
|---|---|---|---|---|---|---|---|---|
"""

_DECODING = """\

## Attention of a decode step

A row per program and key-value head: 7 query heads per key-value head of size 64 (0.5B) and 128 (7B), 8 of size 256
(Gemma). bf16 is multiplied in the matrix units of every chip, fp32 in those of CDNA alone; on gfx1100 fp32 at a head
size of 256 has registers in memory. Keys and values come 16 bytes at a time; NVIDIA's copies to shared memory are not
among the loads.

| chip | dtype | model | registers | spilled bytes | scalar spills | shared | loads in loops | stores in loops |
|---|---|---|---|---|---|---|---|---|
"""

_MODULES = """\

## The fused modules

In bf16, norms at two numbers of hidden units. `rms_norm_for_linears` writes bf16 from an fp32 residual stream and has
six readers, whose gradients its backward adds; `add_rms_norm` adds an update in bf16 first, and has two readers.
Only the backward of a norm has a loop.

| chip | module | pass | registers | spilled bytes | scalar spills | shared | loads in loops | stores in loops |
|---|---|---|---|---|---|---|---|---|
"""

_OTHER_VERSION = """\

## Another version of Triton

With Triton 3.6.0, which torch 2.11 comes with (numpy 2.3.5: its interpreter needs one before 2.4),
`python -m pytest tests/compile -m "not slow"` passed as well on an earlier commit: 28 binaries differed from the
figures there, by -14 to +32 registers per thread and one in how a loop is unrolled; none had a register in memory. So
did the tests of `tests/interpreter`. A CI run does not repeat this; an environment of that version does, by the same
commands.
"""


def table_of(known: dict[str, Any]) -> str:
    """Return the page for what golden.json holds."""
    figures = known["figures"]
    plain = next(iter(figures["sm_90"]))
    lines = [_HEAD.format(triton=known["triton"], commit=known["commit"])]
    lines += [f"## {plain}, on every chip", "", *_table("chip", ((chip, figures[chip][plain]) for chip in figures))]
    lines += ["", "## The most over all cases of a chip", "", *_extremes(figures)]
    for chip in ("sm_90", "gfx942"):
        lines += ["", f"## {chip}", "", *_table("case", figures[chip].items())]
    sampling, decoding, modules = (
        "".join(f"{line}\n" for line in _three_levels(known[name])) for name in ("sampling", "decoding", "modules")
    )
    beside = _SAMPLING + sampling + _DECODING + decoding + _MODULES + modules
    return "\n".join(lines) + "\n" + _PREFETCH + beside + _OTHER_VERSION


def _table(first: str, rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    yield f"| {first} | op | registers | spilled bytes | scalar spills | shared | loads | stores |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, ops in rows:
        for op, each in ops.items():
            numbers = [each["registers"], each["spilled"], each.get("scalar_spills", "-"), each["shared"]]
            accesses = [_accesses(each["loads"]), _accesses(each["stores"])]
            yield f"| {' | '.join(map(str, [name, op, *numbers, *accesses]))} |"


def _three_levels(figures: dict[str, Any]) -> Iterator[str]:
    for chip, outer in figures.items():
        for first, inner in outer.items():
            for second, each in inner.items():
                numbers = [each["registers"], each["spilled"], each.get("scalar_spills", "-"), each["shared"]]
                accesses = [_accesses(each["loads"]), _accesses(each["stores"])]
                yield f"| {' | '.join(map(str, [chip, first, second, *numbers, *accesses]))} |"


def _extremes(figures: dict[str, Any]) -> Iterator[str]:
    yield "| chip | binaries | registers | spilled bytes | scalar spills | shared |"
    yield "|---|---|---|---|---|---|"
    for chip, cases in figures.items():
        every = [each for ops in cases.values() for each in ops.values()]
        most = [
            max(each.get(name, 0) for each in every) for name in ("registers", "spilled", "scalar_spills", "shared")
        ]
        yield f"| {' | '.join(map(str, [chip, len(every), *most]))} |"


def _accesses(table: dict[str, int]) -> str:
    return ", ".join(f"{bits} x {number}" for bits, number in table.items()) or "-"
