"""Errors of our kernels and of the peers' against fp64, from one process in which Triton interprets; and their page."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.processes.launch import ROOT
from tests.support.processes.wheels import fetched

TABLE = ROOT / "benchmarks" / "results" / "kernels_peers_interpreter.md"
PACKAGES = ("liger-kernel", "cut-cross-entropy", "verl")

_HEAD = """\
# Our kernels and others' against fp64, in Triton's CPU interpreter

Measured on {date} on commit {commit} with {versions}.
Triton {triton}, torch {torch}, Python {python}.

One process on a CPU, in which Triton's interpreter runs every kernel from its own source, with bf16 repaired
(`tests/support/numbers/triton_interpreter.py`, `peers_interpreter.py`); the peers are called by the adapters of
`hwgrpo bench kernels`. Nothing here has run on a GPU, and nothing here is a speed: it is what the algorithms lose, not
what a device's instructions do.

{N} rows, {H} hidden units, {V} vocabulary entries; logits with standard deviation 3; loss sum(weight * logprob) with a
weight per row. Log-prob and entropy: largest difference from the definition in fp64 on the same inputs, in nats.
Gradients: norm of the difference, relative to the norm of the gradient. `python tests/peers/write_table.py` writes this
page; `tests/peers` holds to it.

`linear_token_loss` and `linear_logprob` are ours. By default their logits have the dtype of the operands, as those of
most peers; fp32 logits are a setting (`kernels.logits_dtype=float32`) and cost more memory and time. verl keeps its
logits in fp32 too, within its kernel. Liger scaled CE is torch here (CuTe on some NVIDIA devices), and so is Liger
GRPO, which returns a loss and no log-probs. cut-cross-entropy leaves out gradients below a threshold of its own, as it
does by default.
"""


def measured() -> dict[str, Any]:
    """Return what peers_worker.py prints."""
    folder = fetched("peers", PACKAGES)
    path = os.pathsep.join(str(ROOT / each) for each in (".", "backends", "kernels"))
    settings = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
        # cut-cross-entropy compiles a call of argsort, which torch cannot under -O beside an interpreting Triton
        "TORCHDYNAMO_DISABLE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-O", str(Path(__file__).with_name("peers_worker.py")), str(folder)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"peers_worker.py failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def page_of(found: dict[str, Any], date: str, commit: str) -> str:
    """Return the page for what was measured on a date with a commit."""
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in sorted(found["versions"]))
    shape = dict(zip("NHV", found["shape"]))
    head = _HEAD.format(date=date, commit=commit, versions=versions, **found["about"], **shape)
    lines = [head]
    for dtype, title in (("fp32", "fp32 operands"), ("bf16", "bf16 operands")):
        lines += [f"## {title}", "", *_table(found["figures"][dtype]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(figures: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| | log-prob | entropy | gradient of hidden states | gradient of weight | |"
    yield "|---|---|---|---|---|---|"
    for name, found in figures.items():
        columns = (found.get(each) for each in ("logprob", "entropy", "hidden.grad", "weight.grad"))
        cells = ["-" if each is None else f"{each:.1e}" for each in columns]
        note = f"on a device: {found['refused']}" if "refused" in found else ""
        yield f"| {' | '.join([name, *cells, note])} |"
