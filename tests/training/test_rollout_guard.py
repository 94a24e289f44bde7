"""`rollout.guard` in whole runs: faulty engines are named and survived or stopped, healthy ones left alone."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from hwgrpo.algorithms import gap_guard
from hwgrpo.config.schema import CorrectionConfig
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.observe.observer import Observer
from hwgrpo.rollout import engine_kind
from hwgrpo.rollout.local import LOCAL
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.training import loop
from tests.support.runs import faulty_engines, runs
from tests.training import healthy_runs

ENOUGH = ("trainer.prompts_per_step=8", "rollout.n=8", "trainer.save_final_model=true", "rollout.probe_every=0")
ACT = ("rollout.guard=act", *ENOUGH)
STALE = ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate")


@pytest.fixture
def notes(monkeypatch) -> list[str]:
    """Return the list that gets the guard's notes of all runs."""
    found: list[str] = []
    plain = Observer.note

    def note(self, text: str) -> None:
        found.extend([text] * text.startswith("rollout.guard"))
        plain(self, text)

    monkeypatch.setattr(Observer, "note", note)
    return found


def scale_thresholds(monkeypatch, factor: float) -> None:
    def scaled(limit: float | None) -> float | None:
        return None if limit is None else limit * factor

    table = tuple(
        dataclasses.replace(each, weigh=each.weigh * factor, reject=scaled(each.reject), stop=scaled(each.stop))
        for each in gap_guard.THRESHOLDS
    )
    monkeypatch.setattr(gap_guard, "THRESHOLDS", table)


class Interrupted(Exception):
    """Ends a run between two steps."""


def run_until(step: int, monkeypatch: pytest.MonkeyPatch, output: Path, *words: str) -> None:
    """Run and end without warning after a step."""
    plain = loop.train_step

    def interrupted(run: loop.Run, number: int) -> None:
        if number > step:
            raise Interrupted
        plain(run, number)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", interrupted)
        with pytest.raises(Interrupted):
            runs.run(output, *words)


def levels(output: Path) -> list[float]:
    return [line["rollout/guard_level"] for line in runs.metrics(output) if "rollout/guard_level" in line]


def gaps(output: Path, name: str = "rollout_corr/kl") -> list[float]:
    return [line[name] for line in runs.metrics(output) if name in line]


def without_level(results: dict) -> dict:
    lines = [{k: v for k, v in line.items() if k != "rollout/guard_level"} for line in results["metrics"]]
    return results | {"metrics": lines}


@pytest.mark.parametrize("guard", ["warn", "act"])
def test_a_healthy_run_is_that_without_a_guard(tmp_path, notes, guard):
    words = (*ENOUGH, "observe.warnings=false")
    runs.run(tmp_path / "off", "rollout.guard=off", *words)
    runs.run(tmp_path / guard, f"rollout.guard={guard}", *words)
    assert notes == []
    assert without_level(runs.everything(tmp_path / guard)) == runs.everything(tmp_path / "off")
    assert levels(tmp_path / guard) == [0.0] * 6 * (guard == "act")


def test_an_engine_that_never_takes_new_weights_is_named_and_stopped(tmp_path, notes, monkeypatch):
    faulty_engines.install(monkeypatch, faulty_engines.never_takes_new_weights)
    with pytest.raises(RunError, match=r"likely cause: stale weights") as error:
        runs.run(tmp_path / "run", *ACT, "optim.lr=1e-2", "trainer.max_steps=60")
    assert "check that rollout.engine=local applies new weights" in str(error.value)
    assert len(notes) == 2, "each measure once"
    assert all("likely cause: stale weights" in note for note in notes)
    assert [*dict.fromkeys(levels(tmp_path / "run"))] == [0, 1, 2]


def test_an_engine_in_bf16_is_left_alone(tmp_path, notes, monkeypatch):
    faulty_engines.install(monkeypatch, faulty_engines.samples_in_bf16)
    runs.run(tmp_path / "run", *ACT, "trainer.max_steps=20")
    assert notes == []
    assert set(levels(tmp_path / "run")) == {0.0}
    assert min(gaps(tmp_path / "run", "rollout_corr/k3_kl")) > 1e-8, "there was a gap"


