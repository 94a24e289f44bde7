"""A temperature that changes over the run: engine, policy and reference have that of the step, prefetched too."""

from pathlib import Path

import pytest

from hwgrpo.config.derived import sampling_by_step, temperature_at
from tests.support.runs import runs

SCHEDULE = ("rollout.temperature=0.5", "rollout.final_temperature=2")
UNCHANGED = ("optim.lr=1e-12", "algorithm.kl.coef=0.1", "trainer.save_every=1", "trainer.validate_every=0")
SOURCES = {
    "on demand": (),
    "prefetched": ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate"),
    "filtered": ("algorithm.filter_groups.enable=true",),
}


def test_it_changes_by_equal_amounts_from_the_first_step_to_the_last(tmp_path: Path):
    config = runs.small(tmp_path, *SCHEDULE)
    assert [temperature_at(config, step, 6) for step in range(1, 7)] == pytest.approx([0.5, 0.8, 1.1, 1.4, 1.7, 2.0])
    assert temperature_at(config, 1, 1) == 0.5
    assert sampling_by_step(config, 6)(6).temperature == 2.0
    constant = runs.small(tmp_path, "rollout.temperature=0.7")
    assert [temperature_at(constant, step, 6) for step in (1, 6)] == [0.7, 0.7]


@pytest.mark.parametrize("source", SOURCES)
def test_policy_and_reference_are_scored_at_the_temperature_of_the_engine(source: str, tmp_path: Path):
    runs.run(tmp_path / "run", *SCHEDULE, *UNCHANGED, *SOURCES[source])
    steps = [line for line in runs.metrics(tmp_path / "run") if "actor/loss" in line]
    assert [line["rollout/temperature"] for line in steps] == pytest.approx([0.5, 0.8, 1.1, 1.4, 1.7, 2.0])
    for line in steps:
        assert abs(line["rollout_corr/kl"]) < 1e-6
        assert abs(line["actor/kl_loss"]) < 1e-6
    assert steps[-1]["entropy"] > 1.5 * steps[0]["entropy"]


def test_a_resumed_run_goes_on_at_the_temperature_of_its_step(tmp_path: Path):
    words = (*SCHEDULE, "trainer.save_every=1", "trainer.validate_every=0", "algorithm.kl.coef=0.1")
    runs.run(tmp_path / "whole", *words, "trainer.max_steps=4")
    # a run that ends earlier has another schedule: stop it as a kill does
    assert runs.forked(lambda: _stopped_after(tmp_path / "parts", 2, *words, "trainer.max_steps=4")) == 0
    runs.run(tmp_path / "parts", *words, "trainer.max_steps=4")
    assert runs.everything(tmp_path / "parts") == runs.everything(tmp_path / "whole")


def _stopped_after(output: Path, step: int, *words: str) -> None:
    from hwgrpo.training import loop

    plain = loop.train_step

    def until(run, number: int) -> None:
        if number > step:
            raise KeyboardInterrupt
        plain(run, number)

    loop.train_step = until
    with pytest.raises(KeyboardInterrupt):
        runs.run(output, *words)
