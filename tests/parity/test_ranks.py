"""Parity on two ranks: each trains its prompts, and the step is that of one."""

import json
from pathlib import Path

import pytest

from hwgrpo.cli.main import main
from hwgrpo.training.strategies import ddp
from tests.support.processes import ranks

ARGUMENTS = ("parity", "backend.name=cpu", "trainer.threads=1", "--json")


def report_of_two_ranks(folder: Path, *arguments: str) -> dict:
    """Return what rank 0 prints; the other rank prints nothing and has the same exit code."""

    def body(rank: int) -> None:
        import contextlib
        import io

        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = main([*ARGUMENTS, *arguments])
        (folder / f"rank{rank}").write_text(f"{code}\n{printed.getvalue()}")

    assert ranks.forked(2, body) == [0, 0]
    (code, printed), (other_code, nothing) = ((folder / f"rank{rank}").read_text().split("\n", 1) for rank in (0, 1))
    assert (code, nothing) == (other_code, "")
    report = json.loads(printed)
    assert code == ("0" if report["passed"] else "1")
    return report["comparisons"][0]


@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp2", "fsdp2 trainer.fsdp2.sync_every=micro_batch", "fsdp2 model.lora.rank=4"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_compute_the_step_of_one(strategy: str, dtype: str, tmp_path: Path):
    settings = f"trainer.strategy={strategy} model.dtype={dtype}".split()
    report = report_of_two_ranks(tmp_path, *settings)
    assert report["passed"], report
    assert "gradients, layer 1" in [stage["name"] for stage in report["stages"]]


def test_gradients_that_are_not_averaged_are_found(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(ddp.Ddp, "reduce_gradients", lambda self: None)
    report = report_of_two_ranks(tmp_path, "trainer.strategy=ddp", "model.dtype=float32")
    assert report["first_difference"] == "gradients, head"