def test_an_engine_in_bf16_is_named_where_its_gap_counts(tmp_path, notes, monkeypatch):
    faulty_engines.install(monkeypatch, faulty_engines.samples_in_bf16)
    scale_thresholds(monkeypatch, 1e-3)
    runs.run(tmp_path / "run", *ACT, "trainer.max_steps=10")
    assert notes
    assert all("possible cause: lower precision of the engine" in note for note in notes)
    assert levels(tmp_path / "run")[-1] >= 1


@pytest.mark.parametrize("temperature", [0.6, 1.6])
def test_an_engine_of_another_temperature_is_named_and_survived(tmp_path, notes, monkeypatch, temperature):
    faulty_engines.install(monkeypatch, faulty_engines.at_temperature(temperature))
    runs.run(tmp_path / "run", *ACT, "trainer.max_steps=12")
    assert notes
    for note in notes:
        assert "likely cause: another sampling temperature" in note
        [estimate] = re.findall(r"a temperature of about ([\d.]+)", note)
        assert float(estimate) == pytest.approx(temperature, rel=0.25)
    assert levels(tmp_path / "run")[-1] >= 1


def test_an_engine_with_a_damaged_layer_is_named_and_stopped(tmp_path, notes, monkeypatch):
    faulty_engines.install(monkeypatch, faulty_engines.damaged_layer)
    with pytest.raises(RunError, match="likely cause: wrong or damaged weights in the engine") as error:
        runs.run(tmp_path / "run", *ACT, "trainer.max_steps=20")
    assert "from step 1 on" in str(error.value)
    assert "the gap is too large for algorithm.correction.name=token_mask" in str(error.value)
    assert "worst token: '" in str(error.value)
    assert len(notes) == 2


def test_a_warning_states_each_level_once_and_changes_nothing(tmp_path, notes, monkeypatch):
    faulty_engines.install(monkeypatch, faulty_engines.damaged_layer)
    words = (*ENOUGH, "trainer.max_steps=16", "observe.warnings=false")
    runs.run(tmp_path / "off", "rollout.guard=off", *words)
    runs.run(tmp_path / "warn", *words)
    assert runs.everything(tmp_path / "warn") == runs.everything(tmp_path / "off")
    found = [note.partition("rollout.guard=act would now ")[2] for note in notes]
    assert [each.partition(",")[0] for each in found] == [
        "apply algorithm.correction.name=token_truncate",
        "apply algorithm.correction.name=token_mask",
        "end the run",
    ]


def test_the_correction_in_force_is_the_one_of_the_level(tmp_path, notes, monkeypatch):
    """From level 1 on the run is the one that was configured with that correction."""
    faulty_engines.install(monkeypatch, faulty_engines.at_temperature(1.6))
    scale_thresholds(monkeypatch, 1e-3)
    monkeypatch.setattr(gap_guard, "RAISE_AFTER", 1)
    monkeypatch.setattr(
        gap_guard,
        "THRESHOLDS",
        tuple(dataclasses.replace(each, reject=None, stop=None) for each in gap_guard.THRESHOLDS),
    )
    runs.run(tmp_path / "guarded", *ACT, "trainer.max_steps=3")
    assert levels(tmp_path / "guarded") == [1, 1, 1]
    runs.run(tmp_path / "plain", *ENOUGH, "rollout.guard=off", "trainer.max_steps=1")
    corrected = ("rollout.guard=off", "algorithm.correction.name=token_truncate", "trainer.max_steps=3")
    runs.run(tmp_path / "plain", *ENOUGH, *corrected)
    expected, found = runs.everything(tmp_path / "plain"), without_level(runs.everything(tmp_path / "guarded"))
    assert found["weights"] == expected["weights"]
    runs.run(tmp_path / "uncorrected", *ENOUGH, "rollout.guard=off", "trainer.max_steps=3")
    assert runs.everything(tmp_path / "uncorrected")["weights"] != found["weights"], "the correction has an effect"


def test_a_run_resumed_at_a_raised_level_is_the_uninterrupted_one(tmp_path, notes, monkeypatch):
    faulty_engines.install(monkeypatch, faulty_engines.at_temperature(1.6))
    words = (*ACT, "trainer.save_every=1", "trainer.validate_every=0", "trainer.validate_at_start=false")
    runs.run(tmp_path / "whole", *words, "trainer.max_steps=8")
    expected = runs.everything(tmp_path / "whole")
    stated = list(notes)
    for stop in (2, 4, 5):  # within a count, at a raised level, and again
        run_until(stop, monkeypatch, tmp_path / "parts", *words, "trainer.max_steps=8")
    runs.run(tmp_path / "parts", *words, "trainer.max_steps=8")
    found = runs.everything(tmp_path / "parts")
    assert levels(tmp_path / "whole")[3] >= 1
    assert _steps(found) == _steps(expected)
    assert found["weights"] == expected["weights"]
    again = [note for note in notes[len(stated) :] if "resumed" not in note]
    assert again == stated, "each note once"
    assert any("resumed at level 1: algorithm.correction.name=token_truncate" in note for note in notes)


