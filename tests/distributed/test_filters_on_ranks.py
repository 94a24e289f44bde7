"""Ranks that train on tokens of a truncated distribution give what one process gives."""

from pathlib import Path

import pytest

from tests.support.processes import ranks
from tests.support.runs import runs

WORDS = ("rollout.top_k=3", "algorithm.kl.coef=0.1", "algorithm.entropy_coef=0.01", "trainer.max_steps=2")


@pytest.mark.parametrize("words", [("trainer.strategy=ddp",), ("trainer.strategy=fsdp2",)], ids=str)
def test_ranks_drop_the_tokens_that_one_process_drops(tmp_path: Path, words: tuple[str, ...]):
    runs.run(tmp_path / "one", *WORDS)

    def body(rank: int) -> None:
        runs.run(tmp_path / "two", *WORDS, *words)

    assert ranks.forked(2, body) == [0, 0]
    one, two = (list(runs.metrics(tmp_path / name)) for name in ("one", "two"))
    for name in ("rollout_corr/kl", "actor/entropy", "actor/kl_loss", "actor/grad_norm"):
        pairs = [(a[name], b[name]) for a, b in zip(one, two, strict=True) if name in a]
        assert pairs
        for alone, together in pairs:
            assert together == pytest.approx(alone, rel=1e-3, abs=1e-6), name
    assert all(abs(line["rollout_corr/kl"]) < 1e-6 for line in two if "rollout_corr/kl" in line)
