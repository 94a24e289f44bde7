"""A gap on one rank is judged alike by all: they apply the same measures at the same step, and end together."""

import json
from pathlib import Path

import pytest

from hwgrpo.errors import RunError
from hwgrpo.training import setup
from hwgrpo.training.rollout_guard import RolloutGuard
from tests.support.processes import ranks
from tests.support.runs import faulty_engines, runs


def test_a_damaged_engine_of_one_rank_is_judged_alike_by_all(tmp_path: Path):
    words = (
        "trainer.strategy=ddp",
        "rollout.guard=act",
        "rollout.n=8",
        "rollout.probe_every=0",
        "trainer.max_steps=12",
    )

    def body(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                faulty_engines.install(patch, faulty_engines.damaged_layer)
            states = []
            plain = RolloutGuard.judge

            def judge(self: RolloutGuard, step: int, metrics: dict) -> dict:
                try:
                    return plain(self, step, metrics)
                finally:
                    states.append([self.state(), self.correction.name])

            patch.setattr(setup.RolloutGuard, "judge", judge)
            ended = "completed"
            try:
                runs.run(tmp_path / "run", *words)
            except RunError as error:
                ended = str(error)
            (tmp_path / f"{rank}.json").write_text(json.dumps([states, ended]))

    assert ranks.forked(2, body) == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    states, ended = first
    assert [correction for _, correction in states][:6] == ["none", "none", *["token_truncate"] * 3, "token_mask"]
    assert "of rank 1" in ended