def _steps(results: dict) -> list[dict]:
    return [line for line in results["metrics"] if "reward" in line]


def test_fresher_weights_are_sampled_with_and_withdrawn_when_the_gap_is_small(tmp_path, notes, monkeypatch):
    """A staleness of 1 gives the gap that it is to be lowered for; without it, the gap is gone."""
    scale_thresholds(monkeypatch, 1e-4)
    monkeypatch.setattr(
        gap_guard,
        "THRESHOLDS",
        tuple(
            dataclasses.replace(each, stop=None) for each in gap_guard.THRESHOLDS if each.metric == "rollout_corr/kl"
        ),
    )
    monkeypatch.setattr(gap_guard, "RAISE_AFTER", 2)
    monkeypatch.setattr(gap_guard, "LOWER_AFTER", 3)
    words = (*ACT, *STALE, "trainer.save_every=1", "trainer.validate_every=0", "trainer.validate_at_start=false")
    runs.run(tmp_path / "whole", *words, "trainer.max_steps=16")
    found = levels(tmp_path / "whole")
    ages = gaps(tmp_path / "whole", "rollout/staleness_max")
    assert found[:6] == [0, 0, 1, 1, 2, 2]
    assert ages[:7] == [0, 1, 1, 1, 1, 1, 0], "the batch of the step after the decision is in flight"
    lowered = next(i for i, level in enumerate(found) if level < 2 and i > 5)
    assert set(ages[6 : lowered + 2]) == {0}
    assert ages[lowered + 2] == 1
    assert any("back to algorithm.correction.name=token_mask" in note for note in notes)
    for stop in (5, 6, lowered + 1, lowered + 2):
        run_until(stop, monkeypatch, tmp_path / "parts", *words, "trainer.max_steps=16")
    runs.run(tmp_path / "parts", *words, "trainer.max_steps=16")
    whole, parts = runs.everything(tmp_path / "whole"), runs.everything(tmp_path / "parts")
    assert _steps(parts) == _steps(whole)
    assert parts["weights"] == whole["weights"]


