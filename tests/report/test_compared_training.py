"""Real runs are compared: equal ones to the bit, and others by what was changed."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from hwgrpo.report.loaded_run import load_run
from hwgrpo.report.run_comparison import RunComparison, compare
from tests.support.runs import runs, supervised_runs

STOPPED = 3


@dataclass(frozen=True)
class Trained:
    """Runs that share all but what their name says."""

    folder: Path

    def compared(self, name: str) -> RunComparison:
        return compare(load_run(self.folder / "base"), load_run(self.folder / name))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    runs.run(folder / "base")
    runs.run(folder / "again", "trainer.validate_every=2", "trainer.save_every=4")
    runs.run(folder / "seed", "trainer.seed=1")
    runs.run(folder / "setting", "optim.lr=1e-2")
    runs.run(folder / "resumed", f"trainer.max_steps={STOPPED}")
    runs.run(folder / "resumed", "trainer.max_steps=8")
    return Trained(folder)


def test_the_same_run_again_is_identical_to_the_bit(trained: Trained):
    result = trained.compared("again")
    assert (result.verdict, result.reasons) == ("identical", ())
    assert result.completions == 6 * 16
    assert sum(each.compared > 0 for each in result.metrics) > 40
    assert {each.name for each in result.differences} == {"trainer.validate_every", "trainer.save_every"}


def test_a_resumed_and_longer_run_is_identical_in_the_shared_steps(trained: Trained):
    result = trained.compared("resumed")
    assert (result.verdict, result.reasons) == ("identical", ())
    assert result.steps == tuple(range(7))
    listed = {each.name: each.b for each in result.differences}
    assert set(listed) == {"trainer.max_steps", "starts"}
    assert listed["starts"].startswith(f"from step 0; resumed after step {STOPPED} from ")
    assert "checkpoints/step-" in listed["starts"]


def test_another_seed_draws_other_prompts_from_the_first_step_on(trained: Trained):
    result = trained.compared("seed")
    assert result.reasons == ("settings: trainer.seed",)
    [prompts] = [each for each in result.metrics if each.name == "logged completions: prompts"]
    assert prompts.step == 1
    assert result.equal_until is None or result.equal_until == 0


def test_another_learning_rate_changes_the_responses_of_the_second_step(trained: Trained):
    result = trained.compared("setting")
    assert [(each.name, each.a, each.b) for each in result.differences] == [("optim.lr", "0.001", "0.01")]
    assert result.equal_until == 1
    first = {each.name: each.step for each in result.metrics}
    assert first["logged completions: prompts"] is None
    assert first["logged completions: responses"] == first["actor/loss"] == 2
    assert first["actor/lr"] == 1


def test_supervised_runs_are_compared(tmp_path: Path):
    for name, words in (("a", ()), ("b", ()), ("c", ("optim.lr=1e-3",))):
        supervised_runs.run(tmp_path / name, "trainer.max_steps=3", *words)
    a, b, c = (load_run(tmp_path / name) for name in "abc")
    assert compare(a, b).verdict == "identical"
    result = compare(a, c)
    assert (result.verdict, result.equal_until) == ("parts", 1)
    assert result.parts_in == "actor/loss"
