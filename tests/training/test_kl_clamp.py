"""The clamp of the KL that a run has is the one that its verdict compares with."""

import json

from tests.support.runs import runs


def test_a_run_at_its_own_clamp_says_so(tmp_path):
    runs.run(tmp_path / "run", "algorithm.kl.coef=0.25", "algorithm.kl.output_clamp=1e-9", "trainer.max_steps=3")
    verdict = json.loads((tmp_path / "run" / "summary.json").read_text())["verdict"]
    assert "KL to the reference is at its clamp (1e-09 of 1e-09)" in verdict["about"]