def test_other_settings_begin_at_level_0(tmp_path, notes, monkeypatch):
    faulty_engines.install(monkeypatch, faulty_engines.at_temperature(1.6))
    runs.run(tmp_path / "run", *ACT, "trainer.max_steps=4")
    assert levels(tmp_path / "run")[-1] == 1
    runs.run(tmp_path / "run", *ACT, "trainer.max_steps=5", "algorithm.correction.name=token_truncate")
    assert levels(tmp_path / "run")[-1] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["rollout.top_p=0.9"],
            "has no effect with rollout.top_p=0.9, rollout.engine='sglang_server'",
        ),
        (["rollout.top_k=5"], "has no effect with rollout.top_k=5"),
        (["rollout.min_p=0.1"], "has no effect with rollout.min_p=0.1"),
    ],
)
def test_a_guard_of_truncated_sampling_is_refused(tmp_path, words, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        runs.small(tmp_path, "rollout.guard=act", "rollout.engine=sglang_server", *words)


def test_the_gap_of_truncated_sampling_is_not_judged_where_the_engine_reports_no_floors(tmp_path, notes, monkeypatch):
    plain = LocalEngine.generate
    monkeypatch.setattr(LocalEngine, "generate", lambda *words: dataclasses.replace(plain(*words), floors=None))
    monkeypatch.setattr(engine_kind, "engine_kind", lambda rollout: dataclasses.replace(LOCAL, reports_floors=False))
    runs.run(tmp_path / "run", *ENOUGH, "rollout.top_k=2", "trainer.max_steps=5")
    assert notes == []
    assert max(gaps(tmp_path / "run")) > 0.01, "by design"


@pytest.mark.parametrize("filters", ["rollout.top_k=2", "rollout.top_p=0.8", "rollout.min_p=0.1"])
def test_truncated_sampling_has_no_gap(tmp_path, filters):
    runs.run(tmp_path / "run", *ENOUGH, filters, "rollout.temperature=1.2", "trainer.max_steps=4")
    assert max(map(abs, gaps(tmp_path / "run"))) < 1e-6


def test_truncated_sampling_in_several_updates_has_no_gap_and_no_kl_at_the_start(tmp_path):
    words = ("rollout.top_k=2", "trainer.prompts_per_update=4", "algorithm.kl.coef=0.1", "trainer.max_steps=3")
    runs.run(tmp_path / "run", *ENOUGH, *words, "optim.lr=1e-7")
    assert max(map(abs, gaps(tmp_path / "run"))) < 1e-6
    assert max(map(abs, gaps(tmp_path / "run", "actor/kl_loss"))) < 1e-4


def test_a_resumed_run_drops_the_tokens_of_prefetched_responses_too(tmp_path, monkeypatch):
    words = ("rollout.top_p=0.8", "trainer.save_every=1", *STALE, *ENOUGH)
    runs.run(tmp_path / "whole", *words, "trainer.max_steps=5")
    run_until(3, monkeypatch, tmp_path / "parts", *words, "trainer.max_steps=5")
    runs.run(tmp_path / "parts", *words, "trainer.max_steps=5")
    whole, parts = runs.everything(tmp_path / "whole"), runs.everything(tmp_path / "parts")
    assert _steps(parts) == _steps(whole)
    assert parts["weights"] == whole["weights"]


def test_a_faulty_engine_with_truncated_sampling_is_named(tmp_path, notes, monkeypatch):
    faulty_engines.install(monkeypatch, faulty_engines.at_temperature(1.6))
    runs.run(tmp_path / "run", *ENOUGH, "rollout.top_k=2", "trainer.max_steps=4")
    assert len(notes) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("algorithm.loss.name=gspo", "algorithm.correction.name=sequence_truncate"),
        STALE,
        ("trainer.prompts_per_update=4", "trainer.epochs_per_batch=2"),
        ("algorithm.correction.name=sequence_mask", "trainer.prompts_per_update=4"),
    ],
    ids=["gspo", "stale", "several updates", "sequence mask"],
)
def test_every_path_logs_the_gap(tmp_path, words):
    runs.run(tmp_path / "run", *ENOUGH, *words, "trainer.max_steps=2")
    names = ("kl", "chi2_token", "rollout_is_eff_sample_size", "log_ratio_max", "log_ratio_slope", "log_ratio_r2")
    for name in names:
        values = gaps(tmp_path / "run", f"rollout_corr/{name}")
        assert len(values) == 2
        assert all(map(math.isfinite, values))
    assert gaps(tmp_path / "run", "rollout_corr/log_ratio_max")[0] < 1e-3


RECORDED = [json.loads(line) for line in healthy_runs.FILE.read_text().splitlines()]


@pytest.mark.parametrize("variant", healthy_runs.VARIANTS)
def test_recorded_healthy_runs_raise_no_level(variant):
    recorded = [each for each in RECORDED if each["variant"] == variant]
    assert [each["seed"] for each in recorded] == list(healthy_runs.SEEDS)
    for each in recorded:
        columns = [each[name] for name in healthy_runs.NAMES]
        series = [dict(zip(healthy_runs.NAMES, values, strict=True)) for values in zip(*columns, strict=True)]
        assert len(series) >= 25
        state, steps = gap_guard.GuardState(), gap_guard.measures(CorrectionConfig(), max_staleness=1)
        for number, metrics in enumerate(series, 1):
            state = gap_guard.advance(state, steps, number, metrics)
            assert state.level == 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", healthy_runs.VARIANTS)
def test_a_healthy_run_of_the_recipe_raises_no_level_and_its_gaps_are_those_recorded(variant, tmp_path):
    """That no other seed raises one is seen from the recorded runs: this one shows that they are of today's code."""
    lines, notes = healthy_runs.run(tmp_path / "run", 0, variant)
    assert notes == []
    assert {line["rollout/guard_level"] for line in lines} == {0.0}
    [recorded] = [each for each in RECORDED if (each["variant"], each["seed"]) == (variant, 0)]
    for name in ("training/rollout_probs_diff_mean", "rollout_corr/log_ratio_max"):  # of one size on any processor
        found, expected = (sum(values) / len(values) for values in ([line[name] for line in lines], recorded[name]))
        assert expected / 3 < found < 3 * expected, name
